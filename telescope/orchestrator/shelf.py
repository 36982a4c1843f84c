"""Scored rollouts with their arrays, until they are trained or forgotten. The core knows only their ids and scalars."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from telescope.algorithms.base import SampledRollout
from telescope.records import RolloutOrder, Trajectory
from telescope.wire.messages import RolloutDone


class UnusableRollout(ValueError):
    """The arrays of a rollout contradict themselves or lack a log-prob; the rollout counts as failed, never as data."""


@dataclass(frozen=True)
class Scored:
    """One scored rollout: what was ordered, what came back, and its branches."""

    order: RolloutOrder
    done: RolloutDone
    branches: tuple[Trajectory, ...]
    length_penalty: float = 0.0

    @property
    def reward(self) -> float:
        """What is trained for: the environment's reward, less what the length costs."""
        return self.done.reward + self.length_penalty

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

    def put(self, scored: Scored) -> None:
        self._scored[scored.order.rollout_id] = scored

    def forget(self, rollout_ids: tuple[int, ...]) -> None:
        for rollout_id in rollout_ids:
            self._scored.pop(rollout_id, None)


def scored(order: RolloutOrder, done: RolloutDone, arrays: tuple[np.ndarray, ...]) -> Scored:
    """Split the frames of a RolloutDone into branches, and refuse what could corrupt training.

    `arrays`: ids, mask, logprobs, versions, each [T] over all branches one after another.
    """
    where = f"rollout {done.rollout_id} (environment {order.prompt.environment}, prompt {order.prompt.index})"
    if len(arrays) != 4 or any(len(array) != sum(done.branch_lengths) for array in arrays):
        raise UnusableRollout(f"{where}: its arrays do not have the length of its branches {done.branch_lengths}")
    ids, mask, logprobs, versions = arrays
    sampled = mask.astype(bool)
    if not np.isfinite(done.reward):
        raise UnusableRollout(f"{where}: its reward is {done.reward}")
    if not np.isfinite(logprobs[sampled]).all() or (logprobs[sampled] > 1e-3).any():
        raise UnusableRollout(f"{where}: a sampled token has no log-prob, or one above 0")
    if (versions[sampled] < 0).any():
        raise UnusableRollout(f"{where}: a sampled token names no weight version")
    ends = np.cumsum(done.branch_lengths)[:-1]
    pieces = zip(*(np.split(array, ends) for array in (ids, mask, logprobs, versions)), strict=True)
    return Scored(order, done, tuple(Trajectory(*piece) for piece in pieces))
