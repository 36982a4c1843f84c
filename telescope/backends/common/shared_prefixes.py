"""Attention where samples of a packed row begin alike and what they share is there once: U tokens ask, and those of a sample
see its whole beginning, T keys in all.

Owns the lists of keys and their gradients, which are summed in float32 and in a fixed order. Which tokens are repeated is
maths/prefixes.py's; what a kernel is told attention.py's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from telescope.maths import prefixes

SMALLEST = 32
"""Samples are stacked with others of at most twice their lengths; below this many tokens all lengths are alike."""


class _TakeRepeatedly(torch.autograd.Function):
    """[U, ...] -> [M, ...]. A row that is taken several times gets the sum of its gradients, which is the same each time:
    `index_put_` sorts its indices on a GPU, and adds one after another on a CPU."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.dtype = tensor.shape[0], tensor.dtype
        return tensor.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,), gradient = ctx.saved_tensors, gradients[0]
        total = gradient.new_zeros((ctx.rows, *gradient.shape[1:]), dtype=torch.float32)
        return total.index_put_((index,), gradient.float(), accumulate=True).to(ctx.dtype), None


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor [U, ...] by index [M], some of them several times: [M, ...]."""
    taken: Tensor = _TakeRepeatedly.apply(tensor, index)  # type: ignore[no-untyped-call]
    return taken


class SharedKeys:
    """Of one row, for every layer. Samples that are whole in the one before them ask nothing, and are left out: S are left."""

    def __init__(self, boundaries: np.ndarray, repeated: tuple[int, ...], device: str) -> None:
        """As of `maths.prefixes.places`."""
        count = len(boundaries) - 1
        self._device = device
        self._repeated = np.array([*repeated, *[0] * (count - len(repeated))], np.int64)
        where, lengths = prefixes.places(boundaries, repeated), np.diff(boundaries).astype(np.int64)
        asks = np.flatnonzero(lengths > self._repeated)
        self._repeated, self._lengths = self._repeated[asks], lengths[asks]
        """[S], tokens that a sample repeats, and all of it."""
        self._keys = [where[boundaries[sample] : boundaries[sample + 1]] for sample in asks]
        self._asking = np.concatenate([[0], np.cumsum(self._lengths - self._repeated)])
        self.queries_at = self._sent(self._asking.astype(np.int32))
        """[S + 1] int32, where each sample's queries lie among the U tokens."""
        self.keys_at = self._sent(np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int32))
        """[S + 1] int32, where its keys lie once they are listed for each sample."""
        self.longest_asking = int((self._lengths - self._repeated).max())
        self.longest = int(self._lengths.max())
        self._places = self._sent(np.concatenate(self._keys))
        self._stacks: tuple[list[_SharedStack], Tensor] | None = None
        self._block_masks: dict[int | None, Any] = {}

    def _sent(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def listed(self, tensor: Tensor) -> Tensor:
        """Keys or values [U, H, D] listed for each sample, [T, H, D]."""
        return take(tensor, self._places)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        """query [U, Hq, D], key and value [U, Hkv, D] -> [U, Hq, D], by PyTorch's own product over stacks of samples."""
        if self._stacks is None:
            self._stacks = self._make_stacks()
        stacks, inverse = self._stacks
        gqa, found = query.shape[1] != key.shape[1], []
        for stack in stacks:
            q, k, v = (
                take(tensor, places.flatten()).view(*places.shape, *tensor.shape[1:]).transpose(1, 2)
                for tensor, places in ((query, stack.queries), (key, stack.keys), (value, stack.keys))
            )  # [B, H, L, D]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=stack.seen(window), scale=scale, enable_gqa=gqa)
            found.append(out.transpose(1, 2)[stack.real])  # [tokens that ask, Hq, D]
        together = torch.cat(found) if len(found) > 1 else found[0]
        return together.index_select(0, inverse)

    def _make_stacks(self) -> tuple[list[_SharedStack], Tensor]:
        """(The stacks, of each of the U tokens its place [U] among those of all stacks.)"""
        asking = self._lengths - self._repeated
        sizes = [np.ceil(np.log2(np.maximum(lengths, SMALLEST))).astype(np.int64) for lengths in (asking, self._lengths)]
        stacks, order = [], []
        for shape in sorted(set(zip(*(size.tolist() for size in sizes), strict=True))):
            these = np.flatnonzero((sizes[0] == shape[0]) & (sizes[1] == shape[1]))
            queries = np.zeros((len(these), asking[these].max()), np.int64)
            keys = np.zeros((len(these), self._lengths[these].max()), np.int64)
            for line, sample in enumerate(these):
                queries[line, : asking[sample]] = np.arange(self._asking[sample], self._asking[sample + 1])
                keys[line, : self._lengths[sample]] = self._keys[sample]
            real = np.arange(queries.shape[1]) < asking[these][:, None]
            order.append(queries[real])
            facts = queries, keys, real, self._repeated[these], self._lengths[these]
            stacks.append(_SharedStack(*map(self._sent, facts)))
        inverse = np.empty(int(asking.sum()), np.int64)
        inverse[np.concatenate(order)] = np.arange(len(inverse))
        return stacks, self._sent(inverse)

    def block_mask(self, window: int | None) -> Any:
        """For FlexAttention, of U queries and T listed keys; made when a layer asks for it first. `window`: tokens that a token
        sees, itself included; None: all before it in its sample."""
        if window not in self._block_masks:
            self._block_masks[window] = self._make_block_mask(window)
        return self._block_masks[window]

    def _make_block_mask(self, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        asking, samples = self._lengths - self._repeated, np.arange(len(self._lengths))
        offsets = self._repeated - self._asking[:-1]
        asker = self._sent(np.repeat(samples, asking))
        place = self._sent(np.arange(asking.sum()) + np.repeat(offsets, asking))
        owner = self._sent(np.repeat(samples, self._lengths))
        starts = np.cumsum(self._lengths) - self._lengths
        key_place = self._sent(np.arange(self._lengths.sum()) - np.repeat(starts, self._lengths))

        def inside(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            back = place[q] - key_place[k]
            seen = (back >= 0) & (asker[q] == owner[k])
            return seen if window is None else seen & (back < window)

        return create_block_mask(inside, None, None, len(asker), len(owner), device=self._device)


class _SharedStack:
    """B samples of like lengths as a batch."""

    def __init__(self, queries: Tensor, keys: Tensor, real: Tensor, repeated: Tensor, lengths: Tensor) -> None:
        """queries [B, Lq] and keys [B, Lk] int64: places among the U tokens, any beyond a sample's end; real [B, Lq] bool;
        repeated, lengths [B] int64."""
        self.queries, self.keys, self.real = queries, keys, real
        self._repeated, self._lengths = repeated, lengths
        self._seen: dict[int | None, Tensor] = {}

    def seen(self, window: int | None) -> Tensor:
        """[B, 1, Lq, Lk] True where a query sees a key. One beyond its sample's end sees some too, so that it is a number."""
        if window not in self._seen:
            device = self.keys.device
            ends = self._lengths[:, None] - 1
            place = (self._repeated[:, None] + torch.arange(self.queries.shape[1], device=device)).minimum(ends)
            back = place[:, :, None] - torch.arange(self.keys.shape[1], device=device)
            self._seen[window] = ((back >= 0) if window is None else (back >= 0) & (back < window))[:, None]
        return self._seen[window]
