"""A TCP relay in front of the hub whose connections a test can cut, or hold still, at will."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.wire.discovery import HubAddress


class Proxy:
    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0

    @classmethod
    async def before(cls, run: RunDirectory) -> Proxy:
        """Stand between: hub.json names the proxy from now on."""
        address = msgspec.json.decode(run.hub_json.read_bytes(), type=HubAddress)
        host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
        proxy = cls(host, int(port))
        proxy._server = await asyncio.start_server(proxy._accept, "127.0.0.1", 0)
        here = proxy._server.sockets[0].getsockname()[1]
        moved = msgspec.structs.replace(address, endpoint=f"tcp://127.0.0.1:{here}")
        write_atomically(run.hub_json, msgspec.json.encode(moved).decode(), 0o600)
        return proxy

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, there_writer}
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(4096):
                sink.write(data)
                await sink.drain()
        sink.close()

    def cut(self) -> None:
        """Reset every connection: what is in the buffers is lost."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
