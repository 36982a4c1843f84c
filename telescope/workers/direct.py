"""A worker's way straight to the servers (`wire.direct=true`): ask the orchestrator for a place, bring the request to the door.

    AskPlace ─▶ orchestrator ─ Ticket ─▶ Generate to the server's door ─▶ Completion

Owns one link a server, opened when the first ticket for it comes, and closed once it is lost, revoked, or the worker ends. A
request whose link is lost fails; its rollout is tried again as after any failure of the infrastructure. Refuses to choose a
server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from telescope.runlog.layout import RunDirectory
from telescope.wire.link import Link, LinkLost
from telescope.wire.messages import Completion, DoorAddress, Generate, GenerateFailed, Hello, Stop, Ticket

log = logging.getLogger(__name__)

CONNECT_S = 10.0
"""For a door to answer. Its server has said where it is and lives: a place that is not taken costs it a lane."""

UNREACHABLE = (OSError, zmq.ZMQError)
"""What a link raises is the first; so is a key that can't be read, or no descriptor left for another socket."""
Answer = tuple[Completion | GenerateFailed, tuple[np.ndarray, ...]]


class DoorLost(ConnectionError):
    """The direct way to a server is closed. The text names the server and the reason."""


class _Way:
    """The link to one door, and who waits for an answer there."""

    def __init__(self, server: str, door: DoorAddress, opening: asyncio.Task[Link]) -> None:
        self.server, self.door, self.opening = server, door, opening
        self.waiting: dict[str, asyncio.Future[Answer]] = {}
        self.reading: asyncio.Task[None] | None = None
        self.over = ""

    def end(self, why: str) -> None:
        """Whoever waits here has failed; a new ticket opens a new way."""
        self.over = self.over or why
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(DoorLost(f"the direct way to {self.server} is closed: {self.over}"))

    async def read(self, link: Link) -> None:
        try:
            while not self.over:
                delivery = await link.received()
                match delivery.body:
                    case Completion(request_id=request_id) | GenerateFailed(request_id=request_id) as body:
                        answer = self.waiting.get(request_id)
                        if answer is not None and not answer.done():
                            answer.set_result((body, delivery.arrays))
                    case Stop(reason=reason):
                        self.end(reason)
        except LinkLost as error:
            self.end(str(error))


class Doors:
    """`hello`: makes this worker's hello for a door, a new incarnation each time. All methods belong to one event loop."""

    def __init__(self, run_directory: RunDirectory, hello: Callable[[], Hello]) -> None:
        self._run_directory, self._hello = run_directory, hello
        self._ways: dict[str, _Way] = {}
        self._closing: set[asyncio.Task[Any]] = set()

    async def bring(self, ticket: Ticket, request: Generate, ids: np.ndarray) -> Answer:
        """The server's answer. Raises `DoorLost`."""
        way = self._way(ticket)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        way.waiting[request.request_id] = answer
        try:
            link = await asyncio.shield(way.opening)
            if way.reading is None:
                way.reading = asyncio.create_task(way.read(link))
            if not way.over:
                link.send(request, (ids,))
            else:
                way.end(way.over)
            return await answer
        except UNREACHABLE as error:
            self._close(way, str(error))
            raise DoorLost(f"the direct way to {way.server} is closed: {error}") from error
        finally:
            del way.waiting[request.request_id]
            if answer.done() and not answer.cancelled():
                answer.exception()  # it is raised above, or nobody waits for it any more

    def revoke(self, server: str, why: str) -> None:
        """The server is lost: its door leads nowhere."""
        way = self._ways.get(server)
        if way is not None:
            self._close(way, why)

    async def close(self) -> None:
        """Leave all doors; at most a few seconds."""
        for way in tuple(self._ways.values()):
            self._close(way, "the worker ends")
        if self._closing:
            await asyncio.wait(tuple(self._closing), timeout=CONNECT_S / 2)

    def _way(self, ticket: Ticket) -> _Way:
        way = self._ways.get(ticket.server)
        if way is not None and (way.over or way.door != ticket.door):
            self._close(way, way.over or f"{ticket.server} has another door now")
            way = None
        if way is None:
            opening = asyncio.create_task(self._open(ticket))
            way = self._ways[ticket.server] = _Way(ticket.server, ticket.door, opening)
        return way

    async def _open(self, ticket: Ticket) -> Link:
        return await asyncio.to_thread(
            Link.reach, self._run_directory, self._hello(), ticket.server, ticket.door, deadline_s=CONNECT_S
        )

    def _close(self, way: _Way, why: str) -> None:
        if self._ways.get(way.server) is way:
            del self._ways[way.server]
            task = asyncio.create_task(self._leave(way))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        way.end(why)

    async def _leave(self, way: _Way) -> None:
        try:
            link = await way.opening
        except UNREACHABLE as error:
            log.info("%s: %s", way.server, error)
            return
        if way.reading is not None:
            way.reading.cancel()
        await asyncio.to_thread(link.close, "")
