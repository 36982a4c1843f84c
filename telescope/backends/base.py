"""What a trainer process asks of a training backend. No torch import at import time; plug-ins import it in `build()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from telescope.maths.support import WHOLE, Support
from telescope.records import Denominators, TrainItem
from telescope.settings import Settings
from telescope.weights.buckets import Bucket
from telescope.weights.buckets import Tensor as TensorKind

if TYPE_CHECKING:
    from torch import Tensor

    from telescope.algorithms.base import Algorithm
    from telescope.config.parts import ModelSettings, TrainerSettings


@dataclass(frozen=True)
class TrainShard:
    """One rank's part of a step: trajectories one after another, in order of their minibatches."""

    step: int
    items: tuple[TrainItem, ...]
    ids: np.ndarray  # [T] int32
    mask: np.ndarray  # [T] uint8
    logprobs: np.ndarray  # [T] float32, NaN where mask is 0
    versions: np.ndarray  # [T] int32
    denominators: tuple[Denominators, ...]  # one a minibatch: as many updates the step makes


@dataclass(frozen=True)
class StepResult:
    """`metrics` are reduced over all ranks (equal on each); `timings` are this rank's seconds by phase."""

    metrics: dict[str, float]
    timings: dict[str, float]


@dataclass(frozen=True)
class World:
    """Where this process stands among the trainer ranks. `device` is `cpu` or `cuda:<index>`; `memory_share` is how much of
    its GPU's memory it may take: less than 1 where a server shares the card."""

    rank: int
    size: int
    device: str
    memory_share: float = 1.0


class RankLost(RuntimeError):
    """A collective failed because another rank is gone or silent: look for the cause there."""


def unwatched(doing: str) -> None:
    """Progress that nobody looks at."""


@dataclass(frozen=True)
class Job:
    """All that a backend needs to know of a run."""

    algorithm: Algorithm
    model: ModelSettings
    trainer: TrainerSettings
    number_of_steps: int
    temperature: float
    max_tokens: int
    seed: int
    world: World
    support: Support = WHOLE
    """Tokens that the sampler can take; log-probs are normalised over them."""
    progress: Callable[[str], None] = unwatched
    """To be called with what was done, after each micro-batch: a long step is then no stuck one."""


class Backend(Protocol):
    """A model in training on this rank. Every method is called on all ranks in the same order (they hold collectives)."""

    def train_step(self, shard: TrainShard) -> StepResult:
        """Forward, backward and an optimiser update for each minibatch of the shard and its siblings on the other ranks."""
        ...

    def logprobs(self, shard: TrainShard) -> np.ndarray:
        """[T] float32: the log-probs of the shard's sampled tokens under the weights as they are, after temperature; NaN where
        the mask is 0. Nothing is trained."""
        ...

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, Any]]:
        """Full tensors in host memory by Hugging Face name, on rank 0, floating ones as `dtype` where one is given; the other
        ranks run along and yield nothing. Tied tensors once."""
        ...

    def layout(self) -> Sequence[TensorKind]:
        """Names, dtypes and shapes of what `weights` yields, in its order. Not a collective."""
        ...

    def pack(self, bucket: Bucket, out: Tensor | None) -> None:
        """Gather one bucket of the layout into `out` [bucket.nbytes] uint8 on this rank's device, cast to its specs' dtypes.

        Only rank 0 gives `out`. On a GPU the work is queued on the current stream; not more than the bucket is made whole.
        """
        ...

    def close(self) -> None: ...


class BackendSettings(Settings):
    """Base of all backends' settings: a file of this folder with one subclass is a backend of that file's name."""

    trains_adapters: ClassVar[bool] = False
    """Whether it knows model.lora."""

    @property
    def ranks_a_shard(self) -> int:
        """Neighbouring ranks that train the same trajectories together, and are all sent them; 1: each has its own."""
        return 1

    def run_errors(self, *, ranks: int, adapters: bool, on_cpu: bool) -> Iterator[tuple[tuple[str, ...], str]]:
        """What of these settings can't be in a run of so many ranks: paths of these settings, and a sentence with the remedy.
        `adapters`: model.lora is given; `on_cpu`: the run was told to use no GPU."""
        yield from ()

    def build(self, job: Job) -> Backend:
        """Make the backend on this rank; torch.distributed is set up in here, from the standard environment variables."""
        raise NotImplementedError
