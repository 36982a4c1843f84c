"""Which ranks hold a model together: all of them, or each of several replicas its own whole one (HSDP).

Owns the device mesh and what a rank is in it. Refuses sizes that do not divide; `telescope.backends.fsdp` says so beforehand.
Spreads other tensors as one is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from telescope.backends.base import World
from telescope.backends.common.context import Context, join_context_group
from telescope.backends.common.local_parts import local


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
