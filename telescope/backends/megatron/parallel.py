"""Which ranks hold the model together (tensor parallelism), and which have equal parts of it and other rows (data parallelism).

Owns megatron-core's groups from start to end. Ranks 0 to T - 1 are the first whole model, and so on: neighbours share a host.
Experts are dealt out over E neighbours of all ranks, whatever T is: whole matrices, so that ranks 0 to E - 1 have all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from telescope.backends.base import World


@dataclass(frozen=True)
class Copies:
    """The ranks with equal parts of some parameters, among which this one is `rank`."""

    size: int
    rank: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class ExpertPlace:
    """Which of the experts are here. The ranks of `group` have all of them together, and `copies` have the same ones."""

    size: int
    rank: int
    group: dist.ProcessGroup
    copies: Copies
    mesh: DeviceMesh
    """Of the ranks of `group`, in one dimension."""


@dataclass(frozen=True)
class Parallel:
    """This rank's place. Groups are torch.distributed's."""

    tensor_size: int
    tensor_rank: int
    tensor_group: dist.ProcessGroup
    data_size: int
    data_rank: int
    data_group: dist.ProcessGroup
    mesh: DeviceMesh
    """Of the ranks of this rank's whole model, in one dimension."""
    experts: ExpertPlace

    def copies(self, *, of_expert: bool) -> Copies:
        """Of an expert's parameters, or of the others."""
        return self.experts.copies if of_expert else Copies(self.data_size, self.data_rank, self.data_group)

    def spread(self, part: Tensor, dim: int | None, shape: tuple[int, ...], *, of_expert: bool = False) -> Tensor:
        """This rank's part of a tensor of `shape`, cut along `dim` as `torch.chunk` does, as a DTensor; None: each has all."""
        whole = 1
        strides = []
        for length in reversed(shape):
            strides.append(whole)
            whole *= length
        placement = Replicate() if dim is None else Shard(dim)
        return DTensor.from_local(
            part, self.experts.mesh if of_expert else self.mesh, (placement,), run_check=False, shape=torch.Size(shape),
            stride=tuple(reversed(strides)),
        )  # fmt: skip


def make_parallel(world: World, tensor_size: int, timeout_s: float, expert_size: int = 1) -> Parallel:
    """A collective; torch.distributed is set up before. `tensor_size` and `expert_size` divide the number of ranks."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_size,
        expert_model_parallel_size=expert_size,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_s / 60,
    )
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    return Parallel(
        tensor_size=tensor_size,
        tensor_rank=world.rank % tensor_size,
        tensor_group=tensor_group,
        data_size=world.size // tensor_size,
        data_rank=world.rank // tensor_size,
        data_group=parallel_state.get_data_parallel_group(),
        mesh=_mesh(tensor_group, world),
        experts=_expert_place(world),
    )


def _expert_place(world: World) -> ExpertPlace:
    group = parallel_state.get_expert_model_parallel_group()
    others = parallel_state.get_expert_data_parallel_group()
    return ExpertPlace(
        size=group.size(),
        rank=group.rank(),
        group=group,
        copies=Copies(others.size(), others.rank(), others),
        mesh=_mesh(group, world),
    )


def _mesh(group: dist.ProcessGroup, world: World) -> DeviceMesh:
    mesh: Any = DeviceMesh.from_group(group, world.device.partition(":")[0])
    assert isinstance(mesh, DeviceMesh)
    return mesh


def leave() -> None:
    """Groups are gone; another backend of this process can make its own."""
    parallel_state.destroy_model_parallel()
