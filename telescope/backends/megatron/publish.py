"""From the ranks' parts to whole Hugging Face tensors in flat buckets, on rank 0 of the trainer.

Owns the exchange: those ranks of the first whole model that have parts of a bucket send them, already cast, and rank 0 puts
them in place. The first ranks that have all experts of a stage together, which may be of several models, first bring them
together on that stage's first rank. A bucket is all that exists whole at a time.
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
from telescope.backends.megatron.stages import StageLayout
from telescope.records import TensorSpec
from telescope.weights.buckets import ITEM_BYTES, Bucket, ModelTensor, aligned


class PartPacker:
    """`pack` is a collective."""

    def __init__(self, masters: Masters, table: TensorMap, layout: StageLayout, parallel: Parallel, device: str) -> None:
        """A collective."""
        self._masters, self._table, self._parallel, self._device = masters, table, parallel, device
        self._homes = {own: layout.home(table.of[where.tensor][0].parameter) for own, where in table.files.items()}
        """Stages by tensor of a model's files."""
        if parallel.model_group.size() > 1:  # with NCCL all ranks of a group have to meet before two of them can talk
            dist.all_reduce(torch.zeros(1, device=device), group=parallel.model_group)

    def layout(self) -> Sequence[ModelTensor]:
        dtype = str(self._masters.dtype).removeprefix("torch.")
        return [ModelTensor(name, dtype, where.shape) for name, where in self._table.files.items()]

    @torch.no_grad()
    def pack(self, bucket: Bucket, out: Tensor | None) -> None:
        found, parallel = self._parts(bucket), self._parallel
        if parallel.experts.copies.rank == 0:
            found |= self._gathered_experts(bucket, found)
        if parallel.alike.rank:
            return
        mine = self._message(bucket, parallel.stage, parallel.tensor_rank)
        if parallel.stage or parallel.tensor_rank:
            self._send(mine, found)
            return
        assert out is not None
        arrived = self._received(bucket)
        for spec, _ in mine:
            self._put(view_in(out, bucket.start, spec), spec, 0, found[spec.name])
        for tensor_rank, message, flat in arrived:
            for spec, place in message:
                part = _piece(flat, place, spec, self._part_shape(spec, tensor_rank))
                self._put(view_in(out, bucket.start, spec), spec, tensor_rank, part)

    def _parts(self, bucket: Bucket) -> dict[str, Tensor]:
        """This rank's, of each tensor of the bucket that its stage sends. Empty on ranks that have none to send."""
        found: dict[str, Tensor] = {}
        table = self._table
        here = [table.files[spec.name].tensor for spec in bucket.specs if self._homes[spec.name] == self._parallel.stage]
        for name in dict.fromkeys(table.of[each][0].parameter for each in here):
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

    def _gathered_experts(self, bucket: Bucket, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """The matrices of all of a stage's experts on the first of the ranks that share them out, each from the rank that has
        it; nothing on the others."""
        experts, each = self._parallel.experts, max(1, self._table.facts.experts // self._parallel.experts.size)
        specs = [spec for spec in bucket.specs if self._is_expert(spec) and self._homes[spec.name] == self._parallel.stage]
        if not specs or experts.size == 1:
            return {}  # what is there is all
        places, ends = [], [0] * experts.size
        for spec in specs:
            rank = (self._table.files[spec.name].expert or 0) // each
            places.append((spec, rank, ends[rank]))
            ends[rank] = aligned(ends[rank] + spec.nbytes)
        message = torch.zeros(max(ends), dtype=torch.uint8, device=self._device)
        for spec, rank, place in places:
            if rank == experts.rank:
                _piece(message, place, spec, spec.shape).copy_(found[spec.name])
        every = [torch.empty_like(message) for _ in range(experts.size)] if experts.rank == 0 else None
        dist.gather(message, every, group=experts.group, group_dst=0)
        if every is None:
            return {}
        return {spec.name: _piece(every[rank], place, spec, spec.shape) for spec, rank, place in places}

    # ---- messages: parts of tensors one after another, and where each begins

    def _message(self, bucket: Bucket, stage: int, tensor_rank: int) -> list[tuple[TensorSpec, int]]:
        """What a rank has to send of a bucket. What all ranks of its stage have, the first of them sends, and all experts."""
        found, end = [], 0
        for spec in bucket.specs:
            if self._homes[spec.name] == stage and (tensor_rank == 0 or self._dim(spec) is not None):
                found.append((spec, end))
                end = aligned(end + self._nbytes(spec, tensor_rank))
        return found

    def _flat(self, message: list[tuple[TensorSpec, int]], tensor_rank: int) -> Tensor:
        spec, place = message[-1]
        return torch.empty(aligned(place + self._nbytes(spec, tensor_rank)), dtype=torch.uint8, device=self._device)

    def _send(self, message: list[tuple[TensorSpec, int]], found: dict[str, Tensor]) -> None:
        if not message:
            return
        flat = self._flat(message, self._parallel.tensor_rank)
        for spec, place in message:
            part = found[spec.name]
            _piece(flat, place, spec, tuple(part.shape)).copy_(part)
        _exchange([dist.P2POp(dist.isend, flat, group=self._parallel.model_group, group_peer=0)])

    def _received(self, bucket: Bucket) -> list[tuple[int, list[tuple[TensorSpec, int]], Tensor]]:
        """(place in its stage, message, bytes) of all other ranks that have something."""
        size, found, operations = self._parallel.tensor_size, [], []
        for rank in range(1, size * self._parallel.stages):
            if message := self._message(bucket, rank // size, rank % size):
                flat = self._flat(message, rank % size)
                found.append((rank % size, message, flat))
                operations.append(dist.P2POp(dist.irecv, flat, group=self._parallel.model_group, group_peer=rank))
        _exchange(operations)
        return found

    def _put(self, whole: Tensor, spec: TensorSpec, tensor_rank: int, part: Tensor) -> None:
        dim = self._dim(spec)
        if dim is None:
            whole.copy_(part)
            return
        each = -(-spec.shape[dim] // self._parallel.tensor_size)
        whole.narrow(dim, tensor_rank * each, part.shape[dim]).copy_(part)

    def _is_expert(self, spec: TensorSpec) -> bool:
        return self._table.files[spec.name].expert is not None

    def _dim(self, spec: TensorSpec) -> int | None:
        """Along which ranks that hold matrices together have parts of it."""
        return None if self._is_expert(spec) else self._table.of[spec.name][1].dim

    def _part_shape(self, spec: TensorSpec, tensor_rank: int) -> tuple[int, ...]:
        """As `torch.chunk` cuts it."""
        dim = self._dim(spec)
        if dim is None:
            return spec.shape
        each = -(-spec.shape[dim] // self._parallel.tensor_size)
        count = min(each, spec.shape[dim] - tensor_rank * each)
        return tuple(count if axis == dim else length for axis, length in enumerate(spec.shape))

    def _nbytes(self, spec: TensorSpec, tensor_rank: int) -> int:
        return math.prod(self._part_shape(spec, tensor_rank)) * ITEM_BYTES[spec.dtype]


def _exchange(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _piece(message: Tensor, place: int, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    nbytes = math.prod(shape) * ITEM_BYTES[spec.dtype]
    return message[place : place + nbytes].view(getattr(torch, spec.dtype)).view(shape)
