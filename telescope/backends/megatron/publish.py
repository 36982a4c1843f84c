"""From the ranks' parts to whole Hugging Face tensors in flat buckets, on rank 0 of the trainer.

Owns the exchange: the ranks of the first whole model send their parts of a bucket, already cast, and rank 0 puts them in
place; so do the first ranks that have all experts together, which may be of several models. A bucket is all that exists whole
at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from telescope.backends.common.flat_buckets import view_in
from telescope.backends.megatron.masters import Masters, UpdatedPiece
from telescope.backends.megatron.parallel import Parallel
from telescope.backends.megatron.rules import TensorMap
from telescope.records import TensorSpec
from telescope.weights.buckets import ITEM_BYTES, Bucket, ModelTensor, aligned


class PartPacker:
    """`pack` is a collective."""

    def __init__(self, masters: Masters, table: TensorMap, parallel: Parallel, device: str) -> None:
        self._masters, self._table, self._parallel, self._device = masters, table, parallel, device

    def layout(self) -> Sequence[ModelTensor]:
        dtype = str(self._masters.dtype).removeprefix("torch.")
        return [ModelTensor(name, dtype, where.shape) for name, where in self._table.files.items()]

    @torch.no_grad()
    def pack(self, bucket: Bucket, out: Tensor | None) -> None:
        found = self._parts(bucket)
        of_experts = [spec for spec in bucket.specs if self._table.files[spec.name].expert is not None]
        if of_experts and self._parallel.experts.copies.rank == 0:
            self._gather_experts(of_experts, found, bucket.start, out)
        if self._parallel.data_rank:
            return
        others = [spec for spec in bucket.specs if self._table.files[spec.name].expert is None]
        spread = [spec for spec in others if self._parallel.tensor_size > 1 and self._dim(spec) is not None]
        if spread:
            self._gather(spread, found, bucket.start, out)
        if out is not None:
            names = {spec.name for spec in spread}
            for spec in others:
                if spec.name not in names:
                    view_in(out, bucket.start, spec).copy_(found[spec.name])

    def _parts(self, bucket: Bucket) -> dict[str, Tensor]:
        """This rank's, of each tensor of the bucket. Empty on ranks that have none to send."""
        found: dict[str, Tensor] = {}
        table = self._table
        for name in dict.fromkeys(table.of[table.files[spec.name].tensor][0].parameter for spec in bucket.specs):
            rule, local = table.rules[name], self._local(name, bucket)
            if local is None:
                continue
            if rule.of_experts:
                stack = rule.parts[0].name
                begin = table.here(stack)[1]
                found |= {own: table.files[own].within(local, begin) for own in table.matrices(stack)}
            else:
                found |= table.split(rule, local)
        return found

    def _local(self, name: str, bucket: Bucket) -> Tensor | None:
        """A parameter as it computes, which casting to its own dtype leaves as it is, or as it is updated."""
        computing = self._masters.parameters[name].detach()
        wire = {spec.dtype for spec in bucket.specs}
        if not self._masters.apart or wire == {str(computing.dtype).removeprefix("torch.")}:
            return None if self._masters.copies(name).rank else computing

        def updated(piece: UpdatedPiece) -> Tensor:
            return piece.updated

        return self._masters.whole(name, updated, self._masters.dtype)

    def _gather_experts(self, specs: Sequence[TensorSpec], found: dict[str, Tensor], start: int, out: Tensor | None) -> None:
        """Whole matrices, each from the rank that has its expert."""
        experts, each = self._parallel.experts, max(1, self._table.facts.experts // self._parallel.experts.size)
        places, ends = [], [0] * experts.size
        for spec in specs:
            rank = (self._table.files[spec.name].expert or 0) // each
            places.append((spec, rank, ends[rank]))
            ends[rank] = aligned(ends[rank] + spec.nbytes)
        if experts.size == 1:
            if out is not None:
                for spec in specs:
                    view_in(out, start, spec).copy_(found[spec.name])
            return
        message = torch.zeros(max(ends), dtype=torch.uint8, device=self._device)
        for spec, rank, place in places:
            if rank == experts.rank:
                _piece(message, place, spec, spec.shape).copy_(found[spec.name])
        every = [torch.empty_like(message) for _ in range(experts.size)] if out is not None else None
        dist.gather(message, every, dst=0, group=experts.group)
        if out is not None and every is not None:
            for spec, rank, place in places:
                view_in(out, start, spec).copy_(_piece(every[rank], place, spec, spec.shape))

    def _dim(self, spec: TensorSpec) -> int | None:
        return self._table.of[spec.name][1].dim

    def _gather(self, specs: Sequence[TensorSpec], found: dict[str, Tensor], start: int, out: Tensor | None) -> None:
        size = self._parallel.tensor_size
        places, end = [], 0
        for spec in specs:
            places.append(end)
            end = aligned(end + _largest(spec, self._dim(spec), size))
        message = torch.zeros(end, dtype=torch.uint8, device=self._device)
        for spec, place in zip(specs, places, strict=True):
            part = found[spec.name]
            _piece(message, place, spec, tuple(part.shape)).copy_(part)
        every = [torch.empty_like(message) for _ in range(size)] if out is not None else None
        dist.gather(message, every, dst=0, group=self._parallel.tensor_group)
        if out is None or every is None:
            return
        for spec, place in zip(specs, places, strict=True):
            dim = self._dim(spec)
            assert dim is not None
            whole, each = view_in(out, start, spec), -(-spec.shape[dim] // size)
            for rank, sent in enumerate(every):
                here = whole.narrow(dim, rank * each, min(each, spec.shape[dim] - rank * each))
                here.copy_(_piece(sent, place, spec, tuple(here.shape)))


def _largest(spec: TensorSpec, dim: int | None, size: int) -> int:
    """Bytes of the largest part of any rank."""
    assert dim is not None
    return spec.nbytes // spec.shape[dim] * -(-spec.shape[dim] // size)


def _piece(message: Tensor, place: int, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    nbytes = math.prod(shape) * ITEM_BYTES[spec.dtype]
    return message[place : place + nbytes].view(getattr(torch, spec.dtype)).view(shape)
