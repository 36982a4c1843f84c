"""From a Train command to one TrainStep a rank: advantages, denominators, shards. Pure: arrays in, messages out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from telescope.algorithms.base import Algorithm
from telescope.flow.commands import Train
from telescope.maths.batching import assign, cost, denominators
from telescope.orchestrator.shelf import Scored, Shelf
from telescope.records import Denominators, TrainItem
from telescope.wire.messages import TrainStep


@dataclass(frozen=True)
class Shard:
    """What one trainer rank gets. `arrays`: ids, mask, logprobs, versions, each [T] over the shard's trajectories."""

    step: TrainStep
    arrays: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Batch:
    command: Train
    rollouts: tuple[Scored, ...]
    advantages: np.ndarray  # [rollouts] float64
    denominators: Denominators
    shards: tuple[Shard, ...]

    @property
    def lags(self) -> np.ndarray:
        """Versions between each sampled token and the weights it trains [trained tokens]."""
        sampled_by: np.ndarray = np.concatenate([rollout.versions() for rollout in self.rollouts])
        return self.command.step - 1 - sampled_by

    def lag_of(self, rollout: Scored) -> int | None:
        """Versions between the rollout's oldest sampled token and the weights it trains; None without such a token."""
        versions = rollout.versions()
        return self.command.step - 1 - int(versions.min()) if len(versions) else None


def cut(command: Train, shelf: Shelf, algorithm: Algorithm, *, group_size: int, ranks: int) -> Batch:
    """Advantages over the batch (discarded groups count in its statistics), then rollouts to ranks by cost."""
    groups = tuple(tuple(shelf[rollout] for rollout in rollouts) for rollouts in command.rollout_ids)
    kept = tuple(rollout for group in groups for rollout in group)
    baseline = tuple(shelf[rollout] for rollouts in command.baseline_rollout_ids for rollout in rollouts)
    rewards = np.array([rollout.done.reward for rollout in kept + baseline], dtype=np.float64)
    numbers = np.array([rollout.order.group_id for rollout in kept + baseline], dtype=np.int64)
    advantages = algorithm.advantages(rewards, numbers, group_size=group_size)[: len(kept)]
    counts = denominators([rollout.trained_tokens for rollout in kept], [rollout.order.group_id for rollout in kept])
    shares = assign([cost([len(branch.ids) for branch in rollout.branches]) for rollout in kept], ranks)
    shards = tuple(_shard(command.step, kept, advantages, counts, share) for share in shares)
    return Batch(command, kept, advantages, counts, shards)


def _shard(
    step: int, rollouts: tuple[Scored, ...], advantages: np.ndarray, counts: Denominators, share: tuple[int, ...]
) -> Shard:
    items = []
    pieces = []
    for sequence in share:
        rollout = rollouts[sequence]
        for branch in rollout.branches:
            items.append(
                TrainItem(
                    rollout_id=rollout.order.rollout_id,
                    group_id=rollout.order.group_id,
                    sequence=sequence,
                    length=len(branch.ids),
                    advantage=float(advantages[sequence]),
                    sequence_tokens=rollout.trained_tokens,
                )
            )
            pieces.append((branch.ids, branch.mask, branch.logprobs, branch.versions))
    arrays = tuple(np.concatenate(column) for column in zip(*pieces, strict=True)) if pieces else _nothing()
    return Shard(TrainStep(step=step, items=tuple(items), denominators=counts), arrays)


def _nothing() -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(0, dtype) for dtype in (np.int32, np.uint8, np.float32, np.int32))
