"""Every rollout between its order and its batch: one record that grows, in one store.

    sent ─▶ its requests come and go ─▶ answered ─▶ no server generates for it: the core hears of it
         ─▶ taken by the core, with its arrays ─▶ trained or forgotten

A record is one attempt: where the core tries a rollout again, the attempt before may still be owed its answer. The core itself
keeps ids and scalars (telescope/flow); what a worker sent is checked here before it can become training data.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import UNSET, UnsetType

from telescope.algorithms.base import SampledRollout
from telescope.flow import events
from telescope.maths import turn_credit
from telescope.maths.summaries import METRIC_LIMIT
from telescope.records import FailureKind, RolloutOrder, Trajectory
from telescope.wire.messages import Generate, RequestGrant, RolloutError, RolloutResult
from telescope.wire.peer_events import Delivery

LIMIT = 2**63
"""Whole numbers of a row stay below."""


class UnusableRollout(ValueError):
    """The arrays of a rollout contradict themselves or lack a log-prob; the rollout counts as failed, never as data."""


@dataclass(eq=False)
class TurnRequest:
    """One turn that its worker has asked tokens for, until its server has answered."""

    asked: Delivery
    body: Generate | RequestGrant
    rollout: Rollout | None
    """None: no rollout that is out asks for it, as where its answer has overtaken it."""
    server: str | None = None
    number: int = 0
    """Of the message to the server; its answer names it."""
    placed_ns: int = 0
    unwanted: bool = False
    """Its worker has given it up, perhaps before it was placed."""
    ended: bool = False
    """Its server is lost and its worker has its answer: the core has yet to hear that nothing comes of it."""

    @property
    def request_id(self) -> str:
        return self.body.request_id

    @property
    def granted(self) -> bool:
        """Its worker was answered with a grant, and has brought it to the server itself."""
        return isinstance(self.body, RequestGrant) and self.number > 0

    @property
    def prompt_tokens(self) -> int:
        return self.body.prompt_tokens if isinstance(self.body, RequestGrant) else self.asked.frames.specs[0].shape[0]


@dataclass(eq=False)
class Rollout:
    """One attempt at a rollout, from its order to its batch."""

    order: RolloutOrder
    worker: str = ""
    """Who plays it; empty for one that a checkpoint has kept."""
    number: int = 0
    """Of its RunRollout, which the worker's answer names; 0: the worker had gone, or has answered."""
    requests: dict[str, TurnRequest] = field(default_factory=dict)
    """By id, those that have not ended."""
    generation_ended: bool = False
    """Its worker needs no more tokens, and the core has yet to hear of it."""
    cancelled: bool = False
    """Its worker was told to stop before it had answered: what it answers is not an error."""
    answer: RolloutResult | RolloutError | None = None
    delivery: Delivery | None = None
    """That of its result, until it is to be acknowledged."""
    answered_s: float = 0.0
    """When, by the monotonic clock; put off while servers take new weights."""
    told: bool = False
    """The core has heard of the answer."""
    late: bool = False
    """The servers that still generate for it, though it is answered, were named."""
    taken: bool = False
    """The core counts its score."""
    branches: tuple[Trajectory, ...] = ()
    length_penalty: float = 0.0
    normalised: float | None = None
    """The environment's reward within its range, where training takes that."""
    turn_returns: tuple[float, ...] = ()
    """By what its turns are compared; empty: `reward` is compared."""

    @property
    def key(self) -> tuple[int, int]:
        return self.order.rollout_id, self.order.attempt

    @property
    def servers(self) -> set[str]:
        """Servers that hold a request of it, and have not answered."""
        return {request.server for request in self.requests.values() if request.server is not None and request.number}

    def fail(self, cause: str, kind: FailureKind = "infrastructure") -> None:
        self.answer = RolloutError(self.order.rollout_id, self.order.attempt, cause, kind)

    def release(self) -> list[events.AnyEvent]:
        """What the core hears of it now: nothing while a server generates for it, so that a cancelled rollout keeps its lane
        until its tokens have really stopped."""
        heard: list[events.AnyEvent] = []
        if self.servers:
            return heard
        rollout_id, attempt = self.key
        if self.generation_ended:
            self.generation_ended = False
            heard.append(events.GenerationOver(rollout_id=rollout_id, attempt=attempt))
        if self.answer is not None and not self.told:
            self.told = True
            heard.append(self._make_event(self.answer))
        return heard

    def _make_event(self, answer: RolloutResult | RolloutError) -> events.RolloutDone | events.RolloutFailed:
        rollout_id, attempt = self.key
        if isinstance(answer, RolloutError):
            return events.RolloutFailed(rollout_id=rollout_id, attempt=attempt, cause=answer.cause, kind=answer.kind)
        return events.RolloutDone(
            rollout_id=rollout_id,
            attempt=attempt,
            reward=self.reward,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            turn_returns=self.turn_returns or UNSET,
        )

    # ---- once it is scored

    @property
    def result(self) -> RolloutResult:
        """What its worker scored."""
        assert isinstance(self.answer, RolloutResult), f"rollout {self.order.rollout_id} has no score"
        return self.answer

    @property
    def reward(self) -> float:
        """What is trained for: the environment's reward, less what the length costs."""
        score = self.result.reward if self.normalised is None else self.normalised
        return score + self.length_penalty

    @property
    def trained_tokens(self) -> int:
        return sum(branch.trained_tokens for branch in self.branches)

    @property
    def turns(self) -> int:
        """Answers whose tokens are told apart: all, or 1 where a checkpoint of older rollouts names none."""
        return 1 if isinstance(self.result.branch_turns, UnsetType) else self.result.turns

    @property
    def trained_turns(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each branch its answers in order: (which of the rollout's turns; its sampled tokens, as far as the branch was not
        cut off at the length of a row)."""
        if isinstance(self.result.branch_turns, UnsetType):
            return tuple(((0, branch.trained_tokens),) for branch in self.branches)
        return tuple(map(_cut_turns, self.result.branch_turns, (branch.trained_tokens for branch in self.branches)))

    @property
    def tokens(self) -> int:
        return sum(len(branch.ids) for branch in self.branches)

    @property
    def sampled(self) -> SampledRollout:
        """What the filters see of it."""
        return SampledRollout(self.result.finish_reason, self.logprobs)

    @property
    def logprobs(self) -> np.ndarray:
        """Of the sampled tokens [trained tokens] float32."""
        if not self.branches:
            return np.empty(0, np.float32)
        return np.concatenate([branch.logprobs[branch.mask.astype(bool)] for branch in self.branches])

    @property
    def versions(self) -> np.ndarray:
        """Weight versions of the sampled tokens [trained tokens] int32."""
        if not self.branches:
            return np.empty(0, np.int32)
        return np.concatenate([branch.versions[branch.mask.astype(bool)] for branch in self.branches])

    def score(self, result: RolloutResult, arrays: tuple[np.ndarray, ...], newest: int) -> None:
        """Take the worker's result: split its frames into branches, and refuse what could corrupt training.

        `arrays`: ids, mask, logprobs, versions, each [T] over all branches one after another, and routing [T, L, K] where it
        was recorded. `newest`: the youngest weight
        version that any server can have sampled with. Raises `UnusableRollout`; nothing has changed then.
        """
        if self.order.eval and not result.branch_lengths and not any(map(len, arrays)):  # of a server that tells no tokens
            wrong = _find_wrong_number(result, of_eval=True) or _find_wrong_turn_reward(result)
        else:
            wrong = (
                _find_wrong_shape(result, arrays)
                or _find_wrong_number(result, of_eval=bool(self.order.eval))
                or _find_wrong_token(result, arrays, newest)
                or _find_wrong_turn_reward(result)
                or _find_wrong_turn(result, arrays[1])
            )
        if wrong:
            prompt = self.order.prompt
            where = f"rollout {self.order.rollout_id} (environment {prompt.environment}, prompt {prompt.index})"
            raise UnusableRollout(f"{where}: {wrong}")
        self.answer = result
        if not result.branch_lengths:
            return
        if len(result.branch_lengths) == 1:
            self.branches = (Trajectory(*arrays),)
            return
        ends = np.cumsum(result.branch_lengths)[:-1]
        pieces = zip(*(np.split(array, ends) for array in arrays), strict=True)
        self.branches = tuple(Trajectory(*piece) for piece in pieces)


def _cut_turns(turns: Sequence[tuple[int, int]], tokens: int) -> tuple[tuple[int, int], ...]:
    """The turns of a branch of which the first `tokens` sampled tokens are left."""
    cut = []
    for turn, length in turns:
        cut.append((turn, min(length, tokens)))
        tokens -= cut[-1][1]
    return tuple(cut)


class RolloutStore:
    """All rollouts in flight, and the requests of their turns by id."""

    def __init__(self) -> None:
        self._rollouts: dict[int, list[Rollout]] = {}
        """By rollout id: its attempts that are owed an answer, and the one that the core has taken."""
        self.requests: dict[str, TurnRequest] = {}

    def __iter__(self) -> Iterator[Rollout]:
        return (rollout for attempts in self._rollouts.values() for rollout in attempts)

    def __len__(self) -> int:
        return sum(map(len, self._rollouts.values()))

    def add(self, rollout: Rollout) -> None:
        self._rollouts.setdefault(rollout.order.rollout_id, []).append(rollout)

    def find(self, rollout_id: int, attempt: int) -> Rollout | None:
        return next((one for one in self._rollouts.get(rollout_id, ()) if one.order.attempt == attempt), None)

    def find_answered(self, delivery: Delivery, rollout_id: int, attempt: int) -> Rollout | None:
        """The rollout whose order a worker's message answers: that of the message's number, whatever rollout it speaks of."""
        named = self.find(rollout_id, attempt)
        if named is not None and (named.worker, named.number) == (delivery.peer, delivery.answers):
            return named
        return next((one for one in self if (one.worker, one.number) == (delivery.peer, delivery.answers)), None)

    def take(self, rollout_ids: Iterable[int]) -> tuple[Rollout, ...]:
        """The scored attempt of each, in this order. Raises `KeyError`."""
        return tuple(self._find_taken(rollout_id) for rollout_id in rollout_ids)

    def remove(self, rollout: Rollout) -> None:
        attempts = self._rollouts[rollout.order.rollout_id]
        attempts.remove(rollout)
        if not attempts:
            del self._rollouts[rollout.order.rollout_id]

    def forget(self, rollout_ids: Iterable[int]) -> None:
        """Drop the scored attempt of each, if there is one."""
        for rollout_id in rollout_ids:
            for rollout in [one for one in self._rollouts.get(rollout_id, ()) if one.taken]:
                self.remove(rollout)

    def _find_taken(self, rollout_id: int) -> Rollout:
        for rollout in self._rollouts[rollout_id]:
            if rollout.taken:
                return rollout
        raise KeyError(rollout_id)


def _find_wrong_shape(result: RolloutResult, arrays: tuple[np.ndarray, ...]) -> str:
    if not result.branch_lengths:
        return "it has no branch"
    if min(result.branch_lengths) < 1:
        return f"it has an empty branch: {result.branch_lengths}"
    if len(arrays) not in (4, 5) or any(len(array) != sum(result.branch_lengths) for array in arrays):
        return f"its arrays do not have the length of its branches {result.branch_lengths}"
    return ""


def _find_wrong_number(result: RolloutResult, *, of_eval: bool) -> str:
    if not abs(result.reward) <= turn_credit.REWARD_LIMIT:  # NaN is not
        return f"its reward is {result.reward}, and it must be a number within ±{turn_credit.REWARD_LIMIT:.0e}"
    for name, value in result.metrics.items():
        if not abs(value) <= METRIC_LIMIT:
            return f"its metric {name!r} is {value}, and it must be a number within ±{METRIC_LIMIT:.0e}"
    if not (0 < result.temperature < np.inf or (of_eval and result.temperature == 0)):
        return f"its temperature is {result.temperature}"
    longest = result.branch_lengths[0] if result.branch_lengths else LIMIT
    if not 0 <= result.prompt_tokens <= longest:
        return f"prompt_tokens={result.prompt_tokens}, and its first branch has {longest} tokens"
    for name in ("turns", "started_ns", "generated_ns", "scored_ns"):
        if not 0 <= getattr(result, name) < LIMIT:
            return f"{name}={getattr(result, name)} is not such a number"
    return ""


def _find_wrong_token(result: RolloutResult, arrays: tuple[np.ndarray, ...], newest: int) -> str:
    _, mask, logprobs, versions = arrays[:4]
    if mask.max() > 1:
        return f"its mask has the value {mask.max()}, and only 0 and 1 mean something"
    sampled = mask.astype(bool)
    if sampled[np.cumsum((0, *result.branch_lengths[:-1]))].any():
        return "the mask calls the first token of a branch sampled: nothing stands before it"
    if result.completion_tokens != sampled.sum():
        return f"completion_tokens={result.completion_tokens}, and its mask has {sampled.sum()}"
    if not np.isfinite(logprobs[sampled]).all() or (logprobs[sampled] > 1e-3).any():
        return "a sampled token has no log-prob, or one above 0"
    if (versions[sampled] < 0).any():
        return "a sampled token names no weight version"
    if (versions[sampled] > newest).any():
        return f"a sampled token names weight version {versions[sampled].max()}, and no server has one above {newest}"
    return ""


def _find_wrong_turn_reward(result: RolloutResult) -> str:
    if isinstance(result.turn_rewards, UnsetType):
        return ""
    if len(result.turn_rewards) != result.turns:
        return f"it has rewards of {len(result.turn_rewards)} turns, and turns={result.turns}"
    if not all(abs(reward) <= turn_credit.REWARD_LIMIT for reward in result.turn_rewards):  # NaN is not
        limit = f"±{turn_credit.REWARD_LIMIT:.0e}"
        return f"the rewards of its turns are {reprlib.repr(result.turn_rewards)}, and each must be a number within {limit}"
    if not turn_credit.add_up(result.turn_rewards, result.reward):
        return f"the rewards of its turns add up to {math.fsum(result.turn_rewards):g}, and its reward is {result.reward:g}"
    return ""


def _find_wrong_turn(result: RolloutResult, mask: np.ndarray) -> str:
    if result.turns < 1:
        return "turns=0, and it has tokens"
    if isinstance(result.branch_turns, UnsetType):
        told_apart = result.turns == 1 or isinstance(result.turn_rewards, UnsetType)
        return "" if told_apart else f"it has rewards of {result.turns} turns, and does not say which tokens are whose"
    named = sorted(turn for turns in result.branch_turns for turn, _ in turns)
    if len(named) != result.turns or named != list(range(len(named))):  # `turns` alone may be any number
        return f"its branches do not have each of its {result.turns} turns once"
    ends = np.cumsum(result.branch_lengths)[:-1]
    sampled = [int(part.sum()) for part in np.split(mask, ends)]
    counts = [[tokens for _, tokens in turns] for turns in result.branch_turns]
    if [sum(tokens) for tokens in counts] != sampled or any(number < 1 for tokens in counts for number in tokens):
        return f"its turns have {counts} tokens, and its branches {sampled} sampled ones"
    return ""
