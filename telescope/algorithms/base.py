"""What an algorithm is: settings, one advantage rule and one loss. Pure: numpy and tensor methods, no torch import.

A file of this folder with one `Algorithm` subclass is an algorithm of that file's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from telescope.records import Denominators
from telescope.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class PackedRow:
    """What the loss sees of one packed row of T tokens. Masked places may hold anything, NaN included."""

    current: Tensor  # [T] float32 log-prob of the taken token under the weights in training, carries the gradient
    old: Tensor | None  # [T] the same before the first update of the step; None = current, detached
    rollout: Tensor  # [T] float32 sampling log-prob
    mask: Tensor  # [T] bool, True where the policy sampled the token
    advantages: Tensor  # [T] float32, constant over a rollout
    segments: Tensor  # [T] int64 index of the trajectory within the row, 0..S-1; filler has its own last segment
    sequence_tokens: Tensor  # [S] float32 trained tokens of the whole rollout each segment belongs to (n_i)
    entropy: Tensor | None  # [T] float32, detached unless an entropy bonus asks for it


@dataclass(frozen=True)
class LossOutput:
    """`loss` is this row's share of the update's loss: shares of all rows and ranks add up to it.
    `sums` are metric numerators and `[count]` entries to be added over rows and ranks, detached, still on the device."""

    loss: Tensor
    sums: dict[str, Tensor]


class Algorithm(Settings):
    """Base of all algorithms. Subclasses give `advantages` and `loss`."""

    def advantages(self, rewards: np.ndarray, groups: np.ndarray, *, group_size: int) -> np.ndarray:
        """One float64 advantage a rollout [N] from rewards [N] and group numbers [N]; `group_size` as configured."""
        raise NotImplementedError

    def loss(self, row: PackedRow, denominators: Denominators, *, max_tokens: int) -> LossOutput:
        """The row's share of the loss over the whole optimiser update (rule 2 of docs/architecture.md)."""
        raise NotImplementedError
