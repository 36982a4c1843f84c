"""What of a tensor lies on this rank, and other tensors spread as it is. Knows DTensor so that others need not."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """What of it lies here: the tensor itself where it is no DTensor. Shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: Tensor, part: Tensor) -> Tensor:
    """`part` as this rank's part of a tensor spread as `tensor` is, though it may lie on another device than the mesh's: as
    fully_shard's own offloaded parameters do."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor(part, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def rows_like(tensor: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Zeros [rows of `tensor`, columns], spread over the ranks by rows as `tensor` is."""
    part = local(tensor)
    zeros = torch.zeros(part.shape[0], columns, dtype=dtype, device=part.device)
    if not isinstance(tensor, DTensor):
        return zeros
    shape = (tensor.shape[0], columns)
    return DTensor.from_local(
        zeros, tensor.device_mesh, tensor.placements, run_check=False, shape=torch.Size(shape), stride=(columns, 1)
    )


def share_bytes(tensor: Tensor) -> int:
    """Of the largest share of any rank, so that each rank finds the same number."""
    if not isinstance(tensor, DTensor):
        return tensor.nbytes
    rows = -(-tensor.shape[0] // tensor.device_mesh.size(tensor.device_mesh.ndim - 1))
    return rows * tensor.dtype.itemsize * math.prod(tensor.shape[1:])
