"""One training step on one rank: pack, forward, loss, backward, clip, update, for each minibatch. The same for every backend
that computes with torch.

Owns the order of a step and its collectives. Refuses to know where trajectories come from, where weights go, and how a row is
computed: that is the policy of a backend. All ranks run the same number of rows: a rank with fewer adds rows of padding, which
weigh nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from telescope.algorithms.base import PackedRow, named
from telescope.backends.base import Job, StepResult, TrainShard
from telescope.backends.common import ranks, rows, shards
from telescope.backends.common.phase_times import PhaseTimer
from telescope.backends.common.routing import ExpertLoad
from telescope.backends.common.tally import MetricSums
from telescope.backends.common.updates import StepUpdates, Updater
from telescope.maths import flops, packing
from telescope.maths.flops import TrainingWork
from telescope.maths.routing import find_wrong
from telescope.records import Denominators

log = logging.getLogger(__name__)

SLOWEST = "slowest_s"
"""Seconds of the slowest rank's step, on their way over the ranks with the other peaks."""


def unmarked(place: int) -> AbstractContextManager[None]:
    """Nobody asks when a row is computed."""
    return nullcontext()


@dataclass(frozen=True)
class PreparedRow:
    """One row on its way through a step."""

    arrays: packing.RowArrays
    old: Tensor | None = None  # [n] log-probs of the sampled tokens before the step's first update


class SteppingBackend:
    """`train_step` and `logprobs` of `telescope.backends.base.Backend`, from a policy and an updater."""

    _job: Job
    _device: str
    _policy: Any
    """Called with a row, a chunk and `support`, it gives log-probs and entropies; `logprobs_only` gives
    log-probs alone, without gradient."""
    _reference: Any
    """A policy of the weights that the run began with; None where no algorithm asks."""
    _updater: Updater
    _work: TrainingWork
    _peak: float | None
    _shares_prefixes: bool = False
    """Whether what samples of a row have in common is computed once."""
    _load: ExpertLoad | None = None
    """Where the policy counts, while it trains, what its experts get; None: it has none."""
    _step: int = 0
    """The one under way, for sentences."""

    def _on_device(self, arrays: packing.RowArrays) -> tuple[rows.DeviceRow, Any]:
        """A row for the loss, and as the policy takes it."""
        raise NotImplementedError

    def _row_of_many(self, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward passes of one row; `last` of its minibatch."""
        return nullcontext()

    def _before_update(self) -> None:
        """All rows of a minibatch have been backward."""

    def _after_rows(self, tally: MetricSums) -> None:
        """All rows of a step have been added up; their metrics are not yet summed over ranks."""

    def _after_forward_alone(self) -> None:
        """Forward passes without backward passes are over."""

    def _refuse_long(self, longest: int) -> None:
        """Raise where the model can't be trained on samples of `longest` tokens."""

    def _after_step(self) -> None:
        """A step is over."""

    @property
    def _counts(self) -> bool:
        """Whether this rank's metrics count: not where another rank has the same trajectories."""
        return True

    @property
    def attention_length(self) -> float:
        return self._work.attention_length

    def train_step(self, shard: TrainShard) -> StepResult:
        """An optimiser update for each minibatch. A non-finite gradient leaves its own out: `update_skipped` counts these."""
        shard = self._routed(shard, trained=True)
        with ranks.watched(f"training step {shard.step}"):
            result = self._train_step(shard)
        self._after_step()
        return result

    def _routed(self, shard: TrainShard, *, trained: bool) -> TrainShard:
        """The shard with the recorded routing that is to be followed, or none. `trained`: there must be some, where the run
        asks for it. Raises ValueError."""
        if not self._job.trainer.router_replay:
            return shard if shard.routed is None else replace(shard, routed=None)
        if shard.routed is None:
            if trained and shard.items:
                raise ValueError(
                    f"trainer.router_replay=true sends tokens to the experts that servers recorded, and the samples of step "
                    f"{shard.step} brought no record: their servers keep none; set it to false"
                )
            return shard
        load = self._load
        assert load is not None, "refused where the model was built"
        if wrong := find_wrong(shard.routed, layers=load.layers, experts=load.experts, top_k=load.top_k):
            raise ValueError(f"step {shard.step}: {wrong}; set trainer.router_replay=false, or serve the model that is trained")
        return shard

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
            self._accumulate_all(number, minibatch, counts, spans, tally)
            spans.at(number)
            self._before_update()
            updates.add(self._updater.update(shard.step, empty=counts.tokens == 0))
        self._after_rows(tally)
        timings, phases = spans.finish()
        sums, peaks = shards.host_metrics(shard, [row for plan in plans for row in plan])
        peaks |= {SLOWEST: timings["timing_step_active"]}
        metrics = tally.finish(sums, peaks, updates=updates.trained) | updates.metrics()
        metrics["updates_skipped_total"] = float(self._updater.skipped)
        metrics["padding_fraction"] = 1.0 - metrics["packed_tokens"] / metrics.pop("row_tokens")
        if self._updater.scaled_losses:
            metrics["loss_scale"] = scale
        metrics |= self._speed(metrics)
        if self._load is not None:
            metrics |= self._load.finish()
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
        shard = self._routed(shard, trained=False)
        found = np.full(len(shard.ids), np.nan, np.float32)
        trajectories = shards.trajectories(shard)
        ends = np.cumsum([item.length for item in shard.items])
        with ranks.watched("taking log-probs"):
            plan = [row for rows in self._plan(shard) for row in rows]
            arranged = [packing.arrange(row, trajectories, shard.items) for row in plan]
            logprobs = self._on_all_ranks(self._logprobs_of_rows(self._policy, arranged, unmarked), arranged)
            for row, arrays, logprob in zip(plan, arranged, logprobs, strict=True):
                laid = np.full(row.size, np.nan, np.float32)
                laid[arrays.mask] = logprob.cpu().numpy()
                for start, length, index in zip(row.starts, row.lengths, row.items, strict=True):
                    found[ends[index] - length : ends[index]] = laid[start : start + length]
            self._after_forward_alone()
        return found

    def _tally(self) -> MetricSums:
        return MetricSums(self._device, counts=self._counts)

    def _plan(self, shard: TrainShard) -> list[list[packing.Row]]:
        """Rows of this rank by minibatch, each filled up to the largest count of all ranks."""
        trainer = self._job.trainer
        self._refuse_long(max((item.length for item in shard.items), default=0))
        shares = self._shares_prefixes
        needed = shards.rows_needed(shard, seq_len=trainer.row_tokens, share_prefixes=shares)
        counts = torch.tensor(needed, device=self._device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        rows = [max(count, 1) for count in counts.tolist()]
        plans = shards.pack(
            shard,
            seq_len=trainer.row_tokens,
            multiple=trainer.pad_to_multiple_of,
            rows=rows,
            attention_length=self.attention_length,
            share_prefixes=shares,
        )
        return [
            packing.with_filler(plan, count, multiple=trainer.pad_to_multiple_of)
            for plan, count in zip(plans, rows, strict=True)
        ]

    def _with_old(self, minibatch: Sequence[PreparedRow], step: int, spans: PhaseTimer) -> list[PreparedRow]:
        """The rows with the log-probs of now. The first minibatch needs none: its own forward pass comes before any update."""

        @contextmanager
        def taking(place: int) -> Iterator[None]:
            spans.at(row=place)
            with spans.span("compute_old_logprobs"):
                yield
            said = f"train step {step}: log-probs before its updates, row {place + 1} of {len(minibatch)}"
            self._job.progress(said)

        found = self._logprobs_of_rows(self._policy, [row.arrays for row in minibatch], taking)
        return [PreparedRow(row.arrays, old=old) for row, old in zip(minibatch, found, strict=True)]

    def _logprobs_of_rows(
        self, policy: Any, arranged: Sequence[packing.RowArrays], taking: Callable[[int], AbstractContextManager[None]]
    ) -> list[Tensor | None]:  # fmt: skip
        """Of the sampled tokens of each row, without gradient; None on ranks that do not compute losses. `taking`: around the
        work for a row, by its place."""
        found: list[Tensor | None] = []
        for place, arrays in enumerate(arranged):
            with taking(place):
                found.append(self._logprobs_of(policy, self._on_device(arrays)[1]))
        return found

    def _on_all_ranks(self, found: list[Tensor | None], arranged: Sequence[packing.RowArrays]) -> list[Tensor]:
        """Log-probs that some ranks have, on all of them."""
        return [logprobs for logprobs in found if logprobs is not None]

    def _logprobs_of(self, policy: Any, given: Any) -> Tensor:
        job = self._job
        logprob: Tensor = policy.logprobs_only(given, job.trainer.entropy_chunk_size, job.support)
        return logprob

    def _accumulate_all(
        self, number: int, minibatch: Sequence[PreparedRow], counts: Denominators, spans: PhaseTimer, tally: MetricSums
    ) -> None:  # fmt: skip
        """Forward and backward passes of all rows of minibatch `number`."""
        for place, row in enumerate(minibatch):
            spans.at(number, place)
            with self._row_of_many(last=place + 1 == len(minibatch)):
                self._accumulate(row, counts, spans, tally)
            self._tell_row(number, place, len(minibatch))

    def _tell_row(self, number: int, place: int, count: int) -> None:
        self._job.progress(f"train step {self._step}: minibatch {number + 1}, row {place + 1} of {count}")

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
            laid = on_device.packed(logprob, self._entropy_for(entropy), old=row.old, reference=reference)
            loss = self._loss_of(laid, counts, tally)
        with spans.span("backward"):
            self._updater.scaled(loss).backward()  # type: ignore[no-untyped-call]

    def _entropy_for(self, entropy: Tensor) -> Tensor:
        """As the loss takes it."""
        return entropy if self._job.algorithm.trains_entropy else entropy.detach()

    def _loss_of(self, row: PackedRow, counts: Denominators, tally: MetricSums) -> Tensor:
        """A row's share of the loss, whose metrics are added up."""
        job = self._job
        with named(job.algorithm, "loss", f"step {self._step}"):
            output = job.algorithm.loss(row, counts, max_tokens=job.max_tokens)
        if not output.loss.requires_grad:
            raise ValueError(f"{type(job.algorithm).__name__}.loss has no gradient: make it of `current`, not detached")
        tally.add(output)
        return output.loss
