"""What a trainer process asks of a training backend. No torch import at import time; plug-ins import it in `build()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from telescope.maths.support import WHOLE, Support
from telescope.records import Denominators, TrainItem
from telescope.settings import Settings
from telescope.weights.buckets import Bucket, ModelTensor

if TYPE_CHECKING:
    from torch import Tensor

    from telescope.algorithms.base import Algorithm
    from telescope.config.models import ModelCounts
    from telescope.config.sections import ModelSettings, TrainerSettings
    from telescope.maths.memory import Checkpointing, ModelShape, TrainerMemory


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
    routed: np.ndarray | None = None  # [T, L, K] uint8 or int16, recorded experts (maths/routing.py); None: of no token

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Those of its trajectories: four, or five where routing was recorded."""
        return (self.ids, self.mask, self.logprobs, self.versions, *(() if self.routed is None else (self.routed,)))


@dataclass(frozen=True)
class Span:
    """A phase of this rank's work, e.g. the forward pass of row 3. `minibatch` and `row` count from 0; None: it is of none."""

    name: str
    started_ns: int
    """Wall clock."""
    seconds: float
    minibatch: int | None = None
    row: int | None = None


@dataclass(frozen=True)
class StepResult:
    """`metrics` are reduced over all ranks (equal on each); `timings` are this rank's seconds by phase, `spans` the phases."""

    metrics: dict[str, float]
    timings: dict[str, float]
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class World:
    """Where this process stands among the trainer ranks. `device` is `cpu` or `cuda:<index>`; `memory_share` is how much of
    its GPU's memory it may take: less than 1 where a server shares the card. `meeting_file`: by which the ranks of one host
    meet; None: by MASTER_ADDR and MASTER_PORT. `met`: somebody else listens there already, so rank 0 goes there like the
    others."""

    rank: int
    size: int
    device: str
    memory_share: float = 1.0
    met: bool = False
    meeting_file: Path | None = None


class RankLost(RuntimeError):
    """A collective failed because another rank is gone or silent: look for the cause there."""


class CheckpointUnfit(ValueError):
    """A checkpoint can't be read, or is of another model or other settings."""


@dataclass(frozen=True)
class Saved:
    """This rank's part of a checkpoint is on the disk."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class NotSaved:
    cause: str


Outcome = Saved | NotSaved


@dataclass(frozen=True)
class SaveSettings:
    """`background`: written while training goes on, from a copy in host memory. `timeout_s`: how long a save may take.
    `expected`: saves will come, so that their host memory is worth having early; `training_state`: of these, not of the weights
    alone."""

    background: bool = True
    timeout_s: float = 1800.0
    expected: bool = False
    training_state: bool = True


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
    """The run's. An environment may have its own: each trajectory is trained at that of its item."""
    max_tokens: int
    """The run's, by which a loss may divide; an environment's own is never above it."""
    seed: int
    world: World
    support: Support = WHOLE
    """Tokens that the sampler can take; log-probs are normalised over them."""
    progress: Callable[[str], None] = unwatched
    """To be called with what was done, after each micro-batch: a long step is then no stuck one."""
    recorded_loss_scale: float | None = None
    """Where a recorded step is run again in float16: what it multiplied its loss by."""
    resume: Path | None = None
    """The trainer's folder of the checkpoint to begin with; None: the model as it is."""
    saving: SaveSettings = SaveSettings()
    rollouts: int = 0
    """Of one update, all ranks together; 0: not known."""
    max_model_len: int | None = None
    """Tokens of a prompt and its answer, at most, as the server allows them; None: not known."""

    @property
    def longest(self) -> int:
        """Tokens of a sample, at most: what is longer than a row is refused, or trained up to there."""
        return min(self.trainer.row_tokens, self.max_model_len or self.trainer.row_tokens)


class Backend(Protocol):
    """A model in training on this rank. Every method is called on all ranks in the same order (they hold collectives)."""

    @property
    def attention_length(self) -> float:
        """Tokens of a sample whose attention costs as much as all the rest: rollouts are dealt to ranks by it."""
        ...

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

    def layout(self) -> Sequence[ModelTensor]:
        """Names, dtypes and shapes of what `weights` yields, in its order. Not a collective."""
        ...

    def pack(self, bucket: Bucket, out: Tensor | None) -> None:
        """Gather one bucket of the layout into `out` [bucket.nbytes] uint8 on this rank's device, cast to its specs' dtypes.

        Only rank 0 gives `out`. On a GPU the work is queued on the current stream; not more than the bucket is made whole.
        """
        ...

    def save(self, step: int, folder: Path, done: Callable[[Outcome], None], *, training_state: bool = True) -> None:
        """Write this rank's state after `step` to `folder`, down to the disk; without `training_state` the weights alone.
        Returns as soon as training may go on; `done` is called exactly once, from here or from another thread. A save under way
        is waited for first. Where the state is spread otherwise than it is written it holds collectives, and raises their
        errors without a call of `done`."""
        ...

    def close(self) -> None:
        """Waits for a save under way."""
        ...


class BackendSettings(Settings):
    """Base of all backends' settings: a file of this folder with one subclass is a backend of that file's name."""

    trains_adapters: ClassVar[bool] = False
    """Whether it knows model.lora."""
    fills_rows: ClassVar[bool] = False
    """Whether it fills up by itself a row that `ranks_a_row` ranks can't share evenly."""
    has_model: ClassVar[bool] = True
    """Whether its weights are a model's, and so worth saving when a run ends."""
    compiles_layers: ClassVar[bool] = False
    """Whether `compile` makes graphs of whole layers, of which selective checkpointing keeps attention's results alone."""

    def run_errors(self, *, ranks: int, adapters: bool, on_cpu: bool) -> Iterator[tuple[tuple[str, ...], str]]:
        """What of these settings can't be in a run of so many ranks: paths of these settings, and a sentence with the remedy.
        `adapters`: model.lora is given; `on_cpu`: the run was told to use no GPU."""
        yield from ()

    def model_errors(self, counts: ModelCounts) -> Iterator[tuple[tuple[str, ...], str]]:
        """What of these settings can't be with a model of so many layers, heads and experts, as in `run_errors`. Asked as soon
        as somebody knows the model: at the command line where its config.json lies here, in planning, else at a rank's
        start."""
        yield from ()

    def find_obstacles(
        self, *, on_gpu: bool, capability: Callable[[], int | None], model_dtype: str, elsewhere: bool
    ) -> Iterator[str]:
        """What of these settings `build` would refuse where the ranks are to run: sentences with the remedy, without torch.

        `capability` asks for the GPUs' major one; None: not known. `elsewhere`: not in this Python. What can't be told is left
        out."""
        yield from ()

    @property
    def ranks_a_shard(self) -> int:
        """Neighbouring ranks that train the same trajectories together, and are all sent them; 1: each has its own."""
        return 1

    @property
    def ranks_a_row(self) -> int:
        """Of `ranks_a_shard`, those that share each row, an equal part of its tokens each; the others hold parts of the
        model."""
        return 1

    @property
    def compiles(self) -> bool:
        """`compile` of a backend that has it; false where nobody has decided `auto` yet, as on a CPU."""
        return getattr(self, "compile", False) is True

    @property
    def checkpointing(self) -> Checkpointing:
        """`gradient_checkpointing` of a backend that has it; true where nobody has decided `auto` yet, as on a CPU."""
        asked: Checkpointing | Literal["auto"] = getattr(self, "gradient_checkpointing", False)
        return True if asked == "auto" else asked

    def checkpointing_choices(self, layers: int) -> Iterator[Mapping[str, bool | str | int]]:
        """What `gradient_checkpointing=auto` may become for a model of so many layers, with the settings that go with it; none
        where the backend has no such setting."""
        yield from ()

    def saved_moment_bytes(self, shape: ModelShape, model: ModelSettings) -> int | None:
        """Bytes of the moments in a save of the training state, all ranks together; None: not known."""
        return None

    def rank_memory(
        self, shape: ModelShape, model: ModelSettings, trainer: TrainerSettings, *,
        ranks: int, longest: int, reference: bool = False, handed_bytes: int = 0, seq_len: int | None = None,
    ) -> TrainerMemory | None:  # fmt: skip
        """What one of `ranks` holds, for planning; None: not known.

        `longest`: tokens of the longest sample; `reference`: the algorithm compares with a frozen model; `handed_bytes`: of a
        value in the buffer for servers on the same card, 0 where there is none; `seq_len` in place of the trainer's."""
        return None

    def alone(self) -> BackendSettings:
        """The same for one process, or several of which each has the whole model and trajectories of its own: a step that is
        run again, the doctor. What is computed is the same."""
        return self

    def build(self, job: Job) -> Backend:
        """Make the backend on this rank; torch.distributed is set up in here, from the standard environment variables."""
        raise NotImplementedError
