"""The engine's processes as seen from the server: it is told at once when one ends, each call to a dead or hanging engine
raises `EngineDead` with how it went, and nothing is left behind.

Where a server has several cards, vLLM's processes talk by shared memory, which stays where they are killed. The list of it
outlives the server: it lies in a folder that whoever comes later on this host sweeps (`runlog.temporary`), the restarted
server and the launcher first. Refuses to touch what others made.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sized
from contextlib import asynccontextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import psutil

from telescope.inference.engine import EngineDead
from telescope.runlog import temporary

REAPED_S, LOOK_EVERY_S = 3.0, 0.05
"""Another thread may have reaped a process and not written down its exit code: how long for that, and how often looked."""
WORKER = "VLLM::Worker"
"""How vLLM calls the processes that the engine's process has where a server has several cards."""
ALONE_S = 3.0
"""For the engine's process to end once a worker of it has, as it does by itself; so long is it waited for to say how."""


class EngineProcesses:
    """Watches the child processes that appeared since it was made. Needs a running event loop."""

    def __init__(self) -> None:
        self._before = {process.pid for process in multiprocessing.active_children()}
        self._watched: dict[int, BaseProcess] = {}  # by process descriptor
        self._workers: dict[int, str] = {}  # what they are called, by process descriptor
        self._lost = ""
        self._segments = EngineSharedMemory()
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


SHARED = Path("/dev/shm")
SEGMENTS = (f"{SHARED}/psm_", f"{SHARED}/vllm_dist_")

log = logging.getLogger(__name__)


class EngineSharedMemory:
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


TOLD_S = 5.0
"""From vLLM's word that its engine is dead, or that an order failed, to the end of the process being seen."""
SAYS_SO = "vLLM's engine says that it is dead; its own words are further up in this log"


class EngineLife(Protocol):
    async def dead(self) -> str:
        """Return when the engine's process ends, with a sentence."""


P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=EngineLife)


def raise_when_dead(
    method: Callable[Concatenate[M, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[M, P], Coroutine[Any, Any, T]]:
    """Break the call off when the engine's process ends, which vLLM does not do for all that it has been asked, and put its
    EngineDeadError, which knows no reason, in the words of `dead`."""

    @functools.wraps(method)
    async def call(self: M, /, *arguments: P.args, **named: P.kwargs) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError

        work, dying = asyncio.create_task(method(self, *arguments, **named)), asyncio.create_task(self.dead())
        try:
            await asyncio.wait({work, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise EngineDead(dying.result())
            return work.result()
        except EngineDeadError as error:
            raise EngineDead(await _why(self) or SAYS_SO) from error
        except Exception as error:
            # vLLM's word for an order that failed in the engine, the death of a worker process among other reasons: the engine
            # then ends in a moment
            if type(error) is Exception and (why := await _why(self)):
                raise EngineDead(f"{why} ({error})") from error
            raise
        finally:
            dying.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=TOLD_S)

    return call


async def _why(engine: EngineLife) -> str:
    """Empty where its process lives on."""
    try:
        async with asyncio.timeout(TOLD_S):
            return await engine.dead()
    except TimeoutError:
        return ""


@asynccontextmanager
async def answer_within(limit_s: float, what: str) -> AsyncIterator[None]:
    """What is asked of the engine within must be answered in time. Raises `EngineDead`: it hangs."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise EngineDead(f"the engine has not answered {what} within {limit_s:g} s: it hangs") from error
