"""What orchestrator and supervisor tell each other about the run's servers, through small files in `control/`.

The supervisor is no peer on the wire, so a file is its mailbox: the orchestrator asks it to *fence* a process (kill it and all
below it, whatever it does), and it notes how a server has ended that it starts again, so that the orchestrator need not wait
for the silence. Owns what the files say; refuses to decide anything.
"""

from __future__ import annotations

import contextlib
from typing import TypeVar

import msgspec

from telescope.records import Record
from telescope.runlog.layout import RunDirectory, write_atomically


class Fence(Record):
    """Orchestrator to supervisor: this process of the name must not run on, whatever state it is in."""

    pid: int
    reason: str


class Ended(Record):
    """Supervisor to orchestrator: how the last life of a server that ended did so. Another one follows."""

    life: int
    """Counts from 1: starts of the process in this run."""
    pid: int
    how: str
    """E.g. `server-0 was killed by signal 9 (SIGKILL).`"""


R = TypeVar("R", Fence, Ended)
ENDED = "ended-"


def ask_to_fence(run: RunDirectory, process: str, fence: Fence) -> None:
    _write(run, process, fence)


def note_end(run: RunDirectory, process: str, ended: Ended) -> None:
    _write(run, process, ended)


def take_fence(run: RunDirectory, process: str) -> Fence | None:
    """The request, which is then gone; None where there is none."""
    fence = _read(run, process, Fence)
    if fence is not None:
        run.fence(process).unlink(missing_ok=True)
    return fence


def ends(run: RunDirectory) -> dict[str, Ended]:
    """All notes of the supervisor, by server: only servers that have ended at least once have one. None where the file system
    can't say: an error of it may pass, and who asks looks again."""
    try:
        names = [path.stem.removeprefix(ENDED) for path in run.control.glob(f"{ENDED}*.json")]
    except OSError:
        return {}
    return {name: ended for name in names if (ended := _read(run, name, Ended)) is not None}


def open_run(run: RunDirectory) -> None:
    """All parts are there: from now on a server that dies is worth another start."""
    write_atomically(run.underway, "", durable=False)


def close_run(run: RunDirectory) -> None:
    """The run ends: whatever dies now stays dead. A disk that refuses even this has said so elsewhere."""
    with contextlib.suppress(OSError):
        run.underway.unlink(missing_ok=True)


def _write(run: RunDirectory, process: str, record: Fence | Ended) -> None:
    path = run.fence(process) if isinstance(record, Fence) else run.ended(process)
    write_atomically(path, msgspec.json.encode(record).decode(), durable=False)


def _read(run: RunDirectory, process: str, kind: type[R]) -> R | None:
    """A file that is no such record counts as none: it is written beside and renamed, so it can only be somebody else's."""
    path = run.fence(process) if kind is Fence else run.ended(process)
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
