"""Scored rollouts with their arrays, until they are trained or forgotten. The core knows only their ids and scalars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from telescope.algorithms.base import SampledRollout
from telescope.records import RolloutOrder, Trajectory
from telescope.wire.messages import RolloutDone

LIMIT = 2**63
"""Whole numbers of a row stay below."""


class UnusableRollout(ValueError):
    """The arrays of a rollout contradict themselves or lack a log-prob; the rollout counts as failed, never as data."""


@dataclass(frozen=True)
class Scored:
    """One scored rollout: what was ordered, what came back, and its branches."""

    order: RolloutOrder
    done: RolloutDone
    branches: tuple[Trajectory, ...]
    length_penalty: float = 0.0
    normalised: float | None = None
    """The environment's reward within its range, where training takes that."""

    @property
    def reward(self) -> float:
        """What is trained for: the environment's reward, less what the length costs."""
        score = self.done.reward if self.normalised is None else self.normalised
        return score + self.length_penalty

    @property
    def trained_tokens(self) -> int:
        return sum(branch.trained_tokens for branch in self.branches)

    @property
    def tokens(self) -> int:
        return sum(len(branch.ids) for branch in self.branches)

    @property
    def sampled(self) -> SampledRollout:
        """What the filters see of it."""
        logprobs = np.concatenate([branch.logprobs[branch.mask.astype(bool)] for branch in self.branches])
        return SampledRollout(self.done.finish_reason, logprobs)

    def versions(self) -> np.ndarray:
        """Weight versions of the sampled tokens [trained tokens] int32."""
        return np.concatenate([branch.versions[branch.mask.astype(bool)] for branch in self.branches])


class Shelf:
    """Scored rollouts by id."""

    def __init__(self) -> None:
        self._scored: dict[int, Scored] = {}

    def __len__(self) -> int:
        return len(self._scored)

    def __getitem__(self, rollout_id: int) -> Scored:
        return self._scored[rollout_id]

    def of(self, rollout_ids: Iterable[int]) -> tuple[Scored, ...]:
        """Those rollouts, in order of their ids."""
        return tuple(self._scored[rollout_id] for rollout_id in sorted(rollout_ids))

    def put(self, scored: Scored) -> None:
        self._scored[scored.order.rollout_id] = scored

    def forget(self, rollout_ids: tuple[int, ...]) -> None:
        for rollout_id in rollout_ids:
            self._scored.pop(rollout_id, None)


def scored(order: RolloutOrder, done: RolloutDone, arrays: tuple[np.ndarray, ...], newest: int) -> Scored:
    """Split the frames of a RolloutDone into branches, and refuse what could corrupt training.

    `arrays`: ids, mask, logprobs, versions, each [T] over all branches one after another. `newest`: the youngest weight
    version that any server can have sampled with.
    """
    wrong = _wrong_in_shape(done, arrays) or _wrong_in_numbers(done) or _wrong_in_tokens(done, arrays, newest)
    if wrong:
        where = f"rollout {order.rollout_id} (environment {order.prompt.environment}, prompt {order.prompt.index})"
        raise UnusableRollout(f"{where}: {wrong}")
    if len(done.branch_lengths) == 1:
        return Scored(order, done, (Trajectory(*arrays),))
    ends = np.cumsum(done.branch_lengths)[:-1]
    pieces = zip(*(np.split(array, ends) for array in arrays), strict=True)
    return Scored(order, done, tuple(Trajectory(*piece) for piece in pieces))


def _wrong_in_shape(done: RolloutDone, arrays: tuple[np.ndarray, ...]) -> str:
    if not done.branch_lengths:
        return "it has no branch"
    if min(done.branch_lengths) < 1:
        return f"it has an empty branch: {done.branch_lengths}"
    if len(arrays) != 4 or any(len(array) != sum(done.branch_lengths) for array in arrays):
        return f"its arrays do not have the length of its branches {done.branch_lengths}"
    return ""


def _wrong_in_numbers(done: RolloutDone) -> str:
    if not np.isfinite(done.reward):
        return f"its reward is {done.reward}"
    if not 0 <= done.prompt_tokens <= done.branch_lengths[0]:
        return f"prompt_tokens={done.prompt_tokens}, and its first branch has {done.branch_lengths[0]} tokens"
    for name in ("turns", "started_ns", "generated_ns", "scored_ns"):
        if not 0 <= getattr(done, name) < LIMIT:
            return f"{name}={getattr(done, name)} is no such number"
    return ""


def _wrong_in_tokens(done: RolloutDone, arrays: tuple[np.ndarray, ...], newest: int) -> str:
    _, mask, logprobs, versions = arrays
    if mask.max() > 1:
        return f"its mask has the value {mask.max()}, and only 0 and 1 mean something"
    sampled = mask.astype(bool)
    if sampled[np.cumsum((0, *done.branch_lengths[:-1]))].any():
        return "the mask calls the first token of a branch sampled: nothing stands before it"
    if done.completion_tokens != sampled.sum():
        return f"completion_tokens={done.completion_tokens}, and its mask has {sampled.sum()}"
    if not np.isfinite(logprobs[sampled]).all() or (logprobs[sampled] > 1e-3).any():
        return "a sampled token has no log-prob, or one above 0"
    if (versions[sampled] < 0).any():
        return "a sampled token names no weight version"
    if (versions[sampled] > newest).any():
        return f"a sampled token names weight version {versions[sampled].max()}, and no server has one above {newest}"
    return ""
