"""Which process watches a run: `holder.json`, so that others can tell whether the run goes on, and ask it to stop."""

from __future__ import annotations

import os
import select
import signal
import socket
from pathlib import Path
from typing import Literal

import msgspec

from telescope.runlog.files import DamagedFile, read_json
from telescope.runlog.layout import RunDirectory, write_atomically

HolderState = Literal["alive", "gone", "elsewhere"]
StopResult = Literal["ended", "late", "gone"]
"""It ended after it was asked; it had not yet when time was up; it was not there any more."""


class Holder(msgspec.Struct, frozen=True):
    """`started`: the process's start in clock ticks since boot. A later process may get the same number, not the same start.
    `directory`: the run's, as that process saw it; empty in runs of before it was written down."""

    host: str
    pid: int
    started: int
    directory: str = ""


def hold(run: RunDirectory) -> None:
    """Write down that this process watches the run."""
    holder = Holder(socket.gethostname(), os.getpid(), _start_ticks(os.getpid()) or 0, str(run.path.resolve()))
    write_atomically(run.holder_json, msgspec.json.encode(holder).decode() + "\n", mode=0o600)


def read_holder(run: RunDirectory) -> Holder | None:
    """None where the run has none, as those that a batch system has not begun. Raises `DamagedFile`."""
    try:
        return read_json(run.holder_json, Holder)
    except FileNotFoundError:
        return None


def find_original(holder: Holder, run: RunDirectory) -> Path | None:
    """The directory that the process watches, where `run` is a copy of it that somebody made while the run went on."""
    original = RunDirectory(Path(holder.directory))
    try:
        copied = bool(holder.directory) and not original.path.samefile(run.path) and read_holder(original) == holder
    except (OSError, DamagedFile):  # moved since, or seen from another host
        return None
    return original.path if copied else None


def find_state(holder: Holder, run: RunDirectory) -> HolderState:
    """Whether the process watches `run`; a copy is watched by none. `elsewhere`: on another host, of which nothing is known."""
    if find_original(holder, run) is not None:
        return "gone"
    if holder.host != socket.gethostname():
        return "elsewhere"
    return "alive" if _start_ticks(holder.pid) == holder.started else "gone"


def stop(holder: Holder, seconds: float) -> StopResult:
    """Ask as Ctrl-C does, one that is stopped (Ctrl-Z) too, and wait for its end. Call it on the holder's own host."""
    try:
        descriptor = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return "gone"
    try:
        if _start_ticks(holder.pid) != holder.started:  # the descriptor holds the number: it can't be another's from here on
            return "gone"
        for number in (signal.SIGINT, signal.SIGCONT):
            signal.pidfd_send_signal(descriptor, number)
        return "ended" if select.select([descriptor], [], [], seconds)[0] else "late"
    except ProcessLookupError:
        return "gone"
    finally:
        os.close(descriptor)


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat (proc(5)); the name before it may hold spaces and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])
