"""A small HTTP/1.1 server on the worker's event loop, for agent programs on the same machine; h11 speaks the protocol.

    connection ─▶ head ─▶ turn_away(path) ─▶ request, whole ─▶ answer(request) ─▶ response, whole ─▶ next request

Owns limits of size and time, and the end of a request whose client has gone: its answer is cancelled. Any user of the machine
can connect: until a connection has asked for a path that is served, nothing but a head is read of it, in a short time, and of
such connections there are few. Refuses to know what is asked for. Loopback only: whoever knows a path may generate.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import h11

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 32 * 1024 * 1024
FIRST_HEAD_S = 15.0
"""For the first head of a connection."""
IDLE_S = 300.0
"""A connection without another request is closed after this."""
MAX_STRANGERS = 512
"""Connections that have asked for nothing that is served yet. One more closes the oldest: a program's head comes at once."""
BODY_S = 60.0
"""For a request to arrive whole once it has begun, and for a response to be taken."""
READ = 64 * 1024
TOO_LARGE = b'{"error": {"message": "the request is too large", "type": "invalid_request_error", "param": null, "code": null}}'


@dataclass(frozen=True)
class HttpRequest:
    method: str
    path: str
    body: bytes


@dataclass(frozen=True)
class HttpResponse:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


Answer = Callable[[HttpRequest], Coroutine[None, None, HttpResponse]]
"""Raises nothing but cancellation."""
TurnAway = Callable[[str], HttpResponse | None]
"""What a request gets by its path alone, its body unread; None where it is to be answered."""


class ClientGone(Exception):
    """The client has closed its connection, or says what is not HTTP."""


class BodyTooLarge(Exception):
    """A body of more than MAX_BODY_BYTES."""


class HttpServer:
    """Listens on a port of its own choosing. All methods belong to one event loop."""

    def __init__(self, server: asyncio.Server, connections: set[asyncio.Task[None]]) -> None:
        self._server, self._connections = server, connections
        self.port: int = server.sockets[0].getsockname()[1]

    @staticmethod
    async def start(answer: Answer, turn_away: TurnAway, host: str = LOOPBACK) -> HttpServer:
        """Raises OSError where no port can be had."""
        connections: set[asyncio.Task[None]] = set()
        strangers: dict[asyncio.Task[None], None] = {}  # the oldest first

        async def handle_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            if len(strangers) >= MAX_STRANGERS:
                oldest = next(iter(strangers))
                del strangers[oldest]
                oldest.cancel()
            strangers[task] = None
            connection = HttpConnection(reader, writer, answer, turn_away, lambda: strangers.pop(task, None))
            try:
                await connection.serve()
            except asyncio.CancelledError:  # `close`, or too many; asyncio's own callback would complain of it
                pass
            finally:
                strangers.pop(task, None)
                connections.discard(task)
                writer.close()

        return HttpServer(await asyncio.start_server(handle_connection, host, 0, limit=READ), connections)

    async def close(self) -> None:
        """Listen no more, and end every connection with what it is doing."""
        self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


class HttpConnection:
    """`known` is called once it has asked for what is served."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Answer,
        turn_away: TurnAway,
        known: Callable[[], object],
    ) -> None:
        self._reader, self._writer, self._answer, self._turn_away = reader, writer, answer, turn_away
        self._known = known
        self._early = b""
        self._wants_body = True
        """Of the latest request: not where it is HEAD."""
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def serve(self) -> None:
        try:
            limit_s = FIRST_HEAD_S
            while await self._serve_one(limit_s):
                self._http.start_next_cycle()
                limit_s = IDLE_S
        except (ClientGone, ConnectionError, TimeoutError, h11.ProtocolError) as error:
            log.debug("a connection of an agent program has ended: %s", error)

    async def _serve_one(self, limit_s: float) -> bool:
        """Serve one request, whose head comes within `limit_s`. Whether the connection may have another."""
        async with asyncio.timeout(limit_s):
            head = await self._next_event()
        if not isinstance(head, h11.Request):
            return False
        self._wants_body = head.method != b"HEAD"
        path = head.target.decode("ascii", "replace")
        if (refusal := self._turn_away(path)) is not None:
            await self._send(refusal)
            return False
        self._known()
        try:
            async with asyncio.timeout(BODY_S):
                body = await self._read_body()
        except BodyTooLarge:
            await self._send(HttpResponse(413, TOO_LARGE))
            return False
        request = HttpRequest(head.method.decode(), path, body)
        await self._send(await self._answer_while_connected(self._answer(request)))
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _read_body(self) -> bytes:
        parts, size = [], 0
        if self._http.they_are_waiting_for_100_continue:
            self._writer.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        while isinstance(event := await self._next_event(), h11.Data):
            size += len(event.data)
            if size > MAX_BODY_BYTES:
                raise BodyTooLarge
            parts.append(bytes(event.data))
        return b"".join(parts)

    async def _next_event(self) -> h11.Event:
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.ConnectionClosed | type):  # a type: it says PAUSED, after a switch of protocols
                if event is not h11.NEED_DATA:
                    raise ClientGone("it was closed")
            else:
                return event
            early, self._early = self._early, b""
            self._http.receive_data(early or await self._reader.read(READ))

    async def _answer_while_connected(self, answering: Coroutine[None, None, HttpResponse]) -> HttpResponse:
        """The answer; cancelled, with `ClientGone`, where the client leaves before it is there."""
        answer = asyncio.create_task(answering)
        watch = asyncio.create_task(self._reader.read(READ))
        try:
            await asyncio.wait((answer, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and not watch.result() and not answer.done():
                raise ClientGone("the client left before its answer was there")
            return await answer
        finally:
            answer.cancel()
            watch.cancel()
            _, seen = await asyncio.gather(answer, watch, return_exceptions=True)
            self._early = seen if isinstance(seen, bytes) else b""  # the next request, come early

    async def _send(self, response: HttpResponse) -> None:
        headers = [
            ("content-type", response.content_type),
            ("content-length", str(len(response.body))),
            *response.headers,
        ]
        if self._http.their_state is not h11.DONE:
            headers.append(("connection", "close"))
        parts = (
            h11.Response(status_code=response.status, headers=headers),
            *((h11.Data(data=response.body),) if self._wants_body else ()),
            h11.EndOfMessage(),
        )
        for part in parts:
            self._writer.write(self._http.send(part) or b"")
        async with asyncio.timeout(BODY_S):
            await self._writer.drain()
