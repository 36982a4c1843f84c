"""A model in training, sharded with FSDP2: how it is built, what a row is for it, how weights and state leave it.

Owns what of a backend is FSDP's. A step and its order are common/stepping.py's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from telescope.backends.base import Job, Outcome
from telescope.backends.common import attention, kernels, model_work, ranks, routing, rows
from telescope.backends.common.saving import Saver
from telescope.backends.common.stepping import SteppingBackend
from telescope.backends.fsdp import assembly, gather, sizing, state
from telescope.backends.fsdp.policy import Policy, RowInput
from telescope.backends.fsdp.sharding import make_mesh
from telescope.backends.fsdp.updates import ShardUpdater
from telescope.maths import packing
from telescope.weights.buckets import Bucket, ModelTensor

if TYPE_CHECKING:
    from telescope.backends.fsdp import FSDP

log = logging.getLogger(__name__)


class FSDPBackend(SteppingBackend):
    """See `telescope.backends.base.Backend`. Building it is a collective too."""

    _policy: Policy
    _updater: ShardUpdater

    def __init__(self, settings: FSDP, job: Job) -> None:
        self._job = job
        self._shares_prefixes = settings.share_prefixes
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
            self._updater = ShardUpdater(settings.optimizer, job, self._policy, scaled=scaled, hosted=hosted)
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
        if self._policy.routers is not None:
            self._load = self._policy.routers.load
        self._keeps_gathered = settings.reshard_after_forward is False
        held = self._spread
        self._packer = gather.Packer(self._published, held.shard, held.shards, held.group, self._device)

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

    def save(self, step: int, folder: Path, done: Callable[[Outcome], None], *, training_state: bool = True) -> None:
        self._saver.save(self._state(training_state), folder, done)

    def _state(self, training_state: bool) -> dict[str, Tensor]:
        return state.gathered(self._policy, self._updater, self._job.world, training_state=training_state)

    def close(self) -> None:
        self._saver.settle()
        ranks.leave()

    def _row_of_many(self, last: bool) -> AbstractContextManager[None]:
        if self._keeps_gathered:
            self._policy.keep_gathered(not last)
        return nullcontext()

    def _after_forward_alone(self) -> None:
        self._policy.free_gathered()

    def _after_step(self) -> None:
        if self._saver.wants_memory:  # the optimiser has made its state by now
            self._saver.reserve(self._state(self._job.saving.training_state))

    def _refuse_long(self, longest: int) -> None:
        self._policy.refuse_hidden(longest)

    @property
    def _counts(self) -> bool:
        """Ranks that share rows find the same: the first of them counts."""
        shared = self._spread.context
        return shared is None or shared.rank == 0

    def _on_device(self, arrays: packing.RowArrays) -> tuple[rows.DeviceRow, RowInput]:
        row = rows.to_device(arrays, self._device)
        kind, context = self._policy.kind, self._spread.context
        segments = attention.segments(kind, arrays.boundaries, self._device, context, arrays.repeated)
        piece = self._policy.piece(len(arrays.ids), np.flatnonzero(arrays.mask) - 1)
        told = None if self._load is None else routing.of_row(arrays, self._device)
        return row, RowInput(row.ids, row.position_ids, segments, row.before, row.targets, row.temperature, piece, told)
