"""A chat endpoint of a test's own, on its event loop: answers from a script, and remembers requests and connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

Answer = str | tuple[int, str]
"""A message's text, or a status and a body as it stands."""


class Clock:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@dataclass
class JudgeServer:
    script: list[Answer] | Callable[[dict[str, Any]], Answer]
    """Answers one after another (the last one goes on), or made of the request."""
    base_url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    connections: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Further headers of every answer."""
    closes: bool = False
    """Whether it silently closes a connection once it has answered."""
    hold: asyncio.Event | None = None
    """Nothing is answered until this is set."""
    at_once: int = 0
    most_at_once: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length")]
                request = json.loads(await reader.readexactly(int(lengths[0])))
                self.heads.append(head)
                self.requests.append(request)
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                if self.hold is not None:
                    await self.hold.wait()
                self.at_once -= 1
                writer.write(self._answer(request))
                await writer.drain()
                if self.closes:
                    break
        writer.close()

    def _answer(self, request: dict[str, Any]) -> bytes:
        if callable(self.script):
            answer = self.script(request)
        else:
            answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        status, text = answer if isinstance(answer, tuple) else (200, completion(answer))
        more = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        body = text.encode()
        return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body


def completion(text: str) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


@contextlib.asynccontextmanager
async def judging(script: list[Answer] | Callable[[dict[str, Any]], Answer]) -> AsyncIterator[JudgeServer]:
    fake = JudgeServer(script)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield fake
    finally:
        server.close()
