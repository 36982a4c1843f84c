"""From sharded parameters to flat buckets: each rank packs its shards of a bucket, rank 0 puts them together.

Owns the arithmetic of FSDP's shards (rows of the first dimension, as `torch.chunk` cuts them). A bucket is all that exists
whole at a time, and on rank 0 alone; it is cast to its dtype on the wire before it travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from telescope.backends.common.flat_buckets import dtype_name, host_weights, view_in
from telescope.records import TensorSpec
from telescope.weights.buckets import ITEM_BYTES, Bucket, ModelTensor, aligned


@dataclass(frozen=True)
class BucketPart:
    """A tensor to be published: all of a parameter, or rows of it, see `telescope.backends.common.names.Rows`."""

    parameter: Tensor
    shape: tuple[int, ...]
    start: int = 0
    depth: int = 1
    exact: bool = False
    """It keeps its dtype on the way."""

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def held(self, rank: int, size: int) -> tuple[int, int, int]:
        """(first row of the tensor, count, their place among the rank's own rows): what of it a rank of `size` has, whose
        share of the first axis is as `torch.chunk` cuts it; the last ranks may have none."""
        whole, inner = self.parameter.shape[0], self.parameter.shape[1] if self.depth == 2 else 1
        each = -(-whole // size)
        begin, end = (min(place * each, whole) * inner for place in (rank, rank + 1))
        first, last = max(begin, self.start), min(end, self.start + self.rows)
        return (first - self.start, last - first, first - begin) if last > first else (0, 0, 0)

    def local(self, first: int, count: int) -> Tensor:
        """`count` rows [count, ...] of those that lie here, from `first` on; the rank's rows of its neighbours in the parameter
        are counted, too. Without a gradient's history only under `torch.no_grad`."""
        here = self.parameter.to_local() if isinstance(self.parameter, DTensor) else self.parameter
        if self.depth == 2:
            here = here.flatten(0, 1)
        return here if not first and count == here.size(0) else here[first : first + count]

    def whole(self) -> Tensor:
        """Where the parameter is here as a whole."""
        if self.shape:
            return self.local(self.start, self.rows)
        return self.parameter.to_local() if isinstance(self.parameter, DTensor) else self.parameter


Published = Mapping[str, Tensor | BucketPart]
"""By name; a tensor stands for all of itself."""


def _part(published: Tensor | BucketPart) -> BucketPart:
    return published if isinstance(published, BucketPart) else BucketPart(published, tuple(published.shape))


def layout(published: Published) -> tuple[ModelTensor, ...]:
    """The whole tensors, though only shards may be here."""
    parts = {name: _part(each) for name, each in published.items()}
    return tuple(ModelTensor(name, dtype_name(part.parameter), part.shape, part.exact) for name, part in parts.items())


@dataclass(frozen=True)
class _RankShare:
    """One rank's rows of a tensor in its message, from byte `start` on: `count` of them, row `first` of the tensor at first."""

    spec: TensorSpec
    start: int
    first: int
    count: int
    place: int
    """Of the first among the rank's own rows of the parameter."""

    @property
    def row_bytes(self) -> int:
        return math.prod(self.spec.shape[1:]) * ITEM_BYTES[self.spec.dtype]


class Packer:
    """Writes versions of one model, bucket by bucket; see `telescope.weights.base.Source.pack`.

    What is the same from version to version is worked out once: which rank has which rows, and, as long as a bucket is written
    to the same memory, the tensors' places in it. That memory is kept for the next version: for a bucket written once there is
    `pack`.
    """

    def __init__(
        self, published: Callable[[], Published], rank: int, size: int,
        group: dist.ProcessGroup | None = None, device: str | None = None,
    ) -> None:  # fmt: skip
        """`rank` and `size` are those in `group`, the ranks that hold the model together with rank 0 (none: all); `device`:
        where they gather, if parameters lie elsewhere. `published` is asked at the first bucket of each version; it gives the
        same mapping, never changed, as long as it is the same parameters."""
        self._ask, self._rank, self._size, self._group = published, rank, size, group
        self._device = None if device is None else torch.device(device)
        self._published: Published | None = None
        self._loads: dict[int, _BucketLoad] = {}

    @torch.no_grad()
    def pack(self, bucket: Bucket, out: Tensor | None) -> None:
        load = self._load(bucket)
        if load.sharded:
            mine = load.mine(self._rank, self._device or load.sharded[0].parameter.device)
            found = [torch.empty_like(mine) for _ in range(self._size)] if out is not None else None
            dist.gather(mine, found, dst=0, group=self._group)
            if out is not None and found is not None:
                load.join(found, out)
        if out is not None:
            _copy([part.whole() for part in load.whole], load.places(out))

    def _load(self, bucket: Bucket) -> _BucketLoad:
        if not bucket.start or self._published is None:
            published = self._ask()
            if published is not self._published:
                self._published, self._loads = published, {}
        load = self._loads.get(bucket.start)
        if load is None or load.bucket != bucket:
            if not bucket.start:  # the layout is cut otherwise: nothing of the old cut is of use, nor are its places
                self._loads = {}
            load = self._loads[bucket.start] = _BucketLoad(self._published, bucket, self._size)
        return load


def pack(
    published: Published, bucket: Bucket, out: Tensor | None, rank: int, size: int,
    group: dist.ProcessGroup | None = None, device: str | None = None,
) -> None:  # fmt: skip
    """A bucket once; see `Packer`."""
    Packer(lambda: published, rank, size, group, device).pack(bucket, out)


class _BucketLoad:
    """What a bucket consists of, and where it goes. `sharded`: the parts of which this rank has rows at the most; `whole`: the
    others."""

    def __init__(self, published: Published, bucket: Bucket, size: int) -> None:
        self.bucket = bucket
        self._parts = {spec.name: _part(published[spec.name]) for spec in bucket.specs}
        spread = [spec for spec in bucket.specs if size > 1 and _is_sharded(self._parts[spec.name].parameter)]
        names = {spec.name for spec in spread}
        self._specs = [spec for spec in bucket.specs if spec.name not in names]
        self.sharded = [self._parts[spec.name] for spec in spread]
        self.whole = [self._parts[spec.name] for spec in self._specs]
        self._shares, self._nbytes = _shares(self._parts, spread, size)
        self._places: tuple[int, list[Tensor]] | None = None

    def places(self, out: Tensor) -> list[Tensor]:
        """Those of the tensors that are not shards, in the bytes of the bucket."""
        address = out.data_ptr()
        if self._places is None or self._places[0] != address:
            self._places = address, [view_in(out, self.bucket.start, spec) for spec in self._specs]
        return self._places[1]

    def mine(self, rank: int, device: torch.device) -> Tensor:
        """What this rank sends."""
        message = torch.zeros(self._nbytes, dtype=torch.uint8, device=device)
        shares = self._shares[rank]
        rows = [self._parts[share.spec.name].local(share.place, share.count) for share in shares]
        _copy(rows, [_rows_of(message, share) for share in shares])
        return message

    def join(self, messages: Sequence[Tensor], out: Tensor) -> None:
        sources, targets = [], []
        for message, own in zip(messages, self._shares, strict=True):
            for share in own:
                nbytes = share.count * share.row_bytes
                offset = share.spec.offset - self.bucket.start + share.first * share.row_bytes
                sources.append(message[share.start : share.start + nbytes])
                targets.append(out[offset : offset + nbytes])
        _copy(sources, targets)


def host_tensors(
    published: Published, device: str, rank: int, size: int, dtype: str | None, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors in host memory, bucket by bucket, on rank 0; the others run along and yield nothing."""

    def packed(bucket: Bucket, out: Tensor | None) -> None:
        pack(published, bucket, out, rank, size, group, device)

    return host_weights(layout(published), packed, device, receives=rank == 0, dtype=dtype)


def _shares(parts: Mapping[str, BucketPart], specs: Sequence[TensorSpec], size: int) -> tuple[list[list[_RankShare]], int]:
    """What each rank sends, and the bytes of the longest message, which is the length of all. The same on every rank."""
    shares: list[list[_RankShare]] = []
    longest = 0
    for rank in range(size):
        own, end = [], 0
        for spec in specs:
            first, count, place = parts[spec.name].held(rank, size)
            if count:
                share = _RankShare(spec, end, first, count, place)
                own.append(share)
                end = aligned(end + count * share.row_bytes)
        shares.append(own)
        longest = max(longest, end)
    return shares, longest


def _is_sharded(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    *copies, spread = parameter.placements
    if spread != Shard(0) or any(copy != Replicate() for copy in copies):
        raise ValueError(
            f"a parameter is placed {parameter.placements}, and only shards of the first dimension can be gathered"
        )
    return True


def _rows_of(message: Tensor, share: _RankShare) -> Tensor:
    piece = message[share.start : share.start + share.count * share.row_bytes]
    return piece.view(getattr(torch, share.spec.dtype)).view(share.count, *share.spec.shape[1:])


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """All at once, with the cast."""
    if sources:
        torch._foreach_copy_(list(targets), list(sources))
