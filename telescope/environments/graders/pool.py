"""Graders that may hang, in processes of their own: `await grade(function, answer, truth)`.

    play ─grade─▶ an idle process, or a new one ─▶ value
                        └─ over its limit, dead or cancelled: killed; the next call gets a new one

A thread can be neither stopped nor given a signal.alarm, so a symbolic comparison of what a model wrote belongs here. The
function lives in a module, its arguments and its value are what JSON can say (a tuple arrives as a list); of the worker's
environment variables it sees those of env_allowlist.py and Python's own paths, and no keys. A worker enters
`open_graders()` once; its processes start when they are needed. Where none are open, one is made for that call.
Refuses to decide what an answer is worth: a call over its limits raises, and an environment that knows better catches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from telescope.environments.env_allowlist import pick_variables
from telescope.environments.failures import GraderError
from telescope.environments.graders.process import MAX_FRAME

CLOCK_FACTOR = 10.0
"""On the clock a call may take so many times its processor time: the machine may be busy."""
START_LIMIT_S = 180.0
"""For the start of a process and the imports of a function's module."""
ENDING_S = 10.0
"""For the end of a process that has closed its pipes."""
MEMORY_MB = 2048
CALLS_A_PROCESS = 2000  # then a new one: libraries cache for ever
MAX_WAITING = 10_000
_FOR_PYTHON = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")


class GraderOverrun(GraderError):
    """The call itself used up its processor time or its memory, whatever else the machine did: the arguments are to blame."""


class GraderDied(Exception):
    """The process ended during a call, with this exit status."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"its process ended with status {status}")
        self.status = status


class GraderMemoryFull(Exception):
    """The call ran out of memory in a process that may have been full before it."""


async def grade(function: Callable[..., Any], *arguments: Any, limit_s: float = 5.0, clock_limit_s: float | None = None) -> Any:
    """The value of a module-level function, run in the main thread of another process within `limit_s` s of processor time.

    Raises `GraderOverrun` where the call used up its time or memory, `GraderError` where it raised, where its process died, or
    where `clock_limit_s` (default: `CLOCK_FACTOR` times `limit_s`) went by on the clock; `TypeError` where it can't be handed
    over at all.
    """
    call = GraderCall.of(function, arguments, limit_s, CLOCK_FACTOR * limit_s if clock_limit_s is None else clock_limit_s)
    open_ones = _OPEN.get()
    if open_ones is not None:
        return await open_ones.call(call)
    async with open_graders(1) as only:
        return await only.call(call)


@contextlib.asynccontextmanager
async def open_graders(size: int | None = None, memory_mb: int = MEMORY_MB) -> AsyncIterator[GraderPool]:
    """Up to `size` processes (default: a core each, at most 4) for every `grade` below; they end with the block."""
    graders = GraderPool(size or min(4, os.cpu_count() or 1), memory_mb)
    token = _OPEN.set(graders)
    try:
        yield graders
    finally:
        _OPEN.reset(token)
        await graders.close()


@dataclass(frozen=True)
class GraderCall:
    """One call as it travels."""

    name: str
    frame: bytes
    limit_s: float
    clock_limit_s: float

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: tuple[Any, ...], limit_s: float, clock_limit_s: float) -> GraderCall:
        """Raises `TypeError` for what has no name in a module, or no form in JSON."""
        name = f"{function.__module__}.{function.__qualname__}"
        module = sys.modules.get(function.__module__)
        if "<" in function.__qualname__ or module is None or function.__module__ == "__main__":
            raise TypeError(f"{name} can't be graded in another process: define it at the top of a module")
        message = {
            "module": function.__module__,
            "file": getattr(module, "__file__", None),
            "function": function.__qualname__,
            "arguments": arguments,
            "cpu_s": limit_s,
        }
        try:
            text = json.dumps(message).encode()
        except TypeError as error:
            raise TypeError(f"arguments of {name} must be numbers, texts, lists and dicts of them: {error}") from error
        return cls(name, len(text).to_bytes(4, "big") + text, limit_s, clock_limit_s)


class GraderPool:
    """A pool of grader processes on one event loop. Calls wait in order for one of `size` processes."""

    def __init__(self, size: int, memory_mb: int = MEMORY_MB) -> None:
        self._memory_mb = memory_mb
        self._free = asyncio.Semaphore(size)
        self._idle: list[GraderProcess] = []
        self._all: set[GraderProcess] = set()
        self._waiting = 0
        self._closed = False
        self.started = 0
        """Processes ever started."""

    @property
    def alive(self) -> list[int]:
        """Process ids."""
        return sorted(process.pid for process in self._all if process.alive)

    async def call(self, call: GraderCall) -> Any:
        """See `grade`."""
        if self._waiting >= MAX_WAITING:
            raise GraderError(f"{call.name}: {MAX_WAITING} calls wait for a grader process already")
        self._waiting += 1
        try:
            async with self._free:
                try:
                    return await self._call(call)
                except (
                    GraderMemoryFull
                ):  # once more in a fresh one, so that its forerunners' rubbish is not held against an answer
                    return await self._call(call, fresh=True)
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """End all processes, busy or not."""
        self._closed = True
        for process in self._all:
            process.kill()
        await asyncio.gather(*(process.wait_until_ended() for process in self._all))
        self._all.clear()
        self._idle.clear()

    async def _call(self, call: GraderCall, fresh: bool = False) -> Any:
        process = await self._take(fresh)
        used_before = process.calls > 0
        usable = False
        try:
            reply = await process.call(call)
            usable = reply.get("overrun") != "memory"
        except GraderDied as died:
            if -(died.status or 0) in _CPU_SIGNALS:
                raise GraderOverrun(f"{call.name}: it used more than {call.limit_s:g} s of processor time") from None
            raise GraderError(f"{call.name}: {died}") from None
        except TimeoutError:
            raise GraderError(f"{call.name}: no answer within {call.clock_limit_s:g} s on the clock") from None
        finally:
            self._give_back(process, usable)
        if "value" in reply:
            return reply["value"]
        if reply["overrun"] == "memory" and used_before:
            raise GraderMemoryFull
        raise (GraderOverrun if reply["overrun"] else GraderError)(f"{call.name}: {reply['error']}")

    async def _take(self, fresh: bool) -> GraderProcess:
        while self._idle and not fresh:
            process = self._idle.pop()
            if process.alive:
                return process
            self._all.discard(process)
        process = await GraderProcess.start(self._memory_mb)
        self.started += 1
        if self._closed:  # while it started
            process.kill()
            await process.wait_until_ended()
            raise GraderError("the worker is leaving")
        self._all.add(process)
        return process

    def _give_back(self, process: GraderProcess, usable: bool) -> None:
        if usable and process.calls < CALLS_A_PROCESS:
            self._idle.append(process)
        else:
            process.kill()
        self._all = {known for known in self._all if known.alive or known is process}


_OPEN: ContextVar[GraderPool | None] = ContextVar("open_graders", default=None)
_CPU_SIGNALS = (signal.SIGVTALRM, signal.SIGXCPU)


class GraderProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.calls = 0

    @classmethod
    async def start(cls, memory_mb: int) -> GraderProcess:
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "telescope.environments.graders.process", str(memory_mb)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**pick_variables(*_FOR_PYTHON), "OMP_NUM_THREADS": "1"},  # each thread of a pool would reserve memory
            )
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def call(self, call: GraderCall) -> dict[str, Any]:
        """The reply. Raises `GraderDied` and `TimeoutError`; after either, and after a cancellation, the process is spent."""
        self.calls += 1
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(call.frame)
            async with asyncio.timeout(START_LIMIT_S):
                await self._process.stdin.drain()
                first = await self._reply()
            if "begun" not in first:  # the function was not found
                return first
            async with asyncio.timeout(call.clock_limit_s):
                return await self._reply()
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.wait_until_ended()
            raise GraderDied(self._process.returncode) from None

    async def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        length = int.from_bytes(await self._process.stdout.readexactly(4), "big")
        if length > MAX_FRAME:  # no answer of ours: the call has got at the pipe
            self.kill()
            raise ConnectionError(f"a value of {length} bytes")
        reply: dict[str, Any] = json.loads(await self._process.stdout.readexactly(length))
        return reply

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait_until_ended(self) -> None:
        """Wait until it is gone; it was killed, or closed its pipes and is killed if that is not its end."""
        for _ in range(2):
            try:
                async with asyncio.timeout(ENDING_S):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
