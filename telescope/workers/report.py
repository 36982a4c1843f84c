"""What a worker says of a rollout: its score in a form that travels, or its failure with a kind and a cause.

Owns the limits of what an environment may write into a run directory, and that no secret gets there.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Collection, Iterator, Mapping
from numbers import Real
from typing import Any

from telescope.config.secrets import redacted, scrubbed
from telescope.environments.base import Prompt, Reward
from telescope.environments.chat import Recording
from telescope.environments.failures import GraderError, PolicyError
from telescope.records import FailureKind, RolloutOrder
from telescope.wire.messages import RolloutDone, RolloutFailed
from telescope.workers.load import describe
from telescope.workers.texts import MAX_CAUSE_CHARACTERS, MAX_CHARACTERS, fit

MAX_NAME_CHARACTERS = 200
MAX_GOLDEN_ANSWERS = 64
MAX_TAGS = 32
MAX_INFO_CHARACTERS = 50_000
MAX_INFO_DEPTH = 64
REWARD_LIMIT = 1e6
"""Larger totals are mistakes, and their squares and differences would overflow the advantages."""


class BadReward(GraderError):
    """What the environment returned is no usable reward."""


def check_reward(reward: Reward) -> Reward:
    """Raises `BadReward` unless the total and every metric is a finite number, the total within `REWARD_LIMIT`."""
    if not isinstance(reward, Reward):
        raise BadReward(f"play returned {type(reward).__name__}, not a Reward")
    if not isinstance(reward.metrics, Mapping):
        raise BadReward(f"the reward's metrics are {_kind(reward.metrics)}, not a dict of numbers")
    with _no_form_is_bad("numbers"):
        for name, value in (("total", reward.total), *reward.metrics.items()):
            if not isinstance(value, Real) or not math.isfinite(value):
                raise BadReward(f"the reward's {name} is {value!r}, not a finite number")
    if abs(reward.total) > REWARD_LIMIT:
        raise BadReward(f"the reward's total is {reward.total!r}, beyond ±{REWARD_LIMIT:.0e}: scale the environment's rewards")
    return reward


def blamed(error: PolicyError) -> Reward:
    """The score of a rollout that the policy itself has ended."""
    return Reward(error.total, error.metrics, tags=(error.tag,), info={"policy_error": str(error)})


def done(
    order: RolloutOrder, prompt: Prompt, reward: Reward, recording: Recording, started_ns: int, secrets: Collection[str]
) -> RolloutDone:
    """The score as it travels. Raises `BadReward` where a part of the reward has no form that does."""
    with _no_form_is_bad("metrics"):
        metrics = {_clean(name, secrets, MAX_NAME_CHARACTERS): float(value) for name, value in reward.metrics.items()}
    with _no_form_is_bad("golden_answers"):
        golden_answers = _golden_answers(reward, prompt, secrets)
    with _no_form_is_bad("tags"):
        tags = _tags(reward, secrets)
    with _no_form_is_bad("info"):
        info = info_text(reward.info, secrets)
    return RolloutDone(
        rollout_id=order.rollout_id,
        attempt=order.attempt,
        reward=float(reward.total),
        metrics=metrics,
        branch_lengths=tuple(len(branch.ids) for branch in recording.branches),
        prompt_tokens=recording.prompt_tokens,
        completion_tokens=recording.completion_tokens,
        turns=recording.turns,
        finish_reason=recording.finish_reason,
        prompt_text=_clean(recording.prompt_text, secrets),
        completion_text=_clean(recording.completion_text, secrets),
        golden_answers=golden_answers,
        started_ns=started_ns,
        generated_ns=recording.generated_ns,
        scored_ns=time.time_ns(),
        tags=tags,
        info=info,
    )


@contextlib.contextmanager
def _no_form_is_bad(part: str) -> Iterator[None]:
    """Whatever a user's object raises on its way into a row (its `__str__` may raise anything) is a `BadReward`."""
    try:
        yield
    except BadReward:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 user code, counted by its cause
        raise BadReward(f"the reward's {part} can't be written down: {describe(error)}") from None


def _clean(text: object, secrets: Collection[str], most: int = MAX_CHARACTERS) -> str:
    return fit(scrubbed(str(text), secrets), most)


def _texts(given: Any, part: str) -> tuple[Any, ...]:
    """One text counts as a tuple of one. Raises `BadReward` for what has no order, or is no sequence at all."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list | tuple):
        raise BadReward(f"the reward's {part} are {_kind(given)}, not a tuple of texts")
    return tuple(given)


def _kind(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def failed(
    order: RolloutOrder, cause: str, kind: FailureKind = "infrastructure", secrets: Collection[str] = ()
) -> RolloutFailed:
    return RolloutFailed(order.rollout_id, order.attempt, fit(scrubbed(cause, secrets), MAX_CAUSE_CHARACTERS), kind)


def _golden_answers(reward: Reward, prompt: Prompt, secrets: Collection[str]) -> tuple[str, ...]:
    """At most `MAX_GOLDEN_ANSWERS`, together no longer than one text may be."""
    given = _texts(reward.golden_answers, "golden_answers") or ((prompt.answer,) if prompt.answer else ())
    answers, left = [], MAX_CHARACTERS
    for answer in given[:MAX_GOLDEN_ANSWERS]:
        if left <= 0:
            break
        answers.append(_clean(answer, secrets, left))
        left -= len(answers[-1])
    return tuple(answers)


def _tags(reward: Reward, secrets: Collection[str]) -> tuple[str, ...]:
    tags = dict.fromkeys(_clean(tag, secrets, MAX_NAME_CHARACTERS) for tag in _texts(reward.tags, "tags"))
    return tuple(tags)[:MAX_TAGS]


def info_text(info: Mapping[str, Any], secrets: Collection[str]) -> str:
    """The info as JSON of at most `MAX_INFO_CHARACTERS` (cut, it is a text under "cut"), texts under secret names and secret
    values redacted; what JSON has no form for counts by its text."""
    if not isinstance(info, Mapping):
        raise BadReward(f"the reward's info is {_kind(info)}, not a dict")
    if not info:
        return ""
    text = json.dumps(redacted(_plain(info)), ensure_ascii=False, allow_nan=True)
    text = fit(scrubbed(text, secrets), len(text))
    return text if len(text) <= MAX_INFO_CHARACTERS else json.dumps({"cut": fit(text, MAX_INFO_CHARACTERS)}, ensure_ascii=False)


def _plain(value: Any, left: int = MAX_INFO_DEPTH) -> Any:
    """JSON's own kinds: other keys and objects as text, numbers that are not finite too. Raises `BadReward` for what is nested
    deeper than `left`, which what contains itself is."""
    if isinstance(value, Mapping | list | tuple | set | frozenset) and left == 0:
        raise BadReward(f"the reward's info is nested more than {MAX_INFO_DEPTH} deep, or contains itself")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, left - 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, left - 1) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    return str(value)
