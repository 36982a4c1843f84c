"""What a supervisor is given and what it gives: patience, surroundings, the conclusion, and exit.json. Data; node.py acts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from telescope._launch import child
from telescope._launch.causes import Cause
from telescope._launch.plan import ProcessPlan
from telescope._launch.processes import Ending


@dataclass(frozen=True)
class Patience:
    """Seconds that processes get. Those after a failure, and those after Ctrl-C, come to less than 10 together."""

    stop_s: float = 6.5
    """The orchestrator, to finish and to tell its peers, after Ctrl-C."""
    follow_s: float = 1.5
    """Its peers after it, in both cases."""
    leave_s: float = 20.0
    """The peers, after a run that ended by itself."""
    close_s: float = 120.0
    """The orchestrator, to close its files and mirrors, when every peer has left."""
    grace_s: float = 4.0
    """The orchestrator, when another process has failed; the rest, when the orchestrator has."""
    hurry_s: float = 0.5
    """Between SIGTERM and SIGKILL, for those who did not follow the orchestrator after all that."""
    shim_s: float = 1.0
    """Shims beyond all that, before they get `kill`, and again before they are killed themselves."""
    node_s: float = 2.0
    """The same for what another node is told and says, on the way."""
    fence_s: float = 2 * child.KILL_WAIT_S
    """The shim of a fenced server, to end all that it has; then the shim itself is killed and the supervisor sweeps up."""


PATIENCE = Patience()


@dataclass(frozen=True)
class Surroundings:
    """What a batch system adds to a supervisor's life; on a plain host nothing."""

    carrier: Callable[[ProcessPlan], tuple[str, ...]] = lambda _: ()
    """The command that carries a process to its node; empty: it runs here."""
    warning: int | None = None
    """The signal that says that the time is nearly up."""
    warned_of: str = ""
    """What the run's summary then gives as its reason, e.g. `walltime`."""
    warned_before: Callable[[], bool] = lambda: False
    """Whether the warning came before the supervisor could hear it."""
    stop_s: float = 6.5
    """What the orchestrator gets to stop after the warning."""


PLAIN_HOST = Surroundings()


@dataclass(frozen=True)
class Conclusion:
    """How a supervised run ended."""

    code: int
    warned: bool
    """It was stopped because of the warning."""
    interrupted: int | None
    """The signal that stopped it else."""
    carrier_lost: str
    """The process whose carrier failed rather than itself, if that ended the run; else empty."""


def exit_record(
    code: int, cause: Cause | None, endings: dict[str, Ending], lives: dict[str, int], interrupted: int | None
) -> str:
    """What `exit.json` says: the exit code of the run, the cause, how each process ended, which were started again, and the
    signal that the supervisor got, if any."""
    ended = {name: ending.status for name, ending in endings.items()}
    restarts = {name: life - 1 for name, life in lives.items()}
    record = {"exit_code": code, "cause": cause, "processes": ended, "restarts": restarts, "interrupted": interrupted}
    return msgspec.json.format(msgspec.json.encode(record)).decode()
