"""A rank's shard of a step as packed rows, and a row's arrays as tensors on the device.

Owns the way from numpy to torch. The alignment of tokens, targets and padding is `maths.packing`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from telescope.algorithms.base import PackedRow
from telescope.backends.base import TrainShard
from telescope.maths import packing
from telescope.records import Trajectory


def pack(shard: TrainShard, *, seq_len: int, multiple: int) -> tuple[list[packing.Row], list[Trajectory]]:
    """Rows of the shard and the trajectories they index. A trajectory longer than `seq_len` is refused."""
    lengths = [item.length for item in shard.items]
    if sum(lengths) != len(shard.ids):
        raise ValueError(f"step {shard.step}: its items have {sum(lengths)} tokens and its arrays {len(shard.ids)}")
    ends = np.cumsum(lengths)
    trajectories = [
        Trajectory(shard.ids[here], shard.mask[here], shard.logprobs[here], shard.versions[here])
        for here in (slice(end - length, end) for end, length in zip(ends, lengths, strict=True))
    ]
    return packing.pack(lengths, seq_len=seq_len, multiple=multiple), trajectories


@dataclass(frozen=True)
class DeviceRow:
    """One packed row of T tokens, n of them sampled, S segments, on the device."""

    ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64
    sampled: Tensor  # [n] int64, where the mask is True
    targets: Tensor  # [n] int64, the tokens there
    rollout: Tensor  # [T] float32
    mask: Tensor  # [T] bool
    advantages: Tensor  # [T] float32
    segments: Tensor  # [T] int64
    sequence_tokens: Tensor  # [S] float32

    def packed(self, logprob: Tensor, entropy: Tensor) -> PackedRow:
        """What the loss sees, from log-probs and entropies [n] of the sampled tokens."""
        nothing = torch.zeros_like(self.rollout)
        return PackedRow(
            current=nothing.index_copy(0, self.sampled, logprob),
            old=None,
            rollout=self.rollout,
            mask=self.mask,
            advantages=self.advantages,
            segments=self.segments,
            sequence_tokens=self.sequence_tokens,
            entropy=nothing.index_copy(0, self.sampled, entropy.detach()),
        )


def to_device(arrays: packing.RowArrays, device: str) -> DeviceRow:
    """Copies without waiting for them."""
    sampled = np.flatnonzero(arrays.mask)
    given = (
        arrays.ids[None],
        arrays.position_ids[None],
        sampled,
        arrays.ids[sampled],
        arrays.logprobs,
        arrays.mask,
        arrays.advantages,
        arrays.segments,
        arrays.sequence_tokens,
    )
    return DeviceRow(*(torch.from_numpy(array).to(device, non_blocking=True) for array in given))


def staleness(shard: TrainShard) -> np.ndarray:
    """Versions between the one that sampled a trained token and the one it trains, e.g. 0 for version 4 in step 5."""
    lags: np.ndarray = shard.step - 1 - shard.versions[shard.mask.astype(bool)]
    return lags
