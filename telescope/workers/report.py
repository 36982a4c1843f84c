"""What a worker says of a rollout: its score in a form that travels, or its failure with a kind and a cause.

Owns the limits of what an environment may write into a run directory, and that no secret gets there.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any

from telescope.config.secrets import redacted, scrubbed
from telescope.environments.base import Prompt, Reward
from telescope.environments.chat import Recording
from telescope.environments.failures import GraderError, PolicyError
from telescope.records import FailureKind, RolloutOrder
from telescope.wire.messages import RolloutDone, RolloutFailed
from telescope.workers.texts import MAX_CAUSE_CHARACTERS, MAX_CHARACTERS, fit

MAX_NAME_CHARACTERS = 200
MAX_GOLDEN_ANSWERS = 64
MAX_TAGS = 32
MAX_INFO_CHARACTERS = 50_000
REWARD_LIMIT = 1e6
"""Larger totals are mistakes, and their squares and differences would overflow the advantages."""


class BadReward(GraderError):
    """What the environment returned is no usable reward."""


def check_reward(reward: Reward) -> Reward:
    """Raises `BadReward` unless the total and every metric is a finite number, the total within `REWARD_LIMIT`."""
    if not isinstance(reward, Reward):
        raise BadReward(f"play returned {type(reward).__name__}, not a Reward")
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
    return RolloutDone(
        rollout_id=order.rollout_id,
        attempt=order.attempt,
        reward=float(reward.total),
        metrics={fit(name, MAX_NAME_CHARACTERS): float(value) for name, value in reward.metrics.items()},
        branch_lengths=tuple(len(branch.ids) for branch in recording.branches),
        prompt_tokens=recording.prompt_tokens,
        completion_tokens=recording.completion_tokens,
        turns=recording.turns,
        finish_reason=recording.finish_reason,
        prompt_text=fit(recording.prompt_text),
        completion_text=fit(recording.completion_text),
        golden_answers=_golden_answers(reward, prompt, secrets),
        started_ns=started_ns,
        generated_ns=recording.generated_ns,
        scored_ns=time.time_ns(),
        tags=_tags(reward, secrets),
        info=info_text(reward.info, secrets),
    )


def failed(
    order: RolloutOrder, cause: str, kind: FailureKind = "infrastructure", secrets: Collection[str] = ()
) -> RolloutFailed:
    return RolloutFailed(order.rollout_id, order.attempt, fit(scrubbed(cause, secrets), MAX_CAUSE_CHARACTERS), kind)


def _golden_answers(reward: Reward, prompt: Prompt, secrets: Collection[str]) -> tuple[str, ...]:
    """At most `MAX_GOLDEN_ANSWERS`, together no longer than one text may be."""
    given = reward.golden_answers or ((prompt.answer,) if prompt.answer else ())
    answers, left = [], MAX_CHARACTERS
    for answer in ((given,) if isinstance(given, str) else given)[:MAX_GOLDEN_ANSWERS]:
        if left <= 0:
            break
        answers.append(fit(scrubbed(str(answer), secrets), left))
        left -= len(answers[-1])
    return tuple(answers)


def _tags(reward: Reward, secrets: Collection[str]) -> tuple[str, ...]:
    given = (reward.tags,) if isinstance(reward.tags, str) else reward.tags
    tags = dict.fromkeys(fit(scrubbed(str(tag), secrets), MAX_NAME_CHARACTERS) for tag in given)
    return tuple(tags)[:MAX_TAGS]


def info_text(info: Mapping[str, Any], secrets: Collection[str]) -> str:
    """The info as JSON of at most `MAX_INFO_CHARACTERS` (cut, it is a text under "cut"), texts under secret names and secret
    values redacted; what JSON has no form for counts by its text."""
    if not info:
        return ""
    text = json.dumps(redacted(_plain(info)), ensure_ascii=False, allow_nan=True)
    text = fit(scrubbed(text, secrets), len(text))
    return text if len(text) <= MAX_INFO_CHARACTERS else json.dumps({"cut": fit(text, MAX_INFO_CHARACTERS)}, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """JSON's own kinds: other keys and objects as text, numbers that are not finite too."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Real) and math.isfinite(value):
        return int(value) if isinstance(value, int) else float(value)
    return str(value)
