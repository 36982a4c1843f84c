"""The engine's processes as seen from the server: told at once when one ends, and none left behind. No vLLM in here."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import psutil

from telescope.inference.segments import Segments

REAPED_S, LOOK_EVERY_S = 3.0, 0.05
"""Another thread may have reaped a process and not written down its exit code: how long for that, and how often looked."""
WORKER = "VLLM::Worker"
"""How vLLM calls the processes that the engine's process has where a server has several cards."""
ALONE_S = 3.0
"""For the engine's process to end once a worker of it has, as it does by itself; so long is it waited for to say how."""


class Children:
    """Watches the child processes that appeared since it was made. Needs a running event loop."""

    def __init__(self) -> None:
        self._before = {process.pid for process in multiprocessing.active_children()}
        self._watched: dict[int, BaseProcess] = {}  # by process descriptor
        self._workers: dict[int, str] = {}  # what they are called, by process descriptor
        self._lost = ""
        self._segments = Segments()
        self._ended: asyncio.Future[str] | None = None

    def expect_new(self) -> None:
        """Some are about to be forked."""
        self._segments.begin()

    def watch_new(self) -> None:
        self._segments.begun()
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for process in self._new():
            if process.pid is None:
                continue
            descriptor = os.pidfd_open(process.pid)
            self._watched[descriptor] = process
            loop.add_reader(descriptor, self._on_end, descriptor)
            self._segments.note_of(process.pid)
            for worker, name in _workers_of(process.pid):
                self._workers[worker] = name
                loop.add_reader(worker, self._on_worker_end, worker)

    async def first_end(self) -> str:
        """Return when one ends, with a sentence."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._ended)

    def stop_watching(self) -> None:
        for process in self._watched.values():
            if process.pid is not None:
                self._segments.note_of(process.pid)
        for descriptor in (*self._watched, *self._workers):
            asyncio.get_running_loop().remove_reader(descriptor)

    def end_all(self, deadline_s: float) -> None:
        """Wait for them to end by themselves, then kill them and all their descendants. Works after half a start too."""
        deadline = time.monotonic() + deadline_s
        for descriptor in (*self._watched, *self._workers):
            os.close(descriptor)
        self._watched.clear()
        self._workers.clear()
        for process in self._new():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive() and process.pid is not None:
                kill_tree(process.pid)
                process.join(deadline_s)
        self._segments.remove()

    def _new(self) -> list[BaseProcess]:
        return [process for process in multiprocessing.active_children() if process.pid not in self._before]

    def _on_end(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        self._tell(self._watched[descriptor], time.monotonic() + REAPED_S)

    def _tell(self, process: BaseProcess, until: float) -> None:
        if process.exitcode is None and time.monotonic() < until:  # vLLM's thread has just reaped it
            asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._tell, process, until)
        elif self._ended is not None and not self._ended.done():
            how = how_it_ended(process.exitcode)
            if self._lost and (process.exitcode is None or process.exitcode >= 0):  # a signal is reason enough
                how += f", its worker {self._lost} before it: their own words are further up in this log"
            self._ended.set_result(f"the engine's process (pid {process.pid}) {how}; nothing can be served any more")

    def _on_worker_end(self, descriptor: int) -> None:
        """The engine's process ends with its worker, or has ended it: that is waited for."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(descriptor)
        if not self._lost:
            self._lost = self._workers[descriptor]
            loop.call_later(ALONE_S, self._tell_of_worker)

    def _tell_of_worker(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(f"the engine's worker {self._lost} ended; nothing can be served any more")


def _workers_of(pid: int) -> Iterator[tuple[int, str]]:
    """A descriptor of each, and what it is called, e.g. `VLLM::Worker_TP1 (pid 17053)`."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if process.name().startswith(WORKER):
                yield os.pidfd_open(process.pid), f"{process.name()} (pid {process.pid})"


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def how_it_ended(code: int | None) -> str:
    """`was killed by SIGKILL` for -9, as multiprocessing gives exit codes."""
    if code is None:
        return "ended"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
