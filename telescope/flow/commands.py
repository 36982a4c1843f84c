"""What is to be done. Orders of the core to the orchestrator, which performs them; ids and scalars only."""

from __future__ import annotations

import msgspec

from telescope.records import PromptRef, RolloutOrder


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all commands; the tag is the class name."""


class Run(Command, frozen=True):
    """Send the rollout to the worker (the core has counted the worker's credit)."""

    worker: str
    order: RolloutOrder


class Cancel(Command, frozen=True):
    """Stop a running rollout: tell its worker, abort its requests on the servers. No RolloutDone of this attempt counts any
    more. The worker still owes its order an answer (RolloutFailed, or a late RolloutDone): only that frees lane and credit.
    Repeated once if no answer comes, since a cancel can be lost on the wire."""

    worker: str
    rollout_id: int
    attempt: int
    reason: str


class Place(Command, frozen=True):
    """Send the waiting request to the server, from the start where a server that had it was lost. A smaller `priority` goes
    first."""

    request_id: str
    server: str
    priority: int


class Refuse(Command, frozen=True):
    """Answer the request with GenerateFailed: its rollout no longer counts or has ended, or its server is lost. Never said of
    a request that a living server holds: that one answers."""

    request_id: str
    cause: str


class Prefetch(Command, frozen=True):
    """Tell all workers that these prompts are likely to be sent out next. A hint, which may be lost."""

    prompts: tuple[PromptRef, ...]


class GroupState(Command, frozen=True):
    """A group has passed into a new state: one row of the run directory's groups stream."""

    group_id: int
    state: str
    reason: str
    version: int
    """v_start once known, else -1."""


class Train(Command, frozen=True):
    """Train on the batch. `baseline_group_ids` were discarded for equal rewards since the previous batch closed: they count
    in batch statistics of the advantages, never in the loss."""

    step: int
    group_ids: tuple[int, ...]
    rollout_ids: tuple[tuple[int, ...], ...]
    """Surviving rollouts of each group, in sample order."""
    baseline_group_ids: tuple[int, ...]
    baseline_rollout_ids: tuple[tuple[int, ...], ...]


class Ignore(Command, frozen=True):
    """The RolloutDone just reported does not count (cancelled, superseded, seen before): its arrays do not go to the shelf."""

    rollout_id: int
    attempt: int


class Forget(Command, frozen=True):
    """These rollouts will never be asked for again: the shelf drops their arrays."""

    rollout_ids: tuple[int, ...]


class Update(Command, frozen=True):
    """Bring all servers to the version. It may be the one already served, for a server that joined since."""

    version: int


class Checkpoint(Command, frozen=True):
    """Save the step: the trainer's state (it has no batch), and the core's own, which `Core.saved` holds. Answered by
    CheckpointDone or CheckpointFailed; no other comes before that."""

    step: int


class Warn(Command, frozen=True):
    """Something the user should see now; the run goes on."""

    sentence: str


class Stop(Command, frozen=True):
    """End the run. `ok`: all that it was to train is trained; whether it is saved, `checkpoint` says. No command follows."""

    reason: str
    ok: bool
    checkpoint: int = 0
    """Step of the complete checkpoint that holds all that was trained; 0: there is none."""


AnyCommand = Run | Cancel | Prefetch | Place | Refuse | GroupState | Train | Ignore | Forget | Update | Checkpoint | Warn | Stop
