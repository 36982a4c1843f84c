"""The direct path of tokens (`wire.direct=true`): a request goes straight from its worker to the server that it is placed on.

    worker                         orchestrator                       server
     │ ── RequestGrant ───────────────▶ │ ── ExpectRequest ─────────────▶ │  expected
     │ ◀──────────────────────── Grant ─│                                 │
     │ ── Generate with the grant's secret, ids ────────────────────────▶ │  to its own port
     │                                  │ ◀─────────────────────── Served ─│  first
     │ ◀────────────────────────────────────── Completion, with arrays ───│  then

The orchestrator places, counts credits and cancels as it does on the relayed path; only the arrays don't pass through it. All
three ends are here: `send_grant` and `revoke_grant` are the orchestrator's, `DirectEndpoint` is the server's, `DirectClient`
the worker's. None of them decides anything.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

import numpy as np
import zmq
from msgspec import structs

from telescope.records import FinishReason
from telescope.runlog.layout import RunDirectory
from telescope.wire.hub import Hub
from telescope.wire.link import Link, LinkLost
from telescope.wire.messages import (
    GRANT_LIFETIME_S,
    NOTED_OF_A_PEER,
    Abort,
    Body,
    Completion,
    DirectAddress,
    ExpectRequest,
    Generate,
    GenerateFailed,
    Grant,
    Hello,
    RequestGrant,
    RevokeGrant,
    Served,
    Stop,
)
from telescope.wire.peer_events import Delivery, PeerLeft, PeerLost

log = logging.getLogger(__name__)

Answer = tuple[Completion | GenerateFailed, Sequence[np.ndarray]]
"""What a request was answered, with its arrays."""


class Sender(Protocol):
    """The part of a link to the orchestrator that both ends use."""

    def send(self, body: Body, arrays: Sequence[np.ndarray] = (), answers: Delivery | None = None) -> int: ...


# ---- the orchestrator's end ------------------------------------------------------------------------------------------

SECRET_BYTES = 16
"""Of a grant, at random: nobody guesses one while it lasts."""


def send_grant(hub: Hub, asked: Delivery, body: RequestGrant, server: str, priority: int) -> int:
    """Tell the server whom to expect, then the worker where to go. Gives the number of the order to the server, which
    its Served names; 0 where the server has gone, and nothing was sent."""
    hello = hub.peers.get(server)
    if hello is None or hello.direct_address is None:
        return 0
    secret = secrets.token_hex(SECRET_BYTES)
    expect = ExpectRequest(body.request_id, asked.peer, body.prompt_tokens, secret, priority, GRANT_LIFETIME_S)
    number = hub.send(server, expect)
    if number:
        grant = Grant(body.request_id, server, hello.direct_address, secret, GRANT_LIFETIME_S)
        hub.send(asked.peer, grant, answers=asked)
        hub.mark_elsewhere(asked, waits=True)
    return number


def revoke_grant(hub: Hub, asked: Delivery, request_id: str, cause: str) -> None:
    """Tell the worker that the server of its grant is lost."""
    hub.send(asked.peer, RevokeGrant(request_id, cause))
    hub.mark_elsewhere(asked, waits=False)


# ---- the server's end ------------------------------------------------------------------------------------------------

TICK_S = 0.5
MAX_EARLY = 65_536
"""Requests that may wait for their ExpectRequest; each holds its prompt."""
MAX_SPENT = 65_536
"""Grants remembered as used, so that one used twice is refused at once rather than waited for."""


@dataclass(frozen=True, eq=False)
class _Expected:
    """An order of the orchestrator whose request has not come."""

    order: ExpectRequest
    delivery: Delivery
    due: float


@dataclass(frozen=True, eq=False)
class _Early:
    """A request of a worker whose order has not come."""

    order: Generate
    delivery: Delivery
    due: float


class DirectRequest:
    """A request that has come to the endpoint with a valid grant. The orchestrator hears of its end first, then the worker has
    its answer: what the worker does next finds the orchestrator informed."""

    def __init__(self, endpoint: DirectEndpoint, expected: _Expected, delivery: Delivery) -> None:
        self._endpoint, self._expected, self.delivery = endpoint, expected, delivery

    def answer(self, body: Completion | GenerateFailed, arrays: Sequence[np.ndarray] = ()) -> None:
        self._endpoint.finish(self, self._expected, body, arrays)


class DirectEndpoint:
    """A server's own port: grants expected, requests that came before theirs, and requests running.

    Every ExpectRequest is answered by one Served: when its request is done, aborted, or was not brought in time. Order and
    request travel on two connections, so either may come first; a Generate without its order waits for it as long as a grant
    lasts. `begin` and `abort` are the server's."""

    def __init__(
        self,
        port: Hub,
        link: Sender,
        begin: Callable[[Generate, np.ndarray, DirectRequest], None],
        abort: Callable[[str], None],
    ) -> None:
        self._port, self._link, self._begin, self._abort = port, link, begin, abort
        self._loop = asyncio.get_running_loop()
        self._expected: dict[str, _Expected] = {}
        self._early: dict[str, _Early] = {}
        self._running: dict[str, DirectRequest] = {}
        self._spent: dict[str, None] = {}
        self.refused: Counter[str] = Counter()
        self._due: list[tuple[float, str]] = []  # a heap; what has come or gone meanwhile is passed over

    async def run(self) -> None:
        """Take what comes to the port until cancelled. Raises what the port raises."""
        while True:
            match await self._port.next(TICK_S):
                case Delivery(body=Generate() as order) as delivery:
                    self._receive(order, delivery)
                case PeerLost(peer=peer) | PeerLeft(peer=peer):
                    self._lose(peer)
            self._expire(self._loop.time())

    # what the orchestrator says

    def expect(self, order: ExpectRequest, delivery: Delivery) -> None:
        """A worker will come with this grant, or is here with it already."""
        expected = _Expected(order, delivery, self._loop.time() + order.lifetime_s)
        self._spent.pop(order.request_id, None)  # a new grant for a request of that id
        early = self._early.pop(order.request_id, None)
        if early is not None and self._fits(expected, early.order, early.delivery):
            self._admit(expected, early.order, early.delivery)
            return
        if early is not None:
            self._refuse(early.delivery, early.order, "its grant is not valid here")
        self._expected[order.request_id] = expected
        heappush(self._due, (expected.due, order.request_id))

    def abort(self, request_id: str) -> bool:
        """True if the request was expected and has not come: it is answered, and its grant void."""
        expected = self._expected.pop(request_id, None)
        if expected is None:
            return False
        self._spend(request_id)
        self._report_failure(expected, "it was aborted before its worker brought it")
        return True

    # what workers bring

    def _receive(self, order: Generate, delivery: Delivery) -> None:
        request_id = order.request_id
        expected = self._expected.get(request_id)
        if expected is not None:
            if self._fits(expected, order, delivery):
                del self._expected[request_id]
                self._admit(expected, order, delivery)
            else:
                self._refuse(delivery, order, "its grant is not valid here")
        elif not order.grant or request_id in self._spent or request_id in self._running or request_id in self._early:
            self._refuse(delivery, order, "its grant is used, void, or missing")
        elif len(self._early) >= MAX_EARLY:
            self._refuse(delivery, order, f"{MAX_EARLY} requests wait for their place already")
        else:
            early = self._early[request_id] = _Early(order, delivery, self._loop.time() + GRANT_LIFETIME_S)
            heappush(self._due, (early.due, request_id))

    @staticmethod
    def _fits(expected: _Expected, order: Generate, delivery: Delivery) -> bool:
        """The right worker, with the right secret and as many ids as it has said."""
        expect = expected.order
        secret = hmac.compare_digest(expect.secret.encode(), order.grant.encode())
        return secret and delivery.peer == expect.worker and len(delivery.arrays[0]) == expect.prompt_tokens

    def _admit(self, expected: _Expected, order: Generate, delivery: Delivery) -> None:
        request = self._running[order.request_id] = DirectRequest(self, expected, delivery)
        self._spend(order.request_id)
        self._begin(structs.replace(order, priority=expected.order.priority, grant=""), delivery.arrays[0], request)

    def finish(
        self, request: DirectRequest, expected: _Expected, answer: Completion | GenerateFailed, arrays: Sequence[np.ndarray]
    ) -> None:
        """A running request is done."""
        if self._running.get(expected.order.request_id) is request:
            del self._running[expected.order.request_id]
        if isinstance(answer, Completion):
            served = Served(
                request_id=answer.request_id,
                finish_reason=answer.finish_reason,
                tokens=answer.tokens,
                cached_tokens=answer.cached_tokens,
                queued_s=answer.queued_s,
                generated_s=answer.generated_s,
            )
            self._link.send(served, answers=expected.delivery)
        else:
            self._report_failure(expected, answer.cause)
        self._port.send(request.delivery.peer, answer, arrays, answers=request.delivery)

    def _lose(self, peer: str) -> None:
        """A worker's connection is over for good: nobody waits for what it asked here."""
        for request_id, early in [*self._early.items()]:
            if early.delivery.peer == peer:
                del self._early[request_id]
        for request_id, request in self._running.items():
            if request.delivery.peer == peer:
                self._abort(request_id)

    # ends

    def _expire(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            due, request_id = heappop(self._due)
            expected, early = self._expected.get(request_id), self._early.get(request_id)
            if expected is not None and expected.due == due:
                del self._expected[request_id]
                self._spend(request_id)
                lifetime_s, worker = expected.order.lifetime_s, expected.order.worker
                self._report_failure(expected, f"{worker} did not come with its grant in {lifetime_s:g} s")
            elif early is not None and early.due == due:
                del self._early[request_id]
                self._refuse(early.delivery, early.order, "the orchestrator has placed no such request here")

    def _report_failure(self, expected: _Expected, cause: str) -> None:
        reason: FinishReason = "abort"
        self._link.send(Served(expected.order.request_id, reason, 0, 0, 0.0, 0.0, cause), answers=expected.delivery)

    def _refuse(self, delivery: Delivery, order: Generate, why: str) -> None:
        self.refused[delivery.peer] += 1
        if (count := self.refused[delivery.peer]) <= NOTED_OF_A_PEER:
            last = " (further ones of this process are not noted)" * (count == NOTED_OF_A_PEER)
            log.warning("a request of %s was refused: %s%s", delivery.peer, why, last)
        self._port.send(delivery.peer, GenerateFailed(order.request_id, why), answers=delivery)

    def _spend(self, request_id: str) -> None:
        """Remember the grant as used."""
        self._spent[request_id] = None
        while len(self._spent) > MAX_SPENT:
            del self._spent[next(iter(self._spent))]


# ---- the worker's end ------------------------------------------------------------------------------------------------

CONNECT_S = 10.0
"""For a server's port to answer. Its server has said where it is and lives: a place that is not taken costs it a lane."""

UNREACHABLE = (OSError, zmq.ZMQError)
"""What a link raises is the first; so is a key that can't be read, or no descriptor left for another socket."""


class DirectPathLost(ConnectionError):
    """The direct path to a server is closed. The text names the server and the reason."""


@dataclass(eq=False)
class _ServerLink:
    """The link to one server's port, and who waits for an answer there."""

    server: str
    address: DirectAddress
    opening: asyncio.Task[Link]
    waiting: dict[str, asyncio.Future[Answer]] = field(default_factory=dict)
    reading: asyncio.Task[None] | None = None
    over: str = ""

    def end(self, why: str) -> None:
        """Whoever waits here has failed; a new grant opens a new link."""
        self.over = self.over or why
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(self.error)

    @property
    def error(self) -> DirectPathLost:
        return DirectPathLost(f"the direct path to {self.server} is closed: {self.over}")

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


class DirectClient:
    """A worker's requests, each by a grant to its server. `link`: to the orchestrator; `hello`: makes this worker's hello for a
    server, a new incarnation each time.

    Owns one link a server, opened when the first grant for it comes, and closed once it is lost, revoked, or the worker ends. A
    request whose link is lost fails; its rollout is tried again as after any failure of the infrastructure. All methods belong
    to one event loop."""

    def __init__(self, link: Sender, run_directory: RunDirectory, hello: Callable[[], Hello]) -> None:
        self._link, self._run_directory, self._hello = link, run_directory, hello
        self._grants: dict[str, asyncio.Future[Grant | GenerateFailed]] = {}
        self._servers: dict[str, _ServerLink] = {}
        self._closing: set[asyncio.Task[Any]] = set()

    async def generate(self, request: Generate, ids: np.ndarray) -> Answer:
        """Ask for a grant, bring the request to its server, and give the answer. Raises `DirectPathLost`."""
        granted: asyncio.Future[Grant | GenerateFailed] = asyncio.get_running_loop().create_future()
        self._grants[request.request_id] = granted
        try:
            self._link.send(RequestGrant(request.request_id, request.rollout_id, request.attempt, request.turn, len(ids)))
            grant = await granted
            if isinstance(grant, GenerateFailed):
                return grant, ()
            return await self.bring(grant, structs.replace(request, grant=grant.secret), ids)
        except DirectPathLost:
            self._link.send(Abort(request.request_id))  # the server may hold its place still
            raise
        finally:
            del self._grants[request.request_id]

    def hear(self, body: Grant | GenerateFailed | RevokeGrant) -> None:
        """What the orchestrator says of a request. Its rollout may have ended meanwhile, and the request be aborted."""
        granted = self._grants.get(body.request_id)
        if granted is None:
            return
        if not isinstance(body, RevokeGrant):
            if not granted.done():
                granted.set_result(body)
        elif granted.done() and not granted.cancelled() and isinstance(grant := granted.result(), Grant):
            self.revoke(grant.server, body.cause)

    async def bring(self, grant: Grant, request: Generate, ids: np.ndarray) -> Answer:
        """The server's answer. Raises `DirectPathLost`."""
        server = self._find_server(grant)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        server.waiting[request.request_id] = answer
        try:
            link = await asyncio.shield(server.opening)
            if server.reading is None:
                server.reading = asyncio.create_task(server.read(link))
            if not server.over:
                link.send(request, (ids,))
            else:
                server.end(server.over)
            return await answer
        except UNREACHABLE as error:
            self._close(server, str(error))
            raise DirectPathLost(f"the direct path to {server.server} is closed: {error}") from error
        finally:
            del server.waiting[request.request_id]
            if answer.done() and not answer.cancelled():
                answer.exception()  # it is raised above, or nobody waits for it any more

    def revoke(self, server: str, why: str) -> None:
        """The server is lost: its port leads nowhere."""
        known = self._servers.get(server)
        if known is not None:
            self._close(known, why)

    async def close(self) -> None:
        """Leave all servers; at most a few seconds."""
        for server in tuple(self._servers.values()):
            self._close(server, "the worker ends")
        if self._closing:
            await asyncio.wait(tuple(self._closing), timeout=CONNECT_S / 2)

    def _find_server(self, grant: Grant) -> _ServerLink:
        server = self._servers.get(grant.server)
        if server is not None and (server.over or server.address != grant.address):
            self._close(server, server.over or f"{grant.server} has another port now")
            server = None
        if server is None:
            opening = asyncio.create_task(self._open(grant))
            server = self._servers[grant.server] = _ServerLink(grant.server, grant.address, opening)
        return server

    async def _open(self, grant: Grant) -> Link:
        return await asyncio.to_thread(
            Link.connect_direct, self._run_directory, self._hello(), grant.server, grant.address, deadline_s=CONNECT_S
        )

    def _close(self, server: _ServerLink, why: str) -> None:
        if self._servers.get(server.server) is server:
            del self._servers[server.server]
            task = asyncio.create_task(self._leave(server))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        server.end(why)

    async def _leave(self, server: _ServerLink) -> None:
        try:
            link = await server.opening
        except UNREACHABLE as error:
            log.info("%s: %s", server.server, error)
            return
        if server.reading is not None:
            server.reading.cancel()
        await asyncio.to_thread(link.close, "")
