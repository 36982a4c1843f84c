"""A backend without torch and without learning, for tests of the processes around it.

Takes shards as a real one would, and refuses what a real one refuses; its metrics and its two small tensors follow from the
step and the seed alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from telescope.backends.base import (
    Backend,
    BackendSettings,
    CheckpointUnfit,
    Job,
    NotSaved,
    Outcome,
    Saved,
    StepResult,
    TrainShard,
)
from telescope.backends.common import shards
from telescope.maths import metrics, packing
from telescope.maths.learning_rate import learning_rate_factor
from telescope.maths.packing import ATTENTION_LENGTH
from telescope.runlog.layout import write_atomically
from telescope.weights.buckets import Bucket, ModelTensor

if TYPE_CHECKING:
    from torch import Tensor


class Fake(BackendSettings):
    has_model: ClassVar[bool] = False

    step_s: float = Field(default=0.0, ge=0)
    """How long a train step takes."""

    def build(self, job: Job) -> Backend:
        return FakeBackend(self.step_s, job)


class FakeBackend:
    """See `telescope.backends.base.Backend`. Its ranks do not speak to each other: each counts its own shard."""

    def __init__(self, step_s: float, job: Job) -> None:
        self._step_s = step_s
        self._job = job
        self._version = 0 if job.resume is None else _read_version(job.resume, job.world.rank)

    @property
    def attention_length(self) -> float:
        return ATTENTION_LENGTH

    def train_step(self, shard: TrainShard) -> StepResult:
        started = time.perf_counter()
        trainer = self._job.trainer
        minibatches = shards.pack(shard, seq_len=trainer.row_tokens, multiple=trainer.pad_to_multiple_of)
        plan = [row for rows in minibatches for row in rows]
        trajectories = shards.trajectories(shard)
        for row in plan:
            packing.arrange(row, trajectories, shard.items)
        time.sleep(self._step_s)  # stands for the work itself
        self._version = shard.step
        found = metrics.finish(*shards.host_metrics(shard, plan))
        found["padding_fraction"] = 1.0 - found["packed_tokens"] / max(found.pop("row_tokens"), 1.0)
        del found["squared_tokens"]
        return StepResult(metrics=found | self._learning(shard), timings={"timing_step_active": time.perf_counter() - started})

    def logprobs(self, shard: TrainShard) -> np.ndarray:
        """There is no model to disagree with the server's."""
        return shard.logprobs.copy()

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """`fake.embedding` [4, 8] and `fake.version` [2] float32, the version and the seed. They stay float32: numpy has not
        all that `dtype` may name."""
        if self._job.world.rank == 0:
            random = np.random.default_rng((self._job.seed, self._version))
            yield "fake.embedding", random.standard_normal((4, 8), np.float32)
            yield "fake.version", np.array([self._version, self._job.seed], np.float32)

    def layout(self) -> tuple[ModelTensor, ...]:
        return ModelTensor("fake.embedding", "float32", (4, 8)), ModelTensor("fake.version", "float32", (2,))

    def pack(self, bucket: Bucket, out: Tensor | None) -> None:
        """Whoever gives `out` has imported torch."""
        if out is None:
            return
        from torch import from_numpy

        held = {name: from_numpy(array) for name, array in self.weights()}
        for spec in bucket.specs:
            place = out[spec.offset - bucket.start :][: spec.nbytes]
            place.view(held[spec.name].dtype).view(spec.shape).copy_(held[spec.name])

    def save(self, step: int, folder: Path, done: Callable[[Outcome], None], *, training_state: bool = True) -> None:
        """All of it, which is little: `rank-0.json`."""
        started = time.perf_counter()
        file = folder / f"rank-{self._job.world.rank}.json"
        text = json.dumps({"version": self._version, "seed": self._job.seed}) + "\n"
        try:
            write_atomically(file, text)
        except OSError as error:
            done(NotSaved(f"{file} can't be written: {error.strerror}"))
        else:
            done(Saved(len(text), time.perf_counter() - started))

    def close(self) -> None: ...

    def _learning(self, shard: TrainShard) -> dict[str, float]:
        """Numbers of the kinds that a real step reports, from step and batch."""
        trainer = self._job.trainer
        factor = learning_rate_factor(
            shard.step,
            schedule=trainer.lr_scheduler,
            number_of_steps=self._job.number_of_steps,
            warmup_steps=trainer.warmup_steps,
            min_ratio=trainer.min_lr_ratio,
        )
        advantages = math.fsum(item.advantage * item.sequence_tokens for item in shard.items)
        tokens = sum(counts.tokens for counts in shard.denominators)
        return {
            **({"loss": -advantages / tokens} if tokens else {}),
            "entropy": 1.0 / shard.step,
            "kl_divergence_inference": 0.0,
            "grad_norm": 1.0 / math.sqrt(shard.step),
            "learning_rate": trainer.learning_rate * factor,
            "update_skipped": 0.0,
            "updates_skipped_total": 0.0,
        }


def _read_version(folder: Path, rank: int) -> int:
    """Of any number of ranks: a rank that was not there takes rank 0's."""
    own = folder / f"rank-{rank}.json"
    file = own if own.exists() else folder / "rank-0.json"
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointUnfit(
            f"the checkpoint {folder} can't be read ({type(error).__name__}: {error}): resume from an earlier step"
        ) from error
