"""What has happened. Past tense, ids and scalars only; each handled event is one journal line."""

from __future__ import annotations

from math import isfinite

import msgspec

from telescope.records import EnvironmentCard, FailureKind, FinishReason


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all events; the tag is the class name."""


class WorkerJoined(Event, frozen=True):
    worker: str
    capacity: int
    environments: tuple[EnvironmentCard, ...]


class WorkerLost(Event, frozen=True):
    """Its rollouts are tried again elsewhere; what servers generate for it holds its place there until they have answered."""

    worker: str
    cause: str


class ServerJoined(Event, frozen=True):
    server: str
    version: int
    capacity: int
    """Requests it takes at once."""


class ServerLost(Event, frozen=True):
    """It is dead, or fenced. Its requests are placed elsewhere; one of its name that joins later is another server."""

    server: str
    cause: str


class TrainerReady(Event, frozen=True):
    """All trainer ranks have said hello."""

    ranks: int


class TurnStarted(Event, frozen=True):
    """A worker asks for tokens. Answered by PlaceRequest or RefuseRequest."""

    request_id: str
    rollout_id: int
    attempt: int
    turn: int
    prompt_tokens: int


class TurnDone(Event, frozen=True):
    """A placed request has been answered by its server, which has room again; a failed one with `abort` and the tokens that
    were sampled. It comes for each placed request, also where the rollout has ended meanwhile, unless the server is lost."""

    request_id: str
    rollout_id: int
    completion_tokens: int
    finish_reason: FinishReason


class GenerationOver(Event, frozen=True):
    """The rollout will ask for no more tokens; its environment scores it. Its lane is free, its credit is not."""

    rollout_id: int
    attempt: int


class ServerLoad(Event, frozen=True):
    """What a server's engine says of itself, now and then; may be lost or late. Raises ValueError where it can't be one."""

    server: str
    kv_used: float
    """Share of the KV cache in use, 0 to 1."""
    running: int
    waiting: int
    """Requests the engine has and has not begun."""
    preemptions: int
    """Since the engine's start: requests it threw out of a full cache, to be computed again."""

    def __post_init__(self) -> None:
        if not 0 <= self.kv_used <= 1 or min(self.running, self.waiting, self.preemptions) < 0:
            raise ValueError(f"{self.server} says of its load: {self}; kv_used must be from 0 to 1, and no count below 0")


class RolloutDone(Event, frozen=True):
    """A reward that is not finite is an infrastructure failure: report RolloutFailed. Raises ValueError here."""

    rollout_id: int
    attempt: int
    reward: float
    prompt_tokens: int
    completion_tokens: int
    turn_returns: tuple[float, ...] | msgspec.UnsetType = msgspec.UNSET
    """By what its turns are compared with those of its group; unset: the reward is compared."""

    def __post_init__(self) -> None:
        if not isfinite(self.reward):
            raise ValueError(f"reward={self.reward} of rollout {self.rollout_id} is not a finite number")
        if not all(map(isfinite, self.turn_returns or ())):
            raise ValueError(f"turn_returns={self.turn_returns} of rollout {self.rollout_id} are not finite numbers")


class RolloutFailed(Event, frozen=True):
    """The attempt ended without a reward; also the answer to a cancelled order."""

    rollout_id: int
    attempt: int
    cause: str
    kind: FailureKind = "infrastructure"
    """A grader's failure is not tried again: the sample is given up."""


class StepDone(Event, frozen=True):
    """All ranks have finished the step; its weights exist in the trainer."""

    step: int


class UpdateDone(Event, frozen=True):
    """All servers that were there at the UpdateWeights and still live have committed the version."""

    version: int


class UpdateFailed(Event, frozen=True):
    version: int
    cause: str


class CheckpointDone(Event, frozen=True):
    """The checkpoint of the step is complete: it outlives a power loss from here on."""

    step: int


class CheckpointFailed(Event, frozen=True):
    """There will be none of this step; the run goes on."""

    step: int
    cause: str


class EvalScored(Event, frozen=True):
    """An eval that has ended has its score, by which the run may end early. Raises ValueError where it is not a number."""

    eval: str
    step: int
    """It was due at."""
    score: float

    def __post_init__(self) -> None:
        if not isfinite(self.score):
            raise ValueError(f"score={self.score} of the eval {self.eval} of step {self.step} is not a finite number")


class StopRequested(Event, frozen=True):
    """A signal or a fault outside the core asks for the end."""

    reason: str
    ok: bool
    save: bool = False
    """Whether there is time to train the step under way to its end, and to save it where checkpoints are on."""


class Tick(Event, frozen=True):
    """Time has passed; deadlines are looked at."""


AnyEvent = (
    WorkerJoined | WorkerLost | ServerJoined | ServerLost | TrainerReady | TurnStarted | TurnDone
    | GenerationOver | ServerLoad | RolloutDone | RolloutFailed | StepDone | UpdateDone | UpdateFailed | CheckpointDone
    | CheckpointFailed | EvalScored | StopRequested | Tick
)  # fmt: skip
