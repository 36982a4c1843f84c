"""Shared memory by which vLLM's processes talk where a server has several cards, and which stays where they are killed.

Owns the list of it, which outlives the server: it lies in a folder that whoever comes later on this host sweeps
(`runlog.temporary`), the server's next life and the launcher first. Refuses to touch what others made. No vLLM in here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sized
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

from telescope.runlog import temporary

SHARED = Path("/dev/shm")
SEGMENTS = (f"{SHARED}/psm_", f"{SHARED}/vllm_dist_")

log = logging.getLogger(__name__)


class Segments:
    """Those of one engine's processes, from its start on."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._register: Any = None

    def begin(self) -> None:
        """Before the processes are forked: they note what Python makes for them at once, so that no instant is uncovered."""
        folder, register = temporary.make(), resource_tracker.register

        def noting(name: Sized, rtype: str) -> None:
            if rtype == "shared_memory":
                _note(folder, [SHARED / str(name).lstrip("/")])
            register(name, rtype)

        self._folder, self._register = folder, register
        resource_tracker.register = noting

    def begun(self) -> None:
        """The processes are there, and what this one makes from now on is its own affair."""
        if self._register is not None:
            resource_tracker.register, self._register = self._register, None

    def note_of(self, pid: int) -> None:
        """Those that the process and all below it have in their address space: libraries make some too."""
        if self._folder is not None and (found := segments_of(pid)):
            _note(self._folder, found)

    def remove(self) -> None:
        """The processes have ended."""
        self.begun()
        if self._folder is not None:
            temporary.discard(self._folder)
            self._folder = None


def segments_of(pid: int) -> set[Path]:
    """Those that the process and all below it have in their address space."""
    found: set[Path] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(OSError):
                lines = (line.split(maxsplit=5) for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines())
                found |= {Path(line[5]) for line in lines if len(line) == 6 and line[5].startswith(SEGMENTS)}
    return found


def _note(folder: Path, files: Iterable[Path]) -> None:
    """An engine is not given up for the want of a note."""
    try:
        temporary.note(folder, files)
    except OSError as error:
        log.warning("shared memory of this server would stay in %s if it is killed: %s", SHARED, error)
