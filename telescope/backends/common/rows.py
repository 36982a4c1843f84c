"""One packed row's arrays as tensors on the device. The alignment of tokens and targets is `maths.packing`'s."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from telescope.algorithms.base import PackedRow
from telescope.maths import packing, prefixes


@dataclass(frozen=True)
class DeviceRow:
    """One packed row of T tokens, n of them sampled, S segments, on the device. Of the tokens U are run through the model: all
    but those that repeat what the sample before theirs begins with."""

    temperature: float | np.ndarray  # of all sampled tokens, or [n] float32 where they differ; still on the host
    ids: Tensor  # [1, U] int64
    position_ids: Tensor  # [1, U] int64
    before: Tensor  # [n] int64, which of the U tokens comes before each sampled one
    sampled: Tensor  # [n] int64, where the mask is True
    targets: Tensor  # [n] int64, the tokens there
    rollout: Tensor  # [T] float32
    mask: Tensor  # [T] bool
    advantages: Tensor  # [T] float32
    segments: Tensor  # [T] int64
    sequence_tokens: Tensor  # [S] float32

    def packed(
        self, logprob: Tensor, entropy: Tensor, *, old: Tensor | None = None, reference: Tensor | None = None
    ) -> PackedRow:
        """What the loss sees, from log-probs and entropies [n] of the sampled tokens; `old` and `reference` likewise [n]."""
        nothing = torch.zeros_like(self.rollout)

        def laid(values: Tensor | None) -> Tensor | None:
            return None if values is None else nothing.index_copy(0, self.sampled, values)

        return PackedRow(
            current=nothing.index_copy(0, self.sampled, logprob),
            old=laid(old),
            rollout=self.rollout,
            mask=self.mask,
            advantages=self.advantages,
            segments=self.segments,
            sequence_tokens=self.sequence_tokens,
            entropy=laid(entropy),
            reference=laid(reference),
        )


def to_device(arrays: packing.RowArrays, device: str) -> DeviceRow:
    """Copies without waiting for them."""
    sampled = np.flatnonzero(arrays.mask)
    ids, positions, before = arrays.ids, arrays.position_ids, sampled - 1
    if arrays.repeated:
        computed = prefixes.computed(arrays.boundaries, arrays.repeated)
        before = prefixes.places(arrays.boundaries, arrays.repeated)[before]
        ids, positions = ids[computed], positions[computed]
    given = (
        ids[None],
        positions[None],
        before,
        sampled,
        arrays.ids[sampled],
        arrays.logprobs,
        arrays.mask,
        arrays.advantages,
        arrays.segments,
        arrays.sequence_tokens,
    )
    return DeviceRow(_temperature(arrays, sampled), *(sent(array, device) for array in given))


def _temperature(arrays: packing.RowArrays, sampled: np.ndarray) -> float | np.ndarray:
    """One number wherever that is enough: it costs nothing on the device."""
    each: np.ndarray = arrays.temperatures[arrays.segments[sampled]]
    if not len(each):
        return 1.0
    return float(each[0]) if (each == each[0]).all() else each.astype(np.float32)


def sent(array: np.ndarray, device: str) -> Tensor:
    """The array on the device, without waiting: from pinned memory, as the copy of more than 64 KiB of other memory waits for
    what the GPU has yet to do."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.startswith("cuda") else tensor.to(device)
