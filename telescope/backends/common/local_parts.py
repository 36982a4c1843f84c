"""What of a tensor lies on this rank, whether it is spread over ranks or not: so that others need not know DTensor."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """What of it lies here: the tensor itself where it is not a DTensor. Shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: Tensor, part: Tensor) -> Tensor:
    """`part` as this rank's part of a tensor spread as `tensor` is, though it may lie on another device than the mesh's: as
    fully_shard's own offloaded parameters do."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor(part, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def share_bytes(tensor: Tensor) -> int:
    """Of the largest share of any rank, so that each rank finds the same number."""
    if not isinstance(tensor, DTensor):
        return tensor.nbytes
    rows = -(-tensor.shape[0] // tensor.device_mesh.size(tensor.device_mesh.ndim - 1))
    return rows * tensor.dtype.itemsize * math.prod(tensor.shape[1:])
