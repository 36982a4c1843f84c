"""A trainer that learns nothing and waits to be told: each step it says that its batch is there, and goes on when it may.

It publishes the served model's own weights, so that a run goes through all that a step does while the benchmark decides when
the next batch is generated. Its marks are files in the folder `gate`: `batch-3` from it, `go-3` to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from telescope.backends.base import Backend, BackendSettings, Job, StepResult, TrainShard
from telescope.backends.fake import FakeBackend
from telescope.weights.buckets import Bucket, ModelTensor

if TYPE_CHECKING:
    from torch import Tensor

LOOK_S, LIMIT_S = 0.02, 240.0


class Patient(BackendSettings):
    gate: str = Field(default="")
    """Folder of the marks; empty: never waits."""

    def build(self, job: Job) -> Backend:
        return PatientBackend(self.gate, job)


class PatientBackend(FakeBackend):
    """One rank."""

    def __init__(self, gate: str, job: Job) -> None:
        from safetensors.torch import load_file

        super().__init__(0.0, job)
        self._gate = Path(gate) if gate else None
        self._tensors: dict[str, Any] = load_file(Path(job.model.name) / "model.safetensors")

    def train_step(self, shard: TrainShard) -> StepResult:
        if self._gate is not None:
            (self._gate / f"batch-{shard.step}").touch()
            end = time.monotonic() + LIMIT_S
            while not (self._gate / f"go-{shard.step}").exists():
                if time.monotonic() > end:
                    raise TimeoutError(f"nobody wrote {self._gate}/go-{shard.step} within {LIMIT_S:g} s")
                time.sleep(LOOK_S)  # the one who writes it is another process
        return super().train_step(shard)

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, Any]]:
        import torch

        for name, tensor in self._tensors.items():
            yield name, tensor.to(getattr(torch, dtype) if dtype else tensor.dtype)

    def layout(self) -> Sequence[ModelTensor]:  # type: ignore[override]
        kinds = ((name, str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in self._tensors.items())
        return [ModelTensor(name, dtype, tuple(shape)) for name, dtype, shape in kinds]

    def pack(self, bucket: Bucket, out: Tensor | None) -> None:
        import torch

        for spec in bucket.specs if out is not None else ():
            assert out is not None
            row = out[spec.offset - bucket.start :][: spec.nbytes].view(getattr(torch, spec.dtype))
            row.copy_(self._tensors[spec.name].reshape(-1))
