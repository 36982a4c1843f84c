"""A model in training on megatron-core: how it is built, what a row is for it, how weights and state leave it.

Owns what of a backend is Megatron's. A step and its order are common/stepping.py's: of megatron-core the layers, the groups and
the gradients' buffers are used, and neither its loss nor its schedules.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from torch import Tensor

from telescope.backends.base import Job, Outcome
from telescope.backends.common import kernels, model_work, ranks, routing, rows
from telescope.backends.common.flat_buckets import host_weights
from telescope.backends.common.routing import ExpertLoad
from telescope.backends.common.saving import Saver
from telescope.backends.common.stepping import SteppingBackend
from telescope.backends.megatron import architecture, parallel, state
from telescope.backends.megatron.masters import Masters
from telescope.backends.megatron.policy import ParallelPolicy, ParallelRow
from telescope.backends.megatron.publish import PartPacker
from telescope.backends.megatron.rules import TensorMap
from telescope.backends.megatron.updates import PieceUpdater
from telescope.maths import packing
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
        known = architecture.read(settings, job)
        self._parallel = parallel.make_parallel(
            job.world, settings.tensor_parallel_size, settings.collective_timeout_s, settings.expert_parallel_size
        )
        held, experts = self._parallel, self._parallel.experts
        self._table = TensorMap(
            known.facts, known.shapes, held.tensor_rank, held.tensor_size, experts.rank, experts.size
        )  # fmt: skip
        master = getattr(torch, job.model.dtype)

        def made() -> ParallelPolicy:
            with warnings.catch_warnings():  # of defaults that megatron-core itself has deprecated
                warnings.simplefilter("ignore")
                return ParallelPolicy(known, settings, kind, computing, self._parallel, self._device)

        self._policy = made().train()
        spread = settings.spreads_optimizer(job.world.size)
        self._ddp: Any = DistributedDataParallel(
            self._policy.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=settings.grad_reduce_in_fp32,
                overlap_grad_reduce=settings.overlap_grad_reduce,
                use_distributed_optimizer=spread,
                average_in_collective=False,
            ),
            self._policy.lm,
        )
        self._masters = Masters(self._ddp, master, self._parallel, spread=spread)
        self._fill(self._policy, known.files, self._masters.put, master)
        self._reference = None
        if job.algorithm.needs_reference:
            self._reference = made().requires_grad_(False).eval()
            self._reference.replays = False
            frozen = dict(self._reference.lm.named_parameters())
            self._fill(self._reference, known.files, lambda name, whole: frozen[name].copy_(whole), master)
        everywhere = {rule.parameter: rule.everywhere for rule in self._table.rules.values()}
        self._updater = PieceUpdater(job, self._ddp, self._masters, everywhere, scaled=computing == torch.float16)
        if job.resume is not None:
            state.put_back(job.resume, self._masters, self._updater, self._table, self._parallel, job.world)
        self._work = known.work
        facts = known.facts
        if facts.expert_layers:
            self._load = ExpertLoad(len(facts.expert_layers), facts.experts, facts.top_k, self._device)
            self._policy.load = self._load
        self._packer = PartPacker(self._masters, self._table, self._parallel, self._device)
        log.info(
            "%s: %.2fM weights, computing in %s, attention %s, %d ranks a model%s, %d models%s%s",
            type(known.config).__name__.removesuffix("Config"),
            known.parameters / 1e6,
            str(computing).removeprefix("torch."),
            kernels.WORDS[kind],
            self._parallel.tensor_size,
            ", rows spread over them" if settings.spreads_sequence() else "",
            self._parallel.data_size,
            ", moments spread over them" if spread else "",
            f", {known.facts.experts} experts a layer over {experts.size} ranks" if known.facts.experts else "",
        )

    @torch.no_grad()
    def _fill(self, policy: ParallelPolicy, files: Any, put: Callable[[str, Tensor], object], dtype: torch.dtype) -> None:
        shapes = {name: tuple(parameter.shape) for name, parameter in policy.lm.named_parameters()}
        state.fill(self._table, files, shapes.__getitem__, put, dtype, self._device)

    # ---- a step

    def _on_device(self, arrays: packing.RowArrays) -> tuple[rows.DeviceRow, ParallelRow]:
        row = rows.to_device(arrays, self._device)
        told = None if self._load is None else routing.of_row(arrays, self._device)
        return row, self._policy.prepared(row, arrays.boundaries, told)

    def _row_of_many(self, last: bool) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = nullcontext() if last else self._ddp.no_sync()
        return context

    def _before_update(self) -> None:
        """Gradients are summed over the ranks with other rows, and those of norms over the ranks of a model, too."""
        finalize_model_grads([self._ddp])

    @property
    def _counts(self) -> bool:
        return self._parallel.tensor_rank == 0

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

    def save(self, step: int, folder: Path, done: Callable[[Outcome], None]) -> None:
        """With the distributed optimizer this holds collectives: moments come together a parameter at a time. An error of that
        is raised, and `done` not called: this rank may not go on to other collectives while the others wait in these."""
        broken: list[Exception] = []

        def found() -> Iterator[tuple[str, Tensor]]:
            whole = self._job.saving.training_state
            try:
                yield from state.gathered(
                    self._masters, self._updater, self._table, self._parallel, self._job.world, training_state=whole
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
