"""One training step on one rank: pack, forward, loss, backward, clip, update, for each minibatch. Sharded with FSDP2.

Owns the order of a step and its collectives. Refuses to know where trajectories come from and where weights go. All ranks run
the same number of rows: a rank with fewer adds rows of padding, which weigh nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from telescope.algorithms.base import named
from telescope.backends.base import Job, Outcome, StepResult, TrainShard
from telescope.backends.common import attention, kernels, model_work, ranks, rows, shards
from telescope.backends.common.phase_times import PhaseTimer
from telescope.backends.common.saving import Saver
from telescope.backends.common.tally import MetricSums
from telescope.backends.fsdp import assembly, gather, sizing, state
from telescope.backends.fsdp.policy import Policy, RowInput
from telescope.backends.fsdp.sharding import make_mesh
from telescope.backends.fsdp.updates import StepUpdates, Updater
from telescope.maths import flops, packing
from telescope.records import Denominators
from telescope.weights.buckets import Bucket, ModelTensor

if TYPE_CHECKING:
    from telescope.backends.fsdp import FSDP

log = logging.getLogger(__name__)

SLOWEST = "slowest_s"
"""Seconds of the slowest rank's step, on their way over the ranks with the other peaks."""


@dataclass(frozen=True)
class PreparedRow:
    """One row on its way through a step."""

    arrays: packing.RowArrays
    old: Tensor | None = None  # [n] log-probs of the sampled tokens before the step's first update


class FSDPBackend:
    """See `telescope.backends.base.Backend`. Building it is a collective too."""

    def __init__(self, settings: FSDP, job: Job) -> None:
        self._job = job
        self._device = job.world.device
        computing = getattr(torch, settings.mixed_precision_dtype or job.model.dtype)
        kind = kernels.choose(settings.attention, kernels.machine(self._device, computing))
        torch.manual_seed(job.seed)
        with ranks.watched("meeting the other ranks"):
            ranks.join(job.world, settings.collective_timeout_s, host=settings.offload == "parameters")
        try:
            with ranks.watched("loading the model"):
                self._spread = make_mesh(job.world, settings.replicas, settings.context_parallel_size)
                self._policy = assembly.trained(settings, job, kind, computing, self._spread)
                needed = job.algorithm.needs_reference
                self._reference = assembly.frozen(settings, job, kind, computing, self._spread) if needed else None
            scaled, hosted = computing == torch.float16, settings.offload == "optimizer"
            self._updater = Updater(settings.optimizer, job, self._policy, scaled=scaled, hosted=hosted)
            if job.resume is not None:
                state.put_back(job.resume, self._policy, self._updater, job.world)
        except BaseException:
            ranks.leave()
            raise
        self._work = model_work.training_work(self._policy.lm)
        self._peak = model_work.peak_flops(self._device, job.trainer.peak_flops)
        architecture = self._policy.lm.config.get_text_config().to_dict()
        if found := sizing.remark(settings, job, architecture, self._peak, model_work.card_bytes(self._device)):
            log.warning("%s", found)
        self._saver = Saver(job.world.rank, self._device, job.saving)
        self._step = 0  # the one under way, for sentences
        self._keeps_gathered = settings.reshard_after_forward is False
        held = self._spread
        self._packer = gather.Packer(self._published, held.shard, held.shards, held.group, self._device)

    @property
    def attention_length(self) -> float:
        return self._work.attention_length

    def train_step(self, shard: TrainShard) -> StepResult:
        """An optimiser update for each minibatch. A non-finite gradient leaves its own out: `update_skipped` counts these."""
        with ranks.watched(f"training step {shard.step}"):
            result = self._train_step(shard)
        if self._saver.wants_memory:  # the optimiser has made its state by now
            self._saver.reserve(self._state())
        return result

    def _train_step(self, shard: TrainShard) -> StepResult:
        self._step, spans, tally, updates = shard.step, PhaseTimer(self._device), self._tally(), StepUpdates()
        with spans.host_span("prepare_tensors"):
            plans = self._plan(shard)
            trajectories = shards.trajectories(shard)
            minibatches = [[PreparedRow(packing.arrange(row, trajectories, shard.items)) for row in plan] for plan in plans]
        if len(minibatches) > 1 and self._job.algorithm.needs_old:
            minibatches[1:] = [self._with_old(minibatch, shard.step, spans) for minibatch in minibatches[1:]]
        self._updater.span, scale = spans.span, self._updater.loss_scale
        for number, (minibatch, counts) in enumerate(zip(minibatches, shard.denominators, strict=True)):
            for place, row in enumerate(minibatch):
                spans.at(number, place)
                if self._keeps_gathered:
                    self._policy.keep_gathered(place + 1 < len(minibatch))
                self._accumulate(row, counts, spans, tally)
                self._job.progress(f"train step {shard.step}: minibatch {number + 1}, row {place + 1} of {len(minibatch)}")
            spans.at(number)
            updates.add(self._updater.update(shard.step, empty=counts.tokens == 0))
        timings, phases = spans.finish()
        sums, peaks = shards.host_metrics(shard, [row for plan in plans for row in plan])
        peaks |= {SLOWEST: timings["timing_step_active"]}
        metrics = tally.finish(sums, peaks, updates=updates.trained) | updates.metrics()
        metrics["updates_skipped_total"] = float(self._updater.skipped)
        metrics["padding_fraction"] = 1.0 - metrics["packed_tokens"] / metrics.pop("row_tokens")
        if self._updater.scaled_losses:
            metrics["loss_scale"] = scale
        metrics |= self._speed(metrics)
        return StepResult(metrics=metrics, timings=timings, spans=phases)

    def _speed(self, metrics: dict[str, float]) -> dict[str, float]:
        """Of all ranks, by the slowest one's clock; takes that and Σ length² out of the metrics."""
        tokens, squares, seconds = metrics["packed_tokens"], metrics.pop("squared_tokens"), metrics.pop(SLOWEST)
        speed = {"trainer_tokens_per_s": tokens / seconds}
        if self._peak is not None:
            operations = self._work.operations(tokens, squares)
            speed["mfu"] = flops.utilization(operations, seconds, cards=self._job.world.size, peak=self._peak)
        return speed

    def logprobs(self, shard: TrainShard) -> np.ndarray:
        found = np.full(len(shard.ids), np.nan, np.float32)
        trajectories = shards.trajectories(shard)
        ends = np.cumsum([item.length for item in shard.items])
        with ranks.watched("taking log-probs"):
            for row in (row for plan in self._plan(shard) for row in plan):
                arrays = packing.arrange(row, trajectories, shard.items)
                logprob = self._logprobs_of(self._policy, self._on_device(arrays)[1])
                laid = np.full(row.size, np.nan, np.float32)
                laid[arrays.mask] = logprob.cpu().numpy()
                for start, length, index in zip(row.starts, row.lengths, row.items, strict=True):
                    found[ends[index] - length : ends[index]] = laid[start : start + length]
            self._policy.free_gathered()
        return found

    def layout(self) -> Sequence[ModelTensor]:
        return gather.layout(self._published())

    def pack(self, bucket: Bucket, out: Tensor | None) -> None:
        if self._spread.replica:
            return  # the first replica has all of it
        with ranks.watched("gathering the weights"):
            self._packer.pack(bucket, out)

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, Any]]:
        if self._spread.replica:
            return
        with ranks.watched("gathering the weights"):
            held = self._spread
            yield from gather.host_tensors(self._published(), self._device, held.shard, held.shards, dtype, held.group)

    def _published(self) -> gather.Published:
        return self._policy.published(self._spread.shards)

    def save(self, step: int, folder: Path, done: Callable[[Outcome], None]) -> None:
        self._saver.save(self._state(), folder, done)

    def _state(self) -> dict[str, Tensor]:
        job = self._job
        return state.gathered(self._policy, self._updater, job.world, training_state=job.saving.training_state)

    def close(self) -> None:
        self._saver.settle()
        ranks.leave()

    def _tally(self) -> MetricSums:
        """Ranks that share rows find the same: the first of them counts."""
        shared = self._spread.context
        return MetricSums(self._device, counts=shared is None or shared.rank == 0)

    def _plan(self, shard: TrainShard) -> list[list[packing.Row]]:
        """Rows of this rank by minibatch, each filled up to the largest count of all ranks."""
        trainer = self._job.trainer
        self._policy.refuse_hidden(max((item.length for item in shard.items), default=0))
        counts = torch.tensor(shards.rows_needed(shard, seq_len=trainer.seq_len), device=self._device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        rows = [max(count, 1) for count in counts.tolist()]
        plans = shards.pack(
            shard,
            seq_len=trainer.seq_len,
            multiple=trainer.pad_to_multiple_of,
            rows=rows,
            attention_length=self.attention_length,
        )
        return [
            packing.with_filler(plan, count, multiple=trainer.pad_to_multiple_of)
            for plan, count in zip(plans, rows, strict=True)
        ]

    def _with_old(self, minibatch: Sequence[PreparedRow], step: int, spans: PhaseTimer) -> list[PreparedRow]:
        """The rows with the log-probs of now. The first minibatch needs none: its own forward pass comes before any update."""
        known = []
        for place, row in enumerate(minibatch, start=1):
            spans.at(row=place - 1)
            with spans.span("compute_old_logprobs"):
                _, given = self._on_device(row.arrays)
                known.append(PreparedRow(row.arrays, old=self._logprobs_of(self._policy, given)))
            self._job.progress(f"train step {step}: log-probs before its updates, row {place} of {len(minibatch)}")
        return known

    def _on_device(self, arrays: packing.RowArrays) -> tuple[rows.DeviceRow, RowInput]:
        row = rows.to_device(arrays, self._device)
        segments = attention.segments(self._policy.kind, arrays.boundaries, self._device, self._spread.context)
        piece = self._policy.piece(len(arrays.ids), np.flatnonzero(arrays.mask) - 1)
        return row, RowInput(row.ids, row.position_ids, segments, row.sampled - 1, row.targets, row.temperature, piece)

    def _logprobs_of(self, policy: Policy, given: RowInput) -> Tensor:
        job = self._job
        return policy.logprobs_only(given, job.trainer.entropy_chunk_size, job.support)

    def _accumulate(self, row: PreparedRow, counts: Denominators, spans: PhaseTimer, tally: MetricSums) -> None:
        """Add one row's share of the gradient."""
        job, reference = self._job, None
        with spans.span("data_to_device"):
            on_device, given = self._on_device(row.arrays)
        if self._reference is not None:
            with spans.span("compute_kl"):
                reference = self._logprobs_of(self._reference, given)
        with spans.span("forward"):
            chunk = job.trainer.entropy_chunk_size
            logprob, entropy = self._policy(given, chunk, support=job.support)
        with spans.span("loss_computation"):
            entropy = entropy if job.algorithm.trains_entropy else entropy.detach()
            packed = on_device.packed(logprob, entropy, old=row.old, reference=reference)
            with named(job.algorithm, "loss", f"step {self._step}"):
                output = job.algorithm.loss(packed, counts, max_tokens=job.max_tokens)
            if not output.loss.requires_grad:
                raise ValueError(f"{type(job.algorithm).__name__}.loss has no gradient: make it of `current`, not detached")
            tally.add(output)
        with spans.span("backward"):
            self._updater.scaled(output.loss).backward()  # type: ignore[no-untyped-call]
