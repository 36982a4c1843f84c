"""One training step on one rank: pack, forward, loss, backward, clip, AdamW. Sharded with FSDP2.

Owns the optimiser, the schedule and the collectives of a step. Refuses to know where trajectories come from and where weights
go. All ranks run the same number of rows: a rank with fewer adds rows of padding, which weigh nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from telescope.backends.base import Job, StepResult, TrainShard
from telescope.backends.common import attention, ranks, rows, shards
from telescope.backends.common.spans import Spans
from telescope.backends.common.tally import Tally
from telescope.backends.fsdp.policy import Policy, RowInput, load
from telescope.backends.fsdp.scaling import LossScale
from telescope.maths import packing
from telescope.maths.schedules import learning_rate_factor

if TYPE_CHECKING:
    from telescope.backends.fsdp import FSDP

log = logging.getLogger(__name__)


class FSDPBackend:
    """See `telescope.backends.base.Backend`. Building it is a collective too."""

    def __init__(self, settings: FSDP, job: Job) -> None:
        self._job = job
        self._device = job.world.device
        computing = getattr(torch, settings.mixed_precision_dtype or job.model.dtype)
        kind = attention.choose(self._device, computing) if settings.attention == "auto" else settings.attention
        attention.check(kind, self._device, computing)
        torch.manual_seed(job.seed)
        with ranks.watched("meeting the other ranks"):
            ranks.join(job.world, settings.collective_timeout_s)
        try:
            with ranks.watched("loading the model"):
                self._policy = _policy(settings, job, kind, computing)
        except BaseException:
            ranks.leave()
            raise
        self._optimizer = _optimizer(self._policy, job)
        self._scale = LossScale(enabled=computing == torch.float16)
        self._skipped = 0

    def train_step(self, shard: TrainShard) -> StepResult:
        """One optimiser update. A non-finite gradient skips it: the weights stay, `update_skipped` is 1."""
        with ranks.watched(f"training step {shard.step}"):
            return self._train_step(shard)

    def _train_step(self, shard: TrainShard) -> StepResult:
        spans, tally = Spans(self._device), Tally(self._device)
        with spans.host_span("prepare_tensors"):
            plan = self._plan(shard)
            trajectories = shards.trajectories(shard)
            arrays = [packing.arrange(row, trajectories, shard.items) for row in plan]
        for number, row in enumerate(arrays, start=1):
            self._accumulate(row, shard, spans, tally)
            self._job.progress(f"train step {shard.step}: row {number} of {len(arrays)}")
        with spans.span("optimizer"):
            update = self._update(shard.step)
        sums, peaks = shards.host_metrics(shard, plan)
        metrics = tally.finish(sums, peaks) | update
        metrics["padding_fraction"] = 1.0 - metrics["packed_tokens"] / metrics.pop("row_tokens")
        return StepResult(metrics=metrics, timings=spans.timings())

    def logprobs(self, shard: TrainShard) -> np.ndarray:
        found = np.full(len(shard.ids), np.nan, np.float32)
        trajectories = shards.trajectories(shard)
        ends = np.cumsum([item.length for item in shard.items])
        with ranks.watched("taking log-probs"), torch.no_grad():
            for row in self._plan(shard):
                arrays = packing.arrange(row, trajectories, shard.items)
                _, given = self._given(arrays)
                logprob, _ = self._policy(given, self._job.temperature, self._job.trainer.entropy_chunk_size)
                laid = np.full(row.size, np.nan, np.float32)
                laid[arrays.mask] = logprob.cpu().numpy()
                for start, length, index in zip(row.starts, row.lengths, row.items, strict=True):
                    found[ends[index] - length : ends[index]] = laid[start : start + length]
        return found

    def weights(self) -> Iterator[tuple[str, Any]]:
        with ranks.watched("gathering the weights"):
            for name, tensor in self._policy.full_weights():
                if self._job.world.rank == 0:
                    yield name, tensor

    def close(self) -> None:
        ranks.leave()

    def _plan(self, shard: TrainShard) -> list[packing.Row]:
        """Rows of this rank, filled up to the largest count of all ranks."""
        multiple = self._job.trainer.pad_to_multiple_of
        plan = shards.pack(shard, seq_len=self._job.trainer.seq_len, multiple=multiple)
        count = torch.tensor(len(plan), device=self._device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return packing.with_filler(plan, max(int(count), 1), multiple=multiple)

    def _accumulate(self, arrays: packing.RowArrays, shard: TrainShard, spans: Spans, tally: Tally) -> None:
        """Add one row's share of the gradient."""
        job = self._job
        with spans.span("data_to_device"):
            row, given = self._given(arrays)
        with spans.span("forward"):
            logprob, entropy = self._policy(given, job.temperature, job.trainer.entropy_chunk_size)
        with spans.span("loss_computation"):
            output = job.algorithm.loss(row.packed(logprob, entropy), shard.denominators, max_tokens=job.max_tokens)
            tally.add(output)
        with spans.span("backward"):
            self._scale.scaled(output.loss).backward()  # type: ignore[no-untyped-call]

    def _given(self, arrays: packing.RowArrays) -> tuple[rows.DeviceRow, RowInput]:
        """A row on the device, and what of it the model sees."""
        row = rows.to_device(arrays, self._device)
        segments = attention.segments(self._policy.kind, arrays.boundaries, self._device)
        return row, RowInput(row.ids, row.position_ids, segments, places=row.sampled - 1, targets=row.targets)

    def _update(self, step: int) -> dict[str, float]:
        trainer = self._job.trainer
        rate = trainer.learning_rate * learning_rate_factor(
            step,
            schedule=trainer.lr_scheduler,
            number_of_steps=self._job.number_of_steps,
            warmup_steps=trainer.warmup_steps,
            min_ratio=trainer.min_lr_ratio,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._scale.unscale(self._policy.parameters())
        norm = _clip(self._policy, trainer.grad_clip)
        finite = math.isfinite(norm)
        if finite:
            self._optimizer.step()
        else:
            self._skipped += 1
            log.warning("step %d: the gradient's norm is %s, so the update is left out", step, norm)
        self._scale.adapt(finite)
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "grad_norm": norm,
            "learning_rate": rate,
            "update_skipped": float(not finite),
            "updates_skipped_total": float(self._skipped),
        }


def _policy(settings: FSDP, job: Job, kind: attention.Kind, computing: torch.dtype) -> Policy:
    lm = load(job.model, kind)
    if settings.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = Policy(lm, kind)
    mesh = init_device_mesh(job.world.device.partition(":")[0], (job.world.size,))
    master = getattr(torch, job.model.dtype)
    precision = MixedPrecisionPolicy(param_dtype=None if computing == master else computing, reduce_dtype=torch.float32)
    policy.shard(mesh, precision, settings.reshard_after_forward)
    policy.verify(job.world.device, job.temperature, tolerance=1e-3 if computing == torch.float32 else 0.5)
    log.info(
        "%s: %.2fM weights in %s, computing in %s, attention %s",
        type(lm).__name__,
        sum(parameter.numel() for parameter in policy.parameters()) / 1e6,
        job.model.dtype,
        str(computing).removeprefix("torch."),
        f"flash ({attention.flash_name()})" if kind == "flash" else kind,
    )
    return policy


def _optimizer(policy: Policy, job: Job) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices alone, as norms and biases have no business near zero."""
    trainer = job.trainer
    parameters = list(policy.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": trainer.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=trainer.learning_rate, betas=trainer.betas, fused=True)


def _clip(policy: Policy, largest: float) -> float:
    """Scale the gradient down to the norm `largest`; return the norm it had, over all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), largest)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
