"""Which ranks hold matrices together (tensor parallelism), which share each row (context parallelism), which have other layers
of the same model (pipeline parallelism), and which have equal parts of it and other rows (data parallelism).

Owns megatron-core's groups from start to end. With T ranks that hold matrices together, C that share rows and P stages, ranks 0
to T - 1 have the first part of each row in the first stage of the first model, ranks 0 to T · C - 1 that whole stage, and ranks
0 to T · C · P - 1 the model: neighbours share a host. Experts are dealt out over E neighbours of all ranks that have a stage,
whatever T and C are: whole matrices, so that with one stage ranks 0 to E - 1 have all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from telescope.backends.base import World
from telescope.backends.common.context import Context


@dataclass(frozen=True)
class Copies:
    """The ranks with equal parts of some parameters, among which this one is `rank`."""

    size: int
    rank: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class ExpertPlace:
    """Which of its stage's experts are here. The ranks of `group` have all of them together, and `copies` have the same ones;
    the first rank of a stage is the first of its first such group."""

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
    context: Context | None
    """Of the ranks that share this rank's rows; None: each has whole ones."""
    models: int
    """That get other rows than each other."""
    alike: Copies
    """The ranks with this one's part of the matrices: those of all models, and of each all that share its rows."""
    model_group: dist.ProcessGroup
    """Of all parts of this rank's model, stage by stage, from the ranks with this one's part of a row."""
    mesh: DeviceMesh
    """Of the ranks that hold matrices together, in one dimension."""
    experts: ExpertPlace

    def copies(self, *, of_expert: bool) -> Copies:
        """Of an expert's parameters, or of the others."""
        return self.experts.copies if of_expert else self.alike

    @property
    def gradient_groups(self) -> ProcessGroupCollection:
        """Over which megatron-core sums gradients."""
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "dp", "dp_cp"])
        groups.ep, groups.expt_dp = self.experts.group, self.experts.copies.group
        return groups

    @property
    def first_part(self) -> bool:
        """Whether a row begins on this rank."""
        return self.context is None or self.context.rank == 0

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
    world: World, tensor_size: int, stages: int, pipes: int, timeout_s: float, expert_size: int | None = None, sharing: int = 1
) -> Parallel:  # fmt: skip
    """A collective; torch.distributed is set up before. `tensor_size` times `sharing`, which is how many ranks share each row,
    times `stages` divides the number of ranks, and so does `stages` times `expert_size`; None: the model has no experts.
    `pipes`: kinds of messages that pass from stage to stage."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=stages,
        context_parallel_size=sharing,
        expert_model_parallel_size=1,  # experts have groups of their own
        expert_tensor_parallel_size=tensor_size * sharing,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_s / 60,
        order="tp-cp-ep-pp-dp",
    )
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    stage_ranks = tensor_size * sharing
    alike = _copies(parallel_state.get_data_parallel_group(with_context_parallel=True))
    return Parallel(
        tensor_size=tensor_size,
        tensor_rank=world.rank % tensor_size,
        tensor_group=tensor_group,
        stages=stages,
        stage=world.rank % (stage_ranks * stages) // stage_ranks,
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        pipes=_make_pipes(world, stage_ranks, stages, pipes, timeout_s) if stages > 1 else (),
        context=_context(parallel_state.get_context_parallel_group()) if sharing > 1 else None,
        models=world.size // (stage_ranks * stages),
        alike=alike,
        model_group=parallel_state.get_model_parallel_group(),
        mesh=_mesh(tensor_group, world),
        experts=_expert_place(world, alike, expert_size, stage_ranks, stages, timeout_s),
    )


def _expert_place(
    world: World, alike: Copies, expert_size: int | None, stage_ranks: int, stages: int, timeout_s: float
) -> ExpertPlace:  # fmt: skip
    """megatron-core could make the groups of one stage. Of several it wants as many ranks with equal experts as there are
    models, and here all of a stage's ranks share them out."""
    group, copies = parallel_state.get_expert_model_parallel_group(), alike  # of this rank alone, as it was told
    if expert_size is not None:
        sharing, same = list[list[int]](), list[list[int]]()
        for stage in range(stages):
            here = [rank for rank in range(world.size) if rank % (stage_ranks * stages) // stage_ranks == stage]
            sharing += [here[first : first + expert_size] for first in range(0, len(here), expert_size)]
            same += [here[place::expert_size] for place in range(expert_size)]
        copies = _copies(_own_group(world, same, timeout_s))
        group = group if expert_size == 1 else _own_group(world, sharing, timeout_s)
    return ExpertPlace(size=group.size(), rank=group.rank(), group=group, copies=copies, mesh=_mesh(group, world))


def _copies(group: dist.ProcessGroup) -> Copies:
    return Copies(group.size(), group.rank(), group)


def _context(group: dist.ProcessGroup) -> Context:
    return Context(group.rank(), group.size(), group)


def _make_pipes(world: World, stage_ranks: int, stages: int, pipes: int, timeout_s: float) -> tuple[dist.ProcessGroup, ...]:
    """Groups of their own: within one, NCCL lets a message wait for the one before, in whichever direction that goes. With
    stages no process group is given a `device_id`: NCCL would then begin at once, and all messages of a group share a
    communicator, where now each two neighbours have one."""
    model = stage_ranks * stages
    pipelines = [
        [first + stage * stage_ranks + place for stage in range(stages)]
        for first in range(0, world.size, model)
        for place in range(stage_ranks)
    ]
    return tuple(_own_group(world, pipelines, timeout_s) for _ in range(pipes))


def _own_group(world: World, ranks: Sequence[list[int]], timeout_s: float) -> dist.ProcessGroup:
    """Of these groups, which all ranks make, the one that this rank is in. A collective."""
    groups: list[dist.ProcessGroup] = [dist.new_group(members, timeout=timedelta(seconds=timeout_s)) for members in ranks]
    return next(group for members, group in zip(ranks, groups, strict=True) if world.rank in members)


def meet_groups(parallel: Parallel, device: str) -> None:
    """A number over each group that sums something up while rows are under way, or after, and between all that share out
    experts: NCCL makes a group's communicator, and a link, when it is first used, and then waits for the device. A
    collective."""
    groups = (
        parallel.tensor_group,
        None if parallel.context is None else parallel.context.group,
        parallel.alike.group,
        parallel.pipeline_group,
        parallel.experts.group,
        parallel.experts.copies.group,
        parallel_state.get_embedding_group(check_initialized=False),  # None on stages between the first and the last
    )
    number = torch.zeros(1, device=device)
    for group in groups:
        if group is not None and group.size() > 1:
            dist.all_reduce(number, group=group)
    if (size := parallel.experts.size) > 1:
        numbers = torch.zeros(size, device=device)
        dist.all_to_all_single(torch.empty_like(numbers), numbers, group=parallel.experts.group)


def _mesh(group: dist.ProcessGroup, world: World) -> DeviceMesh:
    mesh: Any = DeviceMesh.from_group(group, world.device.partition(":")[0])
    assert isinstance(mesh, DeviceMesh)
    return mesh


def leave() -> None:
    """Groups are gone; another backend of this process can make its own."""
    parallel_state.destroy_model_parallel()
