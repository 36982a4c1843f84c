"""Which ranks hold a model together: all of them, or each of several replicas its own whole one (HSDP).

Owns the device mesh and what a rank is in it. Refuses sizes that do not divide; `telescope.backends.fsdp` says so beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from telescope.backends.base import World


@dataclass(frozen=True)
class Spread:
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

    def rows(self, whole: int) -> tuple[int, int]:
        """First row and count of this rank's shard of a tensor with so many rows, cut as `torch.chunk` does."""
        each = -(-whole // self.shards)
        first = min(self.shard * each, whole)
        return first, min(each, whole - first)


def spread(world: World, replicas: int = 1) -> Spread:
    """A collective. `replicas` divides the number of ranks."""
    device, shards = world.device.partition(":")[0], world.size // replicas
    if replicas == 1:
        mesh = init_device_mesh(device, (world.size,))
        group = mesh.get_group()
    else:
        mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))
        group = mesh["shard"].get_group()
    return Spread(mesh=mesh, shards=shards, shard=world.rank % shards, replica=world.rank // shards, group=group)
