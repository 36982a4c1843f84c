"""From sharded parameters to flat buckets: each rank packs its shards of a bucket, rank 0 puts them together.

Owns the arithmetic of FSDP's shards (rows of the first dimension, as `torch.chunk` cuts them). A bucket is all that exists
whole at a time, and on rank 0 alone; it is cast to its dtype on the wire before it travels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from telescope.records import TensorSpec
from telescope.weights.buckets import ITEM_BYTES, Bucket, aligned, buckets, lay_out
from telescope.weights.buckets import Tensor as TensorKind

HOST_BUCKET_BYTES = 256 << 20
"""What is gathered at once on the way to host memory."""


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def layout(parameters: Mapping[str, Tensor]) -> tuple[TensorKind, ...]:
    """The whole tensors, though only shards may be here."""
    return tuple(TensorKind(name, dtype_name(tensor), tuple(tensor.shape)) for name, tensor in parameters.items())


@dataclass(frozen=True)
class _Share:
    """One tensor's rows in every rank's message: bytes `start` to `start + nbytes` of it, the first `rows` of them in use."""

    spec: TensorSpec
    start: int
    rows_a_rank: int
    row_bytes: int

    def rows(self, rank: int) -> tuple[int, int]:
        """First row and count of a rank; a tensor with few rows leaves the last ranks none."""
        whole = self.spec.shape[0]
        first = min(rank * self.rows_a_rank, whole)
        return first, min(self.rows_a_rank, whole - first)


@torch.no_grad()
def pack(
    parameters: Mapping[str, Tensor], bucket: Bucket, out: Tensor | None, rank: int, size: int,
    group: dist.ProcessGroup | None = None, device: str | None = None,
) -> None:  # fmt: skip
    """See `telescope.weights.base.Source.pack`. `rank` and `size` are those in `group`, the ranks that hold the model together
    with rank 0 (none: all); `device`: where they gather, if parameters lie elsewhere."""
    sharded = [spec for spec in bucket.specs if size > 1 and _is_sharded(parameters[spec.name])]
    if sharded:
        here = torch.device(device) if device is not None else _local(parameters[sharded[0].name]).device
        mine, shares = _mine(parameters, sharded, rank, size, here)
        parts = [torch.empty_like(mine) for _ in range(size)] if out is not None else None
        dist.gather(mine, parts, dst=0, group=group)
        if out is not None and parts is not None:
            _join(parts, shares, bucket.start, out)
    if out is not None:
        whole = [spec for spec in bucket.specs if spec not in sharded] if sharded else bucket.specs
        _copy([_local(parameters[spec.name]) for spec in whole], [_view(out, bucket.start, spec) for spec in whole])


def host_tensors(
    parameters: Mapping[str, Tensor], device: str, rank: int, size: int, dtype: str | None,
    group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Whole tensors in host memory, bucket by bucket, on rank 0; the others run along and yield nothing."""
    specs, _ = lay_out(layout(parameters), dtype)
    for bucket in buckets(specs, HOST_BUCKET_BYTES):
        out = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device) if rank == 0 else None
        pack(parameters, bucket, out, rank, size, group, device)
        if out is not None:
            here = out.cpu()
            yield from ((spec.name, _view(here, bucket.start, spec)) for spec in bucket.specs)


def _mine(
    parameters: Mapping[str, Tensor], specs: Sequence[TensorSpec], rank: int, size: int, device: torch.device
) -> tuple[Tensor, list[_Share]]:
    """What this rank sends, and how the messages of all are laid out."""
    shares, nbytes = _shares(specs, size)
    mine = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    places, rows = [], []
    for share in shares:
        local = _local(parameters[share.spec.name])
        count = share.rows(rank)[1]
        if count:
            rows.append(local[:count])
            places.append(_rows_of(mine, share, count))
    _copy(rows, places)
    return mine, shares


def _join(parts: Sequence[Tensor], shares: Sequence[_Share], start: int, out: Tensor) -> None:
    sources, targets = [], []
    for rank, part in enumerate(parts):
        for share in shares:
            first, count = share.rows(rank)
            if count:
                offset = share.spec.offset - start + first * share.row_bytes
                sources.append(part[share.start :][: count * share.row_bytes])
                targets.append(out[offset:][: count * share.row_bytes])
    _copy(sources, targets)


def _shares(specs: Sequence[TensorSpec], size: int) -> tuple[list[_Share], int]:
    """The same on every rank: each message has room for the largest share, which is rank 0's."""
    shares, end = [], 0
    for spec in specs:
        rows = -(-spec.shape[0] // size)
        row_bytes = math.prod(spec.shape[1:]) * ITEM_BYTES[spec.dtype]
        shares.append(_Share(spec, end, rows, row_bytes))
        end = aligned(end + rows * row_bytes)
    return shares, end


def _is_sharded(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    *copies, spread = parameter.placements
    if spread != Shard(0) or any(copy != Replicate() for copy in copies):
        raise ValueError(
            f"a parameter is placed {parameter.placements}, and only shards of the first dimension can be gathered"
        )
    return True


def _local(parameter: Tensor) -> Tensor:
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _view(flat: Tensor, start: int, spec: TensorSpec) -> Tensor:
    """A tensor in place within the bytes of a bucket that begins at `start`."""
    return flat[spec.offset - start :][: spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)


def _rows_of(message: Tensor, share: _Share, count: int) -> Tensor:
    piece = message[share.start :][: count * share.row_bytes]
    return piece.view(getattr(torch, share.spec.dtype)).view(count, *share.spec.shape[1:])


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """All at once, with the cast."""
    if sources:
        torch._foreach_copy_(list(targets), list(sources))
