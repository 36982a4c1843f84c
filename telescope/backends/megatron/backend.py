"""A model in training on megatron-core: how it is built, what a row is for it, how weights and state leave it.

Owns what of a backend is Megatron's. A step and its order are common/stepping.py's: of megatron-core the layers, the groups and
the gradients' buffers are used, and neither its loss nor its schedules. Rows of several stages are staged_rows.py's.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from torch import Tensor

from telescope.backends.base import Job, Outcome
from telescope.backends.common import kernels, model_work, ranks, routing, rows
from telescope.backends.common.flat_buckets import host_weights
from telescope.backends.common.models import ModelCheckpoint
from telescope.backends.common.phase_times import PhaseTimer
from telescope.backends.common.routing import ExpertLoad
from telescope.backends.common.saving import Saver
from telescope.backends.common.stepping import PreparedRow, SteppingBackend
from telescope.backends.common.tally import MetricSums
from telescope.backends.megatron import architecture, has_engine, parallel, pipeline, state
from telescope.backends.megatron.architecture import Architecture
from telescope.backends.megatron.layers import own_modules
from telescope.backends.megatron.masters import Masters
from telescope.backends.megatron.modules import engine_modules, engine_version, fuse_gradient_sums, refuse_fp8
from telescope.backends.megatron.parallel import Parallel
from telescope.backends.megatron.policy import ParallelPolicy, ParallelRow
from telescope.backends.megatron.publish import PartPacker
from telescope.backends.megatron.rules import ModelDimensions, TensorMap
from telescope.backends.megatron.staged_rows import ForwardRows, TrainedRows
from telescope.backends.megatron.stages import StageLayout, cut_layers
from telescope.backends.megatron.updates import PieceUpdater
from telescope.maths import packing
from telescope.records import Denominators
from telescope.weights.buckets import Bucket, ModelTensor

if TYPE_CHECKING:
    from telescope.backends.common.attention_choice import Kind
    from telescope.backends.megatron import Megatron

log = logging.getLogger(__name__)


class MegatronBackend(SteppingBackend):
    """See `telescope.backends.base.Backend`. Building it is a collective too."""

    _policy: ParallelPolicy
    _updater: PieceUpdater

    def __init__(self, settings: Megatron, job: Job) -> None:
        logging.getLogger("megatron").setLevel(logging.WARNING)  # each parameter's place in its buffers, at level INFO
        self._job = job
        self._device = job.world.device
        computing = getattr(torch, settings.mixed_precision_dtype or job.model.dtype)
        kind = kernels.choose(settings.attention, kernels.machine(self._device, computing))
        torch.manual_seed(job.seed)
        with ranks.watched("meeting the other ranks"):
            ranks.join(job.world, settings.collective_timeout_s)
        try:
            with ranks.watched("loading the model"):
                self._build(settings, kind, computing)
        except BaseException:
            parallel.leave()
            ranks.leave()
            raise
        self._saver = Saver(job.world.rank, self._device, job.saving)
        self._peak = model_work.peak_flops(self._device, job.trainer.peak_flops)

    def _build(self, settings: Megatron, kind: Kind, computing: torch.dtype) -> None:
        job = self._job
        engine = settings.takes_engine(job.model.dtype, there=has_engine() and self._device.startswith("cuda"))
        if settings.fp8:
            refuse_fp8(settings.fp8_recipe)
        known = architecture.read(settings, job)
        facts, laps = known.facts, settings.virtual_pipeline_size
        held = self._parallel = self._join_ranks(settings, facts)
        layout = cut_layers(facts.layers, held.stages, laps, head=known.head_layers, tied=facts.tied)
        modules = engine_modules() if engine else own_modules(settings.compiles)
        self._table = TensorMap(
            facts, known.shapes, held.tensor_rank, held.tensor_size, held.experts.rank, held.experts.size,
            norm_enters=modules.norm_enters,
        )  # fmt: skip

        def make_policy() -> ParallelPolicy:
            with warnings.catch_warnings():  # of defaults that megatron-core itself has deprecated
                warnings.simplefilter("ignore")
                return ParallelPolicy(known, settings, modules, kind, computing, held, layout, self._device)

        self._policy = make_policy().train()
        if settings.gradient_accumulation_fusion:
            fuse_gradient_sums(self._policy.models)
        self._ddps = self._make_ddps(settings, facts)
        self._masters = self._make_masters(settings, layout)
        self._fill(self._policy, known.files, self._masters.put)
        self._reference = None
        if job.algorithm.needs_reference:
            self._reference = make_policy().requires_grad_(False).eval()
            self._reference.replays = False
            frozen = self._reference.by_name()
            self._fill(self._reference, known.files, lambda name, whole: frozen[name].copy_(whole))
        self._updater = self._make_updater(settings, scaled=computing == torch.float16)
        if job.resume is not None:
            state.put_back(job.resume, self._masters, self._updater, self._table, held, job.world)
        self._work = known.work
        if facts.expert_layers:
            self._load = ExpertLoad(len(facts.expert_layers), facts.experts, facts.top_k, self._device)
            self._policy.load = self._load
        self._packer = PartPacker(self._masters, self._table, layout, held, self._device)
        self._pipeline = pipeline.Pipeline(held, laps, computing, self._device) if held.stages > 1 else None
        log.info("%s", self._describe(settings, known, layout, kind, computing, engine=engine))

    def _join_ranks(self, settings: Megatron, facts: ModelDimensions) -> Parallel:
        """The groups of ranks. A collective."""
        laps = settings.virtual_pipeline_size
        found = parallel.make_parallel(
            self._job.world,
            settings.tensor_parallel_size,
            settings.pipeline_parallel_size,
            pipeline.pipes_needed(laps),
            settings.collective_timeout_s,
            settings.expert_parallel_size if facts.expert_layers else None,
            settings.context_parallel_size,
        )
        parallel.meet_groups(found, self._device)
        pipeline.meet_neighbours(found, laps, self._device)
        return found

    def _make_ddps(self, settings: Megatron, facts: ModelDimensions) -> list[Any]:
        """Of each stretch of layers: what holds its gradients, and sums them over ranks."""
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=settings.grad_reduce_in_fp32,
            overlap_grad_reduce=settings.overlap_grad_reduce,
            use_distributed_optimizer=settings.spreads_optimizer(self._job.world.size),
            average_in_collective=False,
        )
        groups = self._parallel.gradient_groups if facts.expert_layers else None
        return [
            DistributedDataParallel(self._policy.config, config, lm, disable_bucketing=place > 0, pg_collection=groups)
            for place, lm in enumerate(self._policy.models)
        ]

    def _make_masters(self, settings: Megatron, layout: StageLayout) -> Masters:
        named = self._policy.by_name()
        return Masters(
            self._ddps,
            named,
            getattr(torch, self._job.model.dtype),
            self._parallel,
            spread=settings.spreads_optimizer(self._job.world.size),
            counted_elsewhere=frozenset(name for name in named if layout.home(name) != self._parallel.stage),
            hosted=settings.hosted_share,
        )

    def _make_updater(self, settings: Megatron, *, scaled: bool) -> PieceUpdater:
        dtypes = settings.moment_dtypes(self._job.model.dtype)
        return PieceUpdater(
            self._job,
            self._ddps,
            self._masters,
            {rule.parameter: rule.everywhere for rule in self._table.rules.values()},
            scaled=scaled,
            moment_dtypes={kind: getattr(torch, dtype) for kind, dtype in dtypes.items()},
        )

    def _describe(
        self, settings: Megatron, known: Architecture, layout: StageLayout, kind: Kind, computing: torch.dtype, *, engine: bool
    ) -> str:  # fmt: skip
        """What was built, for the log."""
        held, masters, experts = self._parallel, self._masters, known.facts.experts
        eight_bit = f" and FP8 ({settings.fp8_format}, {settings.fp8_recipe})" if settings.fp8 else ""
        part = "model" if held.stages == 1 else f"stage of {held.stages} ({layout.described()})"
        said = (
            f"{known.parameters / 1e6:.2f}M weights",
            f"computing in {str(computing).removeprefix('torch.')}{eight_bit}",
            f"layers of Transformer Engine {engine_version()}" if engine else "",
            f"attention {kernels.WORDS[kind]}",
            f"{held.tensor_size} ranks a {part}",
            "rows spread over them" if settings.spreads_sequence() else "",
            f"each row over {held.context.size} ranks of each part" if held.context is not None else "",
            f"{held.models} models",
            "moments spread over them" if settings.spreads_optimizer(self._job.world.size) else "",
            f"moments of {len(masters.hosted)} of {len(masters.pieces)} parameters in host memory" if masters.hosted else "",
            f"{experts} experts a layer over {held.experts.size} ranks" if experts else "",
        )
        return f"{type(known.config).__name__.removesuffix('Config')}: {', '.join(filter(None, said))}"

    @torch.no_grad()
    def _fill(self, policy: ParallelPolicy, files: ModelCheckpoint, put: Callable[[str, Tensor], object]) -> None:
        shapes = {name: tuple(parameter.shape) for name, parameter in policy.by_name().items()}
        state.fill(self._table, files, shapes, put, self._masters.dtype, self._device)

    # ---- a step

    def _on_device(self, arrays: packing.RowArrays) -> tuple[rows.DeviceRow, ParallelRow]:
        row = rows.to_device(arrays, self._device)
        told = None if self._load is None else routing.of_row(arrays, self._device)
        return row, self._policy.prepared(row, arrays.boundaries, np.flatnonzero(arrays.mask) - 1, told)

    def _row_of_many(self, last: bool) -> AbstractContextManager[None]:
        return self._of_lap(0, last)

    def _of_lap(self, lap: int, last: bool) -> AbstractContextManager[None]:
        """Around a backward pass through one of this stage's stretches."""
        context: AbstractContextManager[None] = nullcontext() if last else self._ddps[lap].no_sync()
        return context

    def _before_update(self) -> None:
        """Gradients are summed over the ranks with other rows and other parts of rows, those of norms over the ranks that hold
        matrices together, too, and those of a tied embedding over the first and the last stage."""
        finalize_model_grads(self._ddps)

    @property
    def _counts(self) -> bool:
        """Of the ranks of a model, which have the same trajectories, the first one that computes losses."""
        held = self._parallel
        return held.tensor_rank == 0 and held.first_part and held.stage + 1 == held.stages

    # ---- a step, on several stages

    def _accumulate_all(
        self, number: int, minibatch: Sequence[PreparedRow], counts: Denominators, spans: PhaseTimer, tally: MetricSums
    ) -> None:  # fmt: skip
        if self._pipeline is None:
            super()._accumulate_all(number, minibatch, counts, spans, tally)
            return
        count, arranged = len(minibatch), [row.arrays for row in minibatch]

        @contextmanager
        def taking(place: int) -> Iterator[None]:
            spans.at(number, place)
            with spans.span("compute_kl"):
                yield

        references: Sequence[Tensor | None] = [None] * count
        if self._reference is not None:
            references = self._logprobs_of_rows(self._reference, arranged, taking)

        def loss(place: int, row: rows.DeviceRow, logprob: Tensor, entropy: Tensor) -> Tensor:
            entropy, old = self._entropy_for(entropy), minibatch[place].old
            laid = row.packed(logprob, entropy, old=old, reference=references[place])
            return self._updater.scaled(self._loss_of(laid, counts, tally))

        passes = TrainedRows(
            self._policy, arranged, self._on_device, self._job.trainer.entropy_chunk_size, self._job.support, number=number,
            spans=spans, loss=loss, of_lap=self._of_lap, done=lambda place: self._tell_row(number, place, count),
        )  # fmt: skip
        self._pipeline.run(self._pipeline.order(count), passes)

    def _logprobs_of_rows(
        self, policy: Any, arranged: Sequence[packing.RowArrays], taking: Callable[[int], AbstractContextManager[None]]
    ) -> list[Tensor | None]:  # fmt: skip
        if self._pipeline is None:
            return super()._logprobs_of_rows(policy, arranged, taking)
        chunk, support = self._job.trainer.entropy_chunk_size, self._job.support
        passes = ForwardRows(policy, arranged, self._on_device, chunk, support, taking=taking)
        self._pipeline.run(self._pipeline.forwards(len(arranged)), passes)
        return passes.logprobs

    def _on_all_ranks(self, found: list[Tensor | None], arranged: Sequence[packing.RowArrays]) -> list[Tensor]:
        known = [logprobs for logprobs in found if logprobs is not None]
        if self._pipeline is None:
            return known
        counts = [int(arrays.mask.sum()) for arrays in arranged]
        whole = torch.cat(known) if known else torch.empty(sum(counts), dtype=torch.float32, device=self._device)
        return list(torch.split(self._pipeline.from_last(whole), counts))

    def _after_rows(self, tally: MetricSums) -> None:
        if self._pipeline is not None:
            names = self._pipeline.told_by_last(tally.names)
            if not self._pipeline.last:
                tally.follow(names)

    # ---- weights and state

    def layout(self) -> Sequence[ModelTensor]:
        return self._packer.layout()

    def pack(self, bucket: Bucket, out: Tensor | None) -> None:
        with ranks.watched("gathering the weights"):
            self._packer.pack(bucket, out)

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, Any]]:
        with ranks.watched("gathering the weights"):
            receives = self._job.world.rank == 0
            yield from host_weights(self.layout(), self._packer.pack, self._device, receives=receives, dtype=dtype)

    def save(self, step: int, folder: Path, done: Callable[[Outcome], None], *, training_state: bool = True) -> None:
        """With the distributed optimizer this holds collectives: moments come together a parameter at a time. An error of that
        is raised, and `done` not called: this rank may not go on to other collectives while the others wait in these."""
        broken: list[Exception] = []

        def found() -> Iterator[tuple[str, Tensor]]:
            try:
                yield from state.gathered(
                    *(self._masters, self._updater, self._table, self._parallel, self._job.world), training_state=training_state
                )
            except Exception as error:
                broken.append(error)
                raise

        def told(outcome: Outcome) -> None:
            if not broken:
                done(outcome)

        with ranks.watched(f"gathering the state of step {step}"):
            tensors = found()
            self._saver.save(tensors, folder, told)
            for _ in tensors:  # where nothing could be saved, the other ranks still wait for this one's pieces
                pass
            if broken:
                raise broken[0]

    def close(self) -> None:
        self._saver.settle()
        parallel.leave()
        ranks.leave()
