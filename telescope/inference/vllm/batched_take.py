"""Asks an engine's workers for what they keep of ended requests. No torch, no vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Call = Callable[..., Awaitable[list[Any]]]
"""Of a method of all workers, by name; the driver's answer is the first."""
QUESTION_BYTES = 64 * 2**20
"""Most that one question asks for, unless one request alone has more: the engine's step waits while it is copied."""


class BatchedTake:
    """Used from one event loop. All who come while a question is under way are asked for by the next, up to
    `QUESTION_BYTES`: each costs the engine part of a step."""

    def __init__(self, call: Call, method: str) -> None:
        self._call = call
        self._method = method
        self._wanted: dict[str, tuple[tuple[int, ...], int]] = {}
        self._found: dict[str, memoryview | None] = {}
        """Of those who wait, by vLLM's name."""
        self._asking: asyncio.Task[None] | None = None

    async def take(self, name: str, which: tuple[int, ...], nbytes: int) -> memoryview:
        """What the method gives of a request: so many bytes, or fewer where the workers keep nothing. `which`: its arguments
        behind the name."""
        self._wanted[name] = which, nbytes
        self._found[name] = None
        try:
            while (found := self._found[name]) is None:
                if self._asking is None:
                    self._asking = asyncio.create_task(self._ask())
                    self._asking.add_done_callback(_heard)
                await asyncio.shield(self._asking)
        finally:
            del self._found[name]
            self._wanted.pop(name, None)
        return found

    def _take_turn(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Those whom the next question is about, the first to come first; who is left comes with the one after it."""
        turn, asked = dict[str, tuple[tuple[int, ...], int]](), 0
        for name, (which, nbytes) in self._wanted.items():
            if turn and asked + nbytes > QUESTION_BYTES:
                break
            turn[name] = which, nbytes
            asked += nbytes
        for name in turn:
            del self._wanted[name]
        return turn

    async def _ask(self) -> None:
        try:
            wanted = self._take_turn()
            (answer, *_) = await self._call(self._method, [[name, *which] for name, (which, _) in wanted.items()])
            rest = memoryview(answer)
            for name, (_, nbytes) in wanted.items():
                if name in self._found:
                    self._found[name] = rest[:nbytes]
                rest = rest[nbytes:]
        finally:
            self._asking = None


def _heard(task: asyncio.Task[None]) -> None:
    """Its error is told to those who wait; where nobody does any more, asyncio would log it as lost."""
    task.cancelled() or task.exception()
