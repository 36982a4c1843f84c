"""A server's own door (`wire.direct=true`): workers bring their requests here, each with a ticket that the orchestrator gave.

    orchestrator ── Expect ─▶ expected ─┐
    worker ─────── Generate ─▶ early ───┴─▶ begin ─▶ Served to the orchestrator, Completion to the worker

Every Expect is answered by one Served: when its request is done, aborted, or was not brought in time. Ticket and order travel
on two connections, so either may come first; a Generate without its Expect waits for it as long as a ticket lasts. Refuses to
decide anything: placement, credits and cancels are the orchestrator's.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

import msgspec
import numpy as np

from telescope.inference.engine import Generated
from telescope.records import FinishReason
from telescope.wire.happenings import Delivery, Happening, PeerLeft, PeerLost
from telescope.wire.messages import Body, Completion, Expect, Generate, GenerateFailed, Served
from telescope.wire.rules import NOTED_OF_A_PEER, TICKET_LIFETIME_S

TICK_S = 0.5
MAX_EARLY = 65_536
"""Requests that may wait for their Expect; each holds its prompt."""
MAX_SPENT = 65_536
"""Tickets remembered as used, so that one used twice is refused at once rather than waited for."""

log = logging.getLogger(__name__)


class Port(Protocol):
    """The part of `telescope.wire.hub.Hub` that a door uses."""

    async def next(self, timeout_s: float) -> Happening | None: ...

    def send(self, peer: str, body: Body, arrays: Sequence[np.ndarray] = (), answers: Delivery | None = None) -> int: ...


class Reports(Protocol):
    """The part of a link to the orchestrator that a door uses."""

    def send(self, body: Body, arrays: Sequence[np.ndarray] = (), answers: Delivery | None = None) -> int: ...


def completion(request_id: str, done: Generated) -> Completion:
    return Completion(
        request_id=request_id,
        finish_reason=done.finish_reason,
        tokens=len(done.ids),
        cached_tokens=done.cached_tokens,
        queued_s=done.queued_s,
        generated_s=done.generated_s,
    )


@dataclass(frozen=True, eq=False)
class _Expected:
    order: Expect
    delivery: Delivery
    due: float


@dataclass(frozen=True, eq=False)
class _Early:
    order: Generate
    delivery: Delivery
    due: float


class Direct:
    """A request that came through the door. The orchestrator hears of its end first, then the worker has its answer: what the
    worker does next finds the orchestrator informed."""

    def __init__(self, door: Door, expected: _Expected, delivery: Delivery) -> None:
        self._door, self._expected, self.delivery = door, expected, delivery

    def completed(self, done: Generated) -> None:
        answer = completion(self._expected.order.request_id, done)
        self._door.ended(self, self._expected, answer, done.arrays)

    def failed(self, cause: str) -> None:
        self._door.ended(self, self._expected, GenerateFailed(self._expected.order.request_id, cause))


class Door:
    """Tickets expected, requests that came before theirs, and requests running. `begin` and `abort` are the server's."""

    def __init__(
        self,
        port: Port,
        link: Reports,
        begin: Callable[[Generate, np.ndarray, Direct], None],
        abort: Callable[[str], None],
    ) -> None:
        self._port, self._link, self._begin, self._abort = port, link, begin, abort
        self._loop = asyncio.get_running_loop()
        self._expected: dict[str, _Expected] = {}
        self._early: dict[str, _Early] = {}
        self._running: dict[str, Direct] = {}
        self._spent: dict[str, None] = {}
        self.refused: Counter[str] = Counter()
        self._due: list[tuple[float, str]] = []  # a heap; what has come or gone meanwhile is passed over

    async def run(self) -> None:
        """Take what comes to the door until cancelled. Raises what the port raises."""
        while True:
            match await self._port.next(TICK_S):
                case Delivery(body=Generate() as order) as delivery:
                    self._came(order, delivery)
                case PeerLost(peer=peer) | PeerLeft(peer=peer):
                    self._gone(peer)
            self._expire(self._loop.time())

    # ---- what the orchestrator says

    def expect(self, order: Expect, delivery: Delivery) -> None:
        """A worker will come with this ticket, or is here with it already."""
        expected = _Expected(order, delivery, self._loop.time() + order.lifetime_s)
        self._spend(order.request_id, again=True)
        early = self._early.pop(order.request_id, None)
        if early is not None and self._fits(expected, early.order, early.delivery):
            self._admit(expected, early.order, early.delivery)
            return
        if early is not None:
            self._turn_away(early.delivery, early.order, "its ticket is not valid here")
        self._expected[order.request_id] = expected
        heappush(self._due, (expected.due, order.request_id))

    def abort(self, request_id: str) -> bool:
        """True if the request was expected and has not come: it is answered, and its ticket void."""
        expected = self._expected.pop(request_id, None)
        if expected is None:
            return False
        self._spend(request_id)
        self._report(expected, "it was aborted before its worker brought it")
        return True

    # ---- what workers bring

    def _came(self, order: Generate, delivery: Delivery) -> None:
        request_id = order.request_id
        expected = self._expected.get(request_id)
        if expected is not None:
            if self._fits(expected, order, delivery):
                del self._expected[request_id]
                self._admit(expected, order, delivery)
            else:
                self._turn_away(delivery, order, "its ticket is not valid here")
        elif not order.ticket or request_id in self._spent or request_id in self._running or request_id in self._early:
            self._turn_away(delivery, order, "its ticket is used, void, or none")
        elif len(self._early) >= MAX_EARLY:
            self._turn_away(delivery, order, f"{MAX_EARLY} requests wait for their place already")
        else:
            early = self._early[request_id] = _Early(order, delivery, self._loop.time() + TICKET_LIFETIME_S)
            heappush(self._due, (early.due, request_id))

    @staticmethod
    def _fits(expected: _Expected, order: Generate, delivery: Delivery) -> bool:
        """The right worker, with the right secret and as many ids as it has said."""
        ticket = expected.order
        secret = hmac.compare_digest(ticket.secret.encode(), order.ticket.encode())
        return secret and delivery.peer == ticket.worker and len(delivery.arrays[0]) == ticket.prompt_tokens

    def _admit(self, expected: _Expected, order: Generate, delivery: Delivery) -> None:
        direct = self._running[order.request_id] = Direct(self, expected, delivery)
        self._spend(order.request_id)
        self._begin(msgspec.structs.replace(order, priority=expected.order.priority, ticket=""), delivery.arrays[0], direct)

    def ended(
        self, direct: Direct, expected: _Expected, answer: Completion | GenerateFailed, arrays: Sequence[np.ndarray] = ()
    ) -> None:
        """A running request is done."""
        if self._running.get(expected.order.request_id) is direct:
            del self._running[expected.order.request_id]
        if isinstance(answer, Completion):
            self._link.send(
                Served(
                    request_id=answer.request_id,
                    finish_reason=answer.finish_reason,
                    tokens=answer.tokens,
                    cached_tokens=answer.cached_tokens,
                    queued_s=answer.queued_s,
                    generated_s=answer.generated_s,
                ),
                answers=expected.delivery,
            )
        else:
            self._report(expected, answer.cause)
        self._port.send(direct.delivery.peer, answer, arrays, answers=direct.delivery)

    def _gone(self, peer: str) -> None:
        """A worker's connection is over for good: nobody waits for what it asked here."""
        for request_id, early in [*self._early.items()]:
            if early.delivery.peer == peer:
                del self._early[request_id]
        for request_id, direct in self._running.items():
            if direct.delivery.peer == peer:
                self._abort(request_id)

    # ---- ends

    def _expire(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            due, request_id = heappop(self._due)
            expected, early = self._expected.get(request_id), self._early.get(request_id)
            if expected is not None and expected.due == due:
                del self._expected[request_id]
                self._spend(request_id)
                lifetime_s, worker = expected.order.lifetime_s, expected.order.worker
                self._report(expected, f"{worker} did not come with its ticket in {lifetime_s:g} s")
            elif early is not None and early.due == due:
                del self._early[request_id]
                self._turn_away(early.delivery, early.order, "the orchestrator has placed no such request here")

    def _report(self, expected: _Expected, cause: str) -> None:
        reason: FinishReason = "abort"
        self._link.send(Served(expected.order.request_id, reason, 0, 0, 0.0, 0.0, cause), answers=expected.delivery)

    def _turn_away(self, delivery: Delivery, order: Generate, why: str) -> None:
        self.refused[delivery.peer] += 1
        if (count := self.refused[delivery.peer]) <= NOTED_OF_A_PEER:
            last = " (further ones of this process are not noted)" * (count == NOTED_OF_A_PEER)
            log.warning("a request of %s was refused: %s%s", delivery.peer, why, last)
        self._port.send(delivery.peer, GenerateFailed(order.request_id, why), answers=delivery)

    def _spend(self, request_id: str, again: bool = False) -> None:
        """Remember the ticket as used; `again`: the orchestrator gives a new one for a request of that id."""
        self._spent.pop(request_id, None)
        if not again:
            self._spent[request_id] = None
            while len(self._spent) > MAX_SPENT:
                del self._spent[next(iter(self._spent))]
