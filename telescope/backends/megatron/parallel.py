"""Which ranks hold matrices together (tensor parallelism), which have other layers of the same model (pipeline parallelism),
and which have equal parts of it and other rows (data parallelism).

Owns megatron-core's groups from start to end. With T ranks a stage and P stages, ranks 0 to T - 1 are the first stage of the
first model, and ranks 0 to T · P - 1 all of it: neighbours share a host. Experts are dealt out over E neighbours of all ranks,
whatever T is, where there is one stage: whole matrices, so that ranks 0 to E - 1 have all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
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
    stages: int
    stage: int
    pipeline_group: dist.ProcessGroup
    """Of the stages of one model, in order, as far as they have this rank's place in their matrices."""
    pipes: tuple[dist.ProcessGroup, ...]
    """Of the same ranks, one for each kind of message from stage to stage; none where there is one stage."""
    data_size: int
    data_rank: int
    data_group: dist.ProcessGroup
    model_group: dist.ProcessGroup
    """Of all ranks of this rank's model, stage by stage."""
    mesh: DeviceMesh
    """Of the ranks of this rank's stage, in one dimension."""
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


def make_parallel(
    world: World, tensor_size: int, stages: int, pipes: int, timeout_s: float, expert_size: int = 1
) -> Parallel:  # fmt: skip
    """A collective; torch.distributed is set up before. `tensor_size` times `stages` divides the number of ranks, and so does
    `expert_size`, which is 1 where there are several stages. `pipes`: kinds of messages that pass from stage to stage."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=stages,
        expert_model_parallel_size=expert_size,
        # megatron-core wants as many ranks with equal experts as with equal matrices where there are stages
        expert_tensor_parallel_size=1 if stages == 1 else tensor_size,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_s / 60,
        order="tp-cp-ep-pp-dp",
    )
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    model = tensor_size * stages
    return Parallel(
        tensor_size=tensor_size,
        tensor_rank=world.rank % tensor_size,
        tensor_group=tensor_group,
        stages=stages,
        stage=world.rank % model // tensor_size,
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        pipes=_make_pipes(world, tensor_size, stages, pipes, timeout_s) if stages > 1 else (),
        data_size=world.size // model,
        data_rank=world.rank // model,
        data_group=parallel_state.get_data_parallel_group(),
        model_group=parallel_state.get_model_parallel_group(),
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


def _make_pipes(world: World, tensor_size: int, stages: int, pipes: int, timeout_s: float) -> tuple[dist.ProcessGroup, ...]:
    """Groups of their own: within one, NCCL lets a message wait for the one before, in whichever direction that goes. With
    stages no process group is given a `device_id`: NCCL would then begin at once, and all messages of a group share a
    communicator, where now each two neighbours have one."""
    model = tensor_size * stages
    pipelines = [
        [first + stage * tensor_size + place for stage in range(stages)]
        for first in range(0, world.size, model)
        for place in range(tensor_size)
    ]
    found = []
    for _ in range(pipes):
        groups = {tuple(members): dist.new_group(members, timeout=timedelta(seconds=timeout_s)) for members in pipelines}
        found.append(next(group for members, group in groups.items() if world.rank in members))
    return tuple(found)


def meet_groups(parallel: Parallel, device: str) -> None:
    """A number over each group that sums something up while rows are under way, or after: NCCL makes a group's communicator
    when it is first used, and then waits for the device. A collective."""
    groups = (
        parallel.tensor_group,
        parallel.data_group,
        parallel_state.get_data_parallel_group(with_context_parallel=True),  # megatron-core's own, of the same ranks
        parallel.pipeline_group,
        parallel.experts.group,
        parallel.experts.copies.group,
        parallel_state.get_embedding_group(check_initialized=False),  # None on stages between the first and the last
    )
    number = torch.zeros(1, device=device)
    for group in groups:
        if group is not None and group.size() > 1:
            dist.all_reduce(number, group=group)


def _mesh(group: dist.ProcessGroup, world: World) -> DeviceMesh:
    mesh: Any = DeviceMesh.from_group(group, world.device.partition(":")[0])
    assert isinstance(mesh, DeviceMesh)
    return mesh


def leave() -> None:
    """Groups are gone; another backend of this process can make its own."""
    parallel_state.destroy_model_parallel()
