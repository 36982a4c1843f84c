"""Tensors in the bytes of a bucket, and all buckets of a version one after another to host memory.

What fills a bucket is each backend's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from telescope.records import TensorSpec
from telescope.weights.buckets import Bucket, ModelTensor, buckets, lay_out

HOST_BUCKET_BYTES = 256 << 20
"""What is gathered at once on the way to host memory."""


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def view_in(flat: Tensor, start: int, spec: TensorSpec) -> Tensor:
    """A tensor in place within the bytes of a bucket that begins at `start`."""
    first = spec.offset - start
    return flat[first : first + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)


def host_weights(
    layout: Sequence[ModelTensor], pack: Callable[[Bucket, Tensor | None], None], device: str, *, receives: bool,
    dtype: str | None,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Whole tensors in host memory, bucket by bucket, on the rank that receives; the others run along and yield nothing."""
    specs, _ = lay_out(layout, dtype)
    for bucket in buckets(specs, HOST_BUCKET_BYTES):
        out = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device) if receives else None
        pack(bucket, out)
        if out is not None:
            here = out.cpu()
            yield from ((spec.name, view_in(here, bucket.start, spec)) for spec in bucket.specs)
