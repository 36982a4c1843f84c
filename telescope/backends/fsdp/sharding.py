"""Which ranks hold a model together: all of them, or each of several replicas its own whole one (HSDP).

Owns the device mesh and what a rank is in it. Refuses sizes that do not divide; `telescope.backends.fsdp` says so beforehand.
Says what of a tensor lies on this rank, and spreads other tensors as it is: it knows DTensor so that others need not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from telescope.backends.base import World
from telescope.backends.common.context import Context, join_context_group


@dataclass(frozen=True)
class ModelMesh:
    """Ranks 0 to `shards` - 1 are the first replica, and so on: neighbours share a host, where links are fast."""

    mesh: DeviceMesh
    """[shard], or [replicate, shard] where there are several replicas."""
    shards: int
    shard: int
    """Of this rank."""
    replica: int
    """Of this rank."""
    group: dist.ProcessGroup
    """The ranks of this rank's replica."""
    context: Context | None = None
    """The ranks that share each packed row with this one; None: it has rows of its own."""

    def rows(self, whole: int) -> tuple[int, int]:
        """First row and count of this rank's shard of a tensor with so many rows, cut as `torch.chunk` does."""
        each = -(-whole // self.shards)
        first = min(self.shard * each, whole)
        return first, min(each, whole - first)


def make_mesh(world: World, replicas: int = 1, sharing: int = 1) -> ModelMesh:
    """A collective. `replicas` divides the number of ranks, and so does `sharing`, the ranks that share each packed row."""
    device, shards = world.device.partition(":")[0], world.size // replicas
    if replicas == 1:
        mesh = init_device_mesh(device, (world.size,))
        group = mesh.get_group()
    else:
        mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))
        group = mesh["shard"].get_group()
    return ModelMesh(
        mesh=mesh,
        shards=shards,
        shard=world.rank % shards,
        replica=world.rank // shards,
        group=group,
        context=join_context_group(world.rank, world.size, sharing),
    )


def local(tensor: Tensor) -> Tensor:
    """What of it lies here: the tensor itself where it is not a DTensor. Shares its memory."""
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
