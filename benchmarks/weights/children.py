"""The processes of a weight benchmark, asked by lines of JSON: an order on stdin, its answer on stdout."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

ANSWER_S, END_S = 600.0, 20.0
LONGEST_LINE = 2**26
"""A manifest names every tensor of a model."""


class Child:
    """A process of one of this folder's modules. One order at a time; its first line says, unasked, that it is ready."""

    def __init__(self, module: str, process: asyncio.subprocess.Process) -> None:
        self._module, self._process = module, process

    @classmethod
    async def start(cls, module: str, asked: dict[str, Any], environment: dict[str, str]) -> Child:
        """`asked`: its one argument, as JSON."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", module, json.dumps(asked))
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment, limit=LONGEST_LINE)
        return cls(module, process)

    async def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        """Raises `RuntimeError` where the process has ended instead, `TimeoutError` after ten minutes."""
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended; its words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b'{"stop": true}\n')
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()


async def start_trainer(asked: dict[str, Any], environment: dict[str, str]) -> Child:
    """The sending process (trainer.py)."""
    return await Child.start("benchmarks.weights.trainer", asked, environment)


async def start_server(asked: dict[str, Any], environment: dict[str, str]) -> Child:
    """A serving process (server.py)."""
    return await Child.start("benchmarks.weights.server", asked, environment)
