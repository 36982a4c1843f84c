"""From settings to a model in training: loaded, its layers checkpointed and compiled, spread over the ranks, looked at.

Owns the order of these. Refuses steps and weights' way to servers: backend.py and gather.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from telescope.backends.base import Job
from telescope.backends.common import kernels
from telescope.backends.common.rotations import check_rotations
from telescope.backends.fsdp import compiling, experts, loading, recompute, routers
from telescope.backends.fsdp.policy import Policy, UnfitModel
from telescope.backends.fsdp.sharding import ModelMesh

if TYPE_CHECKING:
    from telescope.backends.fsdp import FSDP

log = logging.getLogger(__name__)


def trained(settings: FSDP, job: Job, kind: kernels.Kind, computing: torch.dtype, spread: ModelMesh) -> Policy:
    """The policy, ready for its first step. A collective."""
    master = getattr(torch, job.model.dtype)
    lm, checkpoint = loading.outline(job.model, kind, master)
    check_rotations(lm.config, type(lm).__name__, job)
    experts.choose(lm, computing)
    kept = recompute.mode(settings.checkpointing)
    recompute.enable(lm, kept, settings.checkpointed_layers)
    if settings.compiles:
        compiling.compile_layers(lm, kind, pointwise_again=settings.pointwise_again(len(lm.get_decoder().layers)))
    policy = Policy(lm, kind, spread.context)
    policy.routers = routers.watched(lm, job.world.device)
    if job.trainer.router_replay and policy.routers is None:
        raise UnfitModel(
            f"trainer.router_replay=true gives routers the experts that servers recorded, and {type(lm).__name__} has none of "
            f"those that are known here ({', '.join(routers.KNOWN)}): set it to false"
        )
    if settings.share_prefixes and policy.experts:
        raise UnfitModel(
            f"backend.share_prefixes=true computes what samples have in common once, and so would count it once among what the "
            f"experts of {type(lm).__name__} get: set it to false"
        )
    uniform = all(parameter.dtype == computing for parameter in policy.parameters())  # adapters are float32 in any model
    precision = MixedPrecisionPolicy(param_dtype=None if uniform else computing, reduce_dtype=torch.float32)
    offload = _offload(settings, job)
    policy.shard(spread.mesh, precision, reshard_layers=settings.reshard_after_forward, offload=offload)
    loading.fill(policy, checkpoint, _home(settings, job), spread)
    tolerance = 1e-3 if computing == torch.float32 else 0.5
    policy.verify(job, tolerance, shares_prefixes=settings.share_prefixes)
    log.info(
        "%s: %.2fM weights in %s, %.2fM of them trained, computing in %s, attention %s, checkpointing %s%s",
        type(lm).__name__,
        sum(parameter.numel() for parameter in policy.parameters()) / 1e6,
        job.model.dtype,
        sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad) / 1e6,
        str(computing).removeprefix("torch."),
        kernels.WORDS[kind],
        kept if settings.checkpointed_layers is None else f"{kept} in the first {settings.checkpointed_layers} layers",
        ", layers compiled" if settings.compiles else "",
    )
    return policy


def frozen(settings: FSDP, job: Job, kind: kernels.Kind, computing: torch.dtype, spread: ModelMesh) -> Policy:
    """The base model once more, in the precision of the forward pass: its weights never move, so they need no better one."""
    lm, checkpoint = loading.outline(job.model, kind, computing, adapters=False)
    experts.choose(lm, computing)
    policy = Policy(lm.requires_grad_(False).eval(), kind, spread.context)
    policy.shard(spread.mesh, MixedPrecisionPolicy(), reshard_layers=True, reshard_rest=True, offload=_offload(settings, job))
    loading.fill(policy, checkpoint, _home(settings, job), spread)
    log.info("a frozen copy of the base model, in %s, is the reference", str(computing).removeprefix("torch."))
    return policy


def _offload(settings: FSDP, job: Job) -> OffloadPolicy:
    if settings.offload != "parameters":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=job.world.device.startswith("cuda"))


def _home(settings: FSDP, job: Job) -> Any:
    """Where shards lie between their uses."""
    return torch.device("cpu" if settings.offload == "parameters" else job.world.device)
