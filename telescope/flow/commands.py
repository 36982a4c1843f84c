"""What is to be done. Orders of the core to the orchestrator, which performs them; ids and scalars only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from telescope.records import PromptRef, RolloutOrder

EvalState = Literal["complete", "cut off", "changed", "left out"]
"""`cut off`: the run ended before it; `changed`: after a resume it would have been another one; `left out`: the one before it
still played when it was due."""


class CoreCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all commands. A command's tag is its name in journals, which stays though the class is renamed."""


class DispatchRollout(CoreCommand, frozen=True, tag="Run"):
    """Send the rollout to the worker (the core has counted the worker's credit)."""

    worker: str
    order: RolloutOrder


class CancelAttempt(CoreCommand, frozen=True, tag="Cancel"):
    """Stop a running attempt: tell its worker, abort its requests on the servers. No RolloutDone of this attempt counts any
    more. The worker still owes its order an answer (RolloutFailed, or a late RolloutDone): only that frees lane and credit.
    Repeated once if no answer comes, since a cancel can be lost on the wire."""

    worker: str
    rollout_id: int
    attempt: int
    reason: str


class PlaceRequest(CoreCommand, frozen=True, tag="Place"):
    """Send the waiting request to the server, from the start where a server that had it was lost. A smaller `priority` goes
    first."""

    request_id: str
    server: str
    priority: int


class RefuseRequest(CoreCommand, frozen=True, tag="Refuse"):
    """Answer the request with GenerateFailed: its rollout no longer counts or has ended, or its server is lost. Never said of
    a request that a living server holds: that one answers."""

    request_id: str
    cause: str


class AnnouncePrompts(CoreCommand, frozen=True, tag="Prefetch"):
    """Tell all workers that these prompts are likely to be sent out next. A hint, which may be lost."""

    prompts: tuple[PromptRef, ...]


class RecordGroupState(CoreCommand, frozen=True, tag="GroupState"):
    """A group has passed into a new state: one row of the run directory's groups stream."""

    group_id: int
    state: str
    reason: str
    version: int
    """v_start once known, else -1."""


class TrainOnBatch(CoreCommand, frozen=True, tag="Train"):
    """Train on the batch. `baseline_group_ids` were discarded for equal rewards since the previous batch closed: they count
    in batch statistics of the advantages, never in the loss."""

    step: int
    group_ids: tuple[int, ...]
    rollout_ids: tuple[tuple[int, ...], ...]
    """Surviving rollouts of each group, in sample order."""
    baseline_group_ids: tuple[int, ...]
    baseline_rollout_ids: tuple[tuple[int, ...], ...]


class IgnoreResult(CoreCommand, frozen=True, tag="Ignore"):
    """The RolloutDone just reported does not count (cancelled, superseded, seen before): its arrays are not kept."""

    rollout_id: int
    attempt: int


class ForgetRollouts(CoreCommand, frozen=True, tag="Forget"):
    """These rollouts will never be asked for again: the rollout store drops their arrays."""

    rollout_ids: tuple[int, ...]


class BeginEval(CoreCommand, frozen=True, tag="BeginEval"):
    """An eval has begun: `samples` of each of its `prompts`. `step`: the version that it was due at."""

    eval: str
    step: int
    prompts: int
    samples: int
    first_rollout: int
    """Id of its first rollout; the others follow, prompt by prompt."""


class EndEval(CoreCommand, frozen=True, tag="EndEval"):
    """An eval is over. All its scores were reported before, except where it was left out and never begun."""

    eval: str
    step: int
    state: EvalState
    failed: int
    """Samples given up."""
    unfinished: int
    """Samples that had no outcome when it was cut off."""


class HoldServers(CoreCommand, frozen=True, tag="HoldServers"):
    """The servers are held for evals: they take nothing of training and no update until they are released."""

    servers: tuple[str, ...]
    version: int
    """They serve it, and go on to."""
    evals: tuple[tuple[str, int], ...]
    """(name, step) of each."""


class ReleaseServers(CoreCommand, frozen=True, tag="ReleaseServers"):
    """The servers are held no more: the next update brings them up, and then they take training's requests."""

    servers: tuple[str, ...]


class UpdateWeights(CoreCommand, frozen=True, tag="Update"):
    """Bring all servers to the version but those held for evals. It may be the one already served, for a server that joined
    since."""

    version: int
    held: tuple[str, ...] = ()


class TakeCheckpoint(CoreCommand, frozen=True, tag="Checkpoint"):
    """Save the step: the trainer's state (it has no batch), and the core's own, which `Core.saved` holds. Answered by
    CheckpointDone or CheckpointFailed; no other comes before that."""

    step: int


class WarnUser(CoreCommand, frozen=True, tag="Warn"):
    """Something the user should see now; the run goes on."""

    sentence: str


class EndRun(CoreCommand, frozen=True, tag="Stop"):
    """End the run. `ok`: all that it was to train is trained; whether it is saved, `checkpoint` says. No command follows."""

    reason: str
    ok: bool
    checkpoint: int = 0
    """Step of the complete checkpoint that holds all that was trained; 0: there is none."""


AnyCommand = (
    DispatchRollout | CancelAttempt | AnnouncePrompts | PlaceRequest | RefuseRequest | RecordGroupState | TrainOnBatch
    | IgnoreResult | ForgetRollouts | BeginEval | EndEval | HoldServers | ReleaseServers | UpdateWeights | TakeCheckpoint
    | WarnUser | EndRun
)  # fmt: skip

Say = Callable[[AnyCommand], None]
"""Takes a command, in the order in which they are to be done."""
