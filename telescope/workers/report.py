"""What a worker says of a rollout: its score in a form that travels, or its failure with a kind and a cause.

Owns the limits of what an environment may write into a run directory (valid Unicode, no longer than anyone would read), and
that no secret gets there.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, TypeVar

from msgspec import UNSET

from telescope.config.secrets import redacted, scrubbed
from telescope.environments.base import Prompt, Reward
from telescope.environments.chat import Recording
from telescope.environments.failures import GraderError, PolicyError
from telescope.maths import turn_credit
from telescope.maths.summaries import METRIC_LIMIT
from telescope.maths.turn_credit import REWARD_LIMIT
from telescope.records import FailureKind, RolloutOrder
from telescope.wire.messages import RolloutError, RolloutResult
from telescope.workers.loading import describe

T = TypeVar("T")

MAX_CHARACTERS = 200_000
MAX_CAUSE_CHARACTERS = 4_000
MAX_NAME_CHARACTERS = 200
MAX_GOLDEN_ANSWERS = 64
MAX_TAGS = 32
MAX_INFO_CHARACTERS = 50_000
MAX_INFO_DEPTH = 64
_SURROGATES = re.compile("[\ud800-\udfff]")


class BadReward(GraderError):
    """What the environment returned is not a usable reward."""


def check_reward(reward: Reward) -> Reward:
    """The same with plain numbers. Raises `BadReward` unless the total and every metric is a finite one, the total within
    `REWARD_LIMIT` and the sum of its turns, where it has them, and each metric within `METRIC_LIMIT`."""
    if not isinstance(reward, Reward):
        raise BadReward(f"play returned {type(reward).__name__}, not a Reward")
    if not isinstance(reward.metrics, Mapping):
        raise BadReward(f"the reward's metrics are {_name_type(reward.metrics)}, not a dict of numbers")
    with _refuse_formless("numbers"):
        total = _as_number("total", reward.total)
        metrics = {name: _as_metric(str(name), value) for name, value in reward.metrics.items()}
    if abs(total) > REWARD_LIMIT:
        raise BadReward(f"the reward's total is {total!r}, beyond ±{REWARD_LIMIT:.0e}: scale the environment's rewards")
    turns = _check_turns(total, reward.turns)
    return Reward(total, metrics, reward.golden_answers, reward.tags, reward.info, turns)


def _check_turns(total: float, turns: object) -> tuple[float, ...]:
    """Rewards by turn, as plain numbers that add up to the total, but for rounding."""
    if not isinstance(turns, list | tuple):
        raise BadReward(f"the reward's turns are {_name_type(turns)}, not a tuple of numbers")
    with _refuse_formless("turns"):
        numbers = tuple(_as_number(f"turns[{at}]", value) for at, value in enumerate(turns))
    if any(abs(number) > REWARD_LIMIT for number in numbers):
        raise BadReward(f"a number of the reward's turns is beyond ±{REWARD_LIMIT:.0e}: scale the environment's rewards")
    if not turn_credit.add_up(numbers, total):
        raise BadReward(
            f"the reward's turns add up to {math.fsum(numbers):g}, and its total is {total:g}: they must be the same; give the "
            "difference to the turn that earns it, e.g. the last"
        )
    return numbers


def check_turn_count(reward: Reward, answers: int) -> None:
    """Raises `BadReward` unless the reward has one number for each answer of the policy, or none."""
    if len(reward.turns) not in (0, answers):
        raise BadReward(
            f"the reward has {len(reward.turns)} turns, and the policy answered {answers} times: give one number for each "
            "answer, in the order in which they came, or none at all"
        )


def _as_number(name: str, value: object) -> float:
    """What is checked is what is sent: a number of a class of its own may say one thing and convert to another."""
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        raise BadReward(f"the reward's {name} is a whole number too large for a float: scale it") from None
    if not math.isfinite(number):
        raise BadReward(f"the reward's {name} is {value!r}, not a finite number")
    return number


def _as_metric(name: str, value: object) -> float:
    number = _as_number(f"metric {name!r}", value)
    if abs(number) > METRIC_LIMIT:
        raise BadReward(
            f"the reward's metric {name!r} is {number!r}, beyond ±{METRIC_LIMIT:.0e}: scale it, or give its logarithm"
        )
    return number


def score_policy_error(error: PolicyError) -> Reward:
    """The score of a rollout that the policy itself has ended."""
    return Reward(error.total, error.metrics, tags=(error.tag,), info={"policy_error": str(error)})


def make_result(
    order: RolloutOrder,
    prompt: Prompt,
    reward: Reward,
    recording: Recording,
    started_ns: int,
    temperature: float,
    secrets: Collection[str],
) -> RolloutResult:
    """The score as it travels. `temperature`: at which all of it was sampled. Raises `BadReward` where a part of the reward has
    no form that does."""
    with _refuse_formless("metrics"):
        metrics = {_clean(name, secrets, MAX_NAME_CHARACTERS): float(value) for name, value in reward.metrics.items()}
    with _refuse_formless("golden_answers"):
        golden_answers = _clean_answers(reward, prompt, secrets)
    with _refuse_formless("tags"):
        tags = _clean_tags(reward, secrets)
    with _refuse_formless("info"):
        info = encode_info(reward.info, secrets)
    check_turn_count(reward, recording.turns)
    return RolloutResult(
        rollout_id=order.rollout_id,
        attempt=order.attempt,
        reward=float(reward.total),
        metrics=metrics,
        branch_lengths=tuple(len(branch.ids) for branch in recording.branches),
        prompt_tokens=recording.prompt_tokens,
        completion_tokens=recording.completion_tokens,
        turns=recording.turns,
        finish_reason=recording.finish_reason,
        temperature=temperature,
        prompt_text=_clean(recording.prompt_text, secrets),
        completion_text=_clean(recording.completion_text, secrets),
        golden_answers=golden_answers,
        started_ns=started_ns,
        generated_ns=recording.generated_ns,
        scored_ns=time.time_ns(),
        tags=tags,
        info=info,
        turn_rewards=reward.turns or UNSET,
        branch_turns=recording.branch_turns if recording.turns > 1 else UNSET,
    )


@contextlib.contextmanager
def _refuse_formless(part: str) -> Iterator[None]:
    """Whatever a user's object raises on its way into a row (its `__str__` may raise anything) is a `BadReward`."""
    try:
        yield
    except BadReward:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 user code, counted by its cause
        raise BadReward(f"the reward's {part} can't be written down: {describe(error)}") from None


def _clean(text: object, secrets: Collection[str], most: int = MAX_CHARACTERS) -> str:
    return clip_text(scrubbed(str(text), secrets), most)


def _read_texts(given: Any, part: str) -> tuple[Any, ...]:
    """One text counts as a tuple of one. Raises `BadReward` for what has no order, or is not a sequence."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list | tuple):
        raise BadReward(f"the reward's {part} are {_name_type(given)}, not a tuple of texts")
    return tuple(given)


def _name_type(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def make_error(
    order: RolloutOrder, cause: str, kind: FailureKind = "infrastructure", secrets: Collection[str] = ()
) -> RolloutError:
    return RolloutError(order.rollout_id, order.attempt, clip_text(scrubbed(cause, secrets), MAX_CAUSE_CHARACTERS), kind)


def _clean_answers(reward: Reward, prompt: Prompt, secrets: Collection[str]) -> tuple[str, ...]:
    """At most `MAX_GOLDEN_ANSWERS`, together no longer than one text may be."""
    given = _read_texts(reward.golden_answers, "golden_answers") or ((prompt.answer,) if prompt.answer else ())
    answers, left = [], MAX_CHARACTERS
    for answer in given[:MAX_GOLDEN_ANSWERS]:
        if left <= 0:
            break
        answers.append(_clean(answer, secrets, left))
        left -= len(answers[-1])
    return tuple(answers)


def _clean_tags(reward: Reward, secrets: Collection[str]) -> tuple[str, ...]:
    tags = dict.fromkeys(_clean(tag, secrets, MAX_NAME_CHARACTERS) for tag in _read_texts(reward.tags, "tags"))
    return tuple(tags)[:MAX_TAGS]


def encode_info(info: Mapping[str, Any], secrets: Collection[str]) -> str:
    """The info as JSON of at most `MAX_INFO_CHARACTERS` (cut, it is a text under "cut"), texts under secret names and secret
    values redacted; what JSON has no form for counts by its text."""
    if not isinstance(info, Mapping):
        raise BadReward(f"the reward's info is {_name_type(info)}, not a dict")
    if not info:
        return ""
    copy = _PlainCopy()
    text = json.dumps(redacted(copy.make(info)), ensure_ascii=False, allow_nan=True)
    text = clip_text(scrubbed(text, secrets), len(text))
    if copy.is_whole and len(text) <= MAX_INFO_CHARACTERS:
        return text
    cut = clip_text(text, MAX_INFO_CHARACTERS) if copy.is_whole else f"{text[:MAX_INFO_CHARACTERS]} […cut: more follows]"
    return json.dumps({"cut": cut}, ensure_ascii=False)


class _PlainCopy:
    """A value in JSON's own kinds: other keys and objects as text, numbers that are not finite too. Ends, and is not whole,
    where it is longer than `MAX_INFO_CHARACTERS`; a text is never torn, so that secrets in it are found."""

    def __init__(self) -> None:
        self.is_whole = True
        self._left = MAX_INFO_CHARACTERS

    def make(self, value: Any, deep: int = MAX_INFO_DEPTH) -> Any:
        """Raises `BadReward` for what is nested deeper than `deep`, which what contains itself is."""
        if isinstance(value, Mapping | list | tuple | set | frozenset) and deep == 0:
            raise BadReward(f"the reward's info is nested more than {MAX_INFO_DEPTH} deep, or contains itself")
        self._left -= 1
        if isinstance(value, Mapping):
            return {self._take(str(key)): self.make(item, deep - 1) for key, item in self._list_fitting(value.items())}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.make(item, deep - 1) for item in self._list_fitting(value)]
        if isinstance(value, str):
            return self._take(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
        return self._take(str(value))

    def _list_fitting(self, items: Iterable[T]) -> Iterator[T]:
        for item in items:
            if self._left < 0:
                self.is_whole = False
                return
            yield item

    def _take(self, text: str) -> str:
        self._left -= len(text)
        return text


def clip_text(text: object, most: int = MAX_CHARACTERS) -> str:
    """The text with a replacement character for each lone surrogate, which UTF-8 cannot hold, and cut off after `most`
    characters with a mark that says how many are missing."""
    whole = text if isinstance(text, str) else str(text)
    if len(whole) > most:
        whole = f"{whole[:most]} […cut: {len(whole) - most} more characters]"
    return _SURROGATES.sub("\ufffd", whole)
