"""How a version of the weights is laid out and cut: one flat byte space, cut at tensor boundaries into buckets.

Owns the arithmetic that both sides of a transport do from the same specs. Pure: no torch, no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from telescope.records import TensorSpec

ALIGNMENT = 64
"""Every tensor begins at a multiple of it: any dtype can be viewed in place, and copies run at full width."""
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Dtypes that `lay_out` may cast; quantised and integer tensors travel as they are."""


@dataclass(frozen=True)
class ModelTensor:
    """A tensor as its model names it, e.g. `ModelTensor("model.norm.weight", "float32", (2048,))`. `exact`: it keeps its dtype
    on the way."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    exact: bool = False


@dataclass(frozen=True)
class Bucket:
    """Whole tensors that travel as one piece: bytes `start` to `stop` of the flat space."""

    start: int
    stop: int
    specs: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


IN_TURN = 2
"""Buffers of a bucket's size that a side of a broadcast fills in turn, where a version does not go straight to its place."""


def largest(cut: Sequence[Bucket]) -> int:
    """Bytes of the largest bucket; 0 of none."""
    return max((bucket.nbytes for bucket in cut), default=0)


def aligned(offset: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def lay_out(tensors: Iterable[ModelTensor], dtype: str | None = None) -> tuple[tuple[TensorSpec, ...], int]:
    """Where each tensor lies, and the bytes in all (a multiple of `ALIGNMENT`). `dtype`: what floating ones are cast to.

    Raises `ValueError` for a name given twice and for a dtype that no receiver knows.
    """
    specs: dict[str, TensorSpec] = {}
    offset = 0
    for tensor in tensors:
        if tensor.name in specs:
            raise ValueError(f"tensor {tensor.name} is given twice; tied tensors are published once")
        kind = dtype if dtype is not None and tensor.dtype in FLOATING and not tensor.exact else tensor.dtype
        if kind not in ITEM_BYTES:
            raise ValueError(
                f"tensor {tensor.name} has dtype {kind}, which servers can't read; known are {', '.join(ITEM_BYTES)}"
            )
        nbytes = math.prod(tensor.shape) * ITEM_BYTES[kind]
        specs[tensor.name] = TensorSpec(tensor.name, kind, tensor.shape, offset, nbytes)
        offset = aligned(offset + nbytes)
    return tuple(specs.values()), offset


def buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut the layout: each bucket holds as many tensors in a row as fit into `bucket_bytes`, one at least.

    A larger tensor has a bucket of its own; with `bucket_bytes=0` every tensor has. A bucket begins and ends at a multiple of
    `ALIGNMENT`: what lies between tensors travels too, so that the buckets together are the whole layout.
    """
    cut: list[Bucket] = []
    held: list[TensorSpec] = []
    for spec in specs:
        if held and aligned(spec.offset + spec.nbytes) - held[0].offset > bucket_bytes:
            cut.append(_bucket(held))
            held = []
        held.append(spec)
    if held:
        cut.append(_bucket(held))
    return tuple(cut)


def _bucket(specs: Sequence[TensorSpec]) -> Bucket:
    return Bucket(specs[0].offset, aligned(specs[-1].offset + specs[-1].nbytes), tuple(specs))


def misplaced(specs: Sequence[TensorSpec], nbytes: int) -> list[str]:
    """What can't be true of a layout of `nbytes`, in sentences: a size that is not its shape's, a place that is not one of its
    dtype, beyond the end or another tensor's. Whoever writes it piece by piece would notice too late, or never."""
    found, end, before = [], 0, ""
    for spec in sorted(specs, key=lambda spec: spec.offset):
        item = ITEM_BYTES.get(spec.dtype, 0)
        if spec.nbytes != math.prod(spec.shape) * item:
            found.append(f"{spec.name} is {spec.dtype}{list(spec.shape)} and said to have {spec.nbytes} bytes")
        elif spec.offset < 0 or spec.offset % max(item, 1) or spec.offset + spec.nbytes > nbytes:
            found.append(f"{spec.name} lies in bytes {spec.offset} to {spec.offset + spec.nbytes} of {nbytes}")
        elif spec.nbytes and spec.offset < end:
            found.append(f"{spec.name} begins at byte {spec.offset}, within {before}")
        if spec.nbytes:
            end, before = max(end, spec.offset + spec.nbytes), spec.name
    return found
