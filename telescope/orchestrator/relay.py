"""Generate requests on their way from a worker to a server and back. Arrays pass through undecoded; where a worker asks for a
place instead (`wire.direct=true`), it gets a ticket, its server an order to expect it, and the arrays don't come here at all.

Each request is answered exactly once: by its server once it is placed, else by `refuse`. A placed one is remembered until its
server has answered, also where its rollout has ended meanwhile: only the answer gives the server's credit back. Where its
server is lost, the same frames go to another one: the worker notices nothing but the time.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from telescope.flow import events
from telescope.orchestrator.complaints import Complaints
from telescope.wire.happenings import Delivery
from telescope.wire.hub import Hub
from telescope.wire.messages import (
    Abort,
    AskPlace,
    Completion,
    Expect,
    Generate,
    GenerateFailed,
    Revoke,
    Served,
    Ticket,
)
from telescope.wire.rules import TICKET_LIFETIME_S

MAX_ID_CHARACTERS = 200
MAX_CAUSE_CHARACTERS = 2000
SECRET_BYTES = 16
"""Of a ticket, at random: nobody guesses one while it lasts."""


@dataclass(eq=False)
class _Request:
    asked: Delivery
    body: Generate | AskPlace
    server: str | None = None
    number: int = 0
    """Of the message to the server; its answer names it."""
    placed_ns: int = 0
    unwanted: bool = False
    """Its worker has given it up, perhaps before it was placed."""
    ended: bool = False
    """Its server is lost and its worker has its answer: the core has yet to hear that nothing comes of it."""

    @property
    def ticketed(self) -> bool:
        """Its worker was answered with a ticket, and has brought it to the server itself."""
        return isinstance(self.body, AskPlace) and self.number > 0

    @property
    def prompt_tokens(self) -> int:
        return self.body.prompt_tokens if isinstance(self.body, AskPlace) else self.asked.frames.specs[0].shape[0]

    @property
    def rollout(self) -> tuple[int, int]:
        return self.body.rollout_id, self.body.attempt


class Relay:
    """Requests in flight, by id. The core places and refuses them; the relay carries."""

    def __init__(self, hub: Hub, complaints: Complaints) -> None:
        self._hub, self._complaints = hub, complaints
        self._requests: dict[str, _Request] = {}
        self._placed: dict[tuple[str, int], _Request] = {}
        self._of_rollout: dict[tuple[int, int], dict[str, _Request]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    # ---- what workers say

    def ask(self, delivery: Delivery, body: Generate | AskPlace) -> events.TurnStarted | None:
        """A worker wants tokens: remember the request, tell the core. None: the request is refused for what it says."""
        if len(body.request_id) > MAX_ID_CHARACTERS:
            self.turn_away(delivery, body, f"its request id has more than {MAX_ID_CHARACTERS} characters")
            return None
        if body.request_id in self._requests:
            self.turn_away(delivery, body, f"a request {body.request_id} is in flight already")
            return None
        if isinstance(body, AskPlace) and body.prompt_tokens < 0:
            self.turn_away(delivery, body, f"it names {body.prompt_tokens} prompt tokens")
            return None
        request = self._requests[body.request_id] = _Request(delivery, body)
        self._of_rollout.setdefault(request.rollout, {})[body.request_id] = request
        return events.TurnStarted(
            request_id=body.request_id,
            rollout_id=body.rollout_id,
            attempt=body.attempt,
            turn=body.turn,
            prompt_tokens=request.prompt_tokens,
        )

    def turn_away(self, delivery: Delivery, body: Generate | AskPlace, why: str) -> None:
        """Refuse a request that the core has not heard of."""
        self._complaints.note(delivery.peer, f"its {type(body).__name__} was refused: {why}")
        self._hub.send(
            delivery.peer, GenerateFailed(request_id=body.request_id[:MAX_ID_CHARACTERS], cause=why), answers=delivery
        )

    def abort(self, peer: str, request_id: str) -> None:
        """A worker gives a request up, without an answer of its own. It may be answered already."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.asked.peer != peer:
            self._complaints.note(peer, f"its Abort was ignored: request {request_id} is one of {request.asked.peer}")
            return
        self._stop(request)

    # ---- what the core says

    def place(self, request_id: str, server: str, priority: int) -> tuple[events.AnyEvent, ...]:
        """Send it on. Gives its end at once where nobody waits for it any more."""
        request = self._requests.get(request_id)
        if request is None:
            return ()
        if request.ended:
            self._forget(request)
            rollout_id = request.body.rollout_id
            ended = events.TurnDone(request_id=request_id, rollout_id=rollout_id, completion_tokens=0, finish_reason="abort")
            return (ended,)
        request.server, request.placed_ns = server, time.time_ns()
        if isinstance(request.body, AskPlace):
            request.number = self._send_ticket(request, request.body, server, priority)
        else:
            body = msgspec.structs.replace(request.body, priority=priority)
            request.number = self._hub.relay(server, body, request.asked.frames)
        if request.number:  # else the server has gone, which will be told next
            self._placed[server, request.number] = request
        if request.unwanted:
            self._stop(request)
        return ()

    def _send_ticket(self, request: _Request, body: AskPlace, server: str, priority: int) -> int:
        """The order to the server first: its number, or 0 where the server has gone and there is no place."""
        hello = self._hub.peers.get(server)
        if hello is None or hello.door is None:
            return 0
        worker, secret = request.asked.peer, secrets.token_hex(SECRET_BYTES)
        expect = Expect(body.request_id, worker, body.prompt_tokens, secret, priority, TICKET_LIFETIME_S)
        number = self._hub.send(server, expect)
        if number:
            ticket = Ticket(body.request_id, server, hello.door, secret, TICKET_LIFETIME_S)
            self._hub.send(worker, ticket, answers=request.asked)
            self._hub.elsewhere(request.asked, waits=True)
        return number

    def lost(self, server: str) -> None:
        """The server is gone: what it had waits for another place, or for a refusal. What its worker has given up, or has
        brought there itself, has failed with it."""
        for request in self._requests.values():
            if request.server != server:
                continue
            self._placed.pop((server, request.number), None)
            request_id, why = request.body.request_id, f"{server} was lost"
            request.ended = request.ticketed or request.unwanted
            if request.ticketed:
                self._hub.send(request.asked.peer, Revoke(request_id, why))
                self._hub.elsewhere(request.asked, waits=False)
            elif request.unwanted:
                self._hub.send(request.asked.peer, GenerateFailed(request_id=request_id, cause=why), answers=request.asked)
            request.server, request.number = None, 0

    def refuse(self, request_id: str, cause: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        self._forget(request)
        if request.ticketed:
            self._hub.send(request.asked.peer, Revoke(request_id, cause))
        elif not request.ended:
            self._hub.send(request.asked.peer, GenerateFailed(request_id=request_id, cause=cause), answers=request.asked)

    def cancel(self, rollout_id: int, attempt: int) -> None:
        """Abort what the rollout still generates. The server's answer is relayed as it comes, to settle the worker's wait."""
        for request in tuple(self._of_rollout.get((rollout_id, attempt), {}).values()):
            self._stop(request)

    def servers_of(self, rollout_id: int, attempt: int) -> set[str]:
        """Servers that hold a request of the rollout, and have not answered it."""
        requests = self._of_rollout.get((rollout_id, attempt), {}).values()
        return {request.server for request in requests if request.server is not None and request.number}

    # ---- what servers say

    def answer(
        self, delivery: Delivery, body: Completion | GenerateFailed | Served
    ) -> tuple[events.TurnDone, dict[str, Any]] | None:
        """A server has answered: pass it on (unless its worker has the answer from the server itself). Returns the core's event
        and a row of the turns stream.

        What counts is which request it answers; where it speaks of another one, the request it answers has failed.
        """
        request = self._placed.get((delivery.peer, delivery.answers))
        if request is None:
            self._complaints.note(delivery.peer, f"its {type(body).__name__} answers no request that was placed on it; ignored")
            return None
        self._forget(request)
        wrong = _contradiction(request, body)
        if wrong:
            self._complaints.note(delivery.peer, f"its answer to request {request.body.request_id} counts as failed: {wrong}")
            body = GenerateFailed(request_id=request.body.request_id, cause=f"{delivery.peer} answered wrongly: {wrong}")
        if request.ticketed:
            pass
        elif isinstance(body, GenerateFailed):
            body = msgspec.structs.replace(body, cause=body.cause[:MAX_CAUSE_CHARACTERS])
            self._hub.send(request.asked.peer, body, answers=request.asked)
        elif isinstance(body, Completion):
            self._hub.relay(request.asked.peer, body, delivery.frames, answers=request.asked)
        tokens = 0 if isinstance(body, GenerateFailed) else body.tokens
        reason = "abort" if isinstance(body, GenerateFailed) else body.finish_reason
        event = events.TurnDone(
            request_id=body.request_id, rollout_id=request.body.rollout_id, completion_tokens=tokens, finish_reason=reason
        )
        return event, self._row(request, delivery.peer, body)

    def _stop(self, request: _Request) -> None:
        """Tell its server; where it has none yet, as soon as it has."""
        request.unwanted = True
        if request.server is not None:
            self._hub.send(request.server, Abort(request_id=request.body.request_id))

    def _forget(self, request: _Request) -> None:
        del self._requests[request.body.request_id]
        if request.ticketed:
            self._hub.elsewhere(request.asked, waits=False)
        if request.server is not None:
            self._placed.pop((request.server, request.number), None)
        siblings = self._of_rollout[request.rollout]
        del siblings[request.body.request_id]
        if not siblings:
            del self._of_rollout[request.rollout]

    @staticmethod
    def _row(request: _Request, server: str, body: Completion | GenerateFailed | Served) -> dict[str, Any]:
        row: dict[str, Any] = {
            "request_id": body.request_id,
            "rollout_id": request.body.rollout_id,
            "turn": request.body.turn,
            "server": server,
            "prompt_tokens": request.prompt_tokens,
            "placed_ns": request.placed_ns,
            "done_ns": time.time_ns(),
        }
        if isinstance(body, Completion | Served) and not getattr(body, "cause", ""):
            row |= {
                "completion_tokens": body.tokens,
                "cached_tokens": body.cached_tokens,
                "finish_reason": body.finish_reason,
                "queued_s": body.queued_s,
                "generated_s": body.generated_s,
            }
        return row


def _contradiction(request: _Request, body: Completion | GenerateFailed | Served) -> str:
    """What in the answer cannot be; empty where nothing."""
    if body.request_id != request.body.request_id:
        return f"it names request {body.request_id[:MAX_ID_CHARACTERS]}"
    if not isinstance(body, GenerateFailed) and not 0 <= body.cached_tokens <= request.prompt_tokens:
        return f"it names {body.cached_tokens} cached tokens of a prompt of {request.prompt_tokens}"
    if isinstance(body, Served) and body.tokens < 0:
        return f"it names {body.tokens} tokens"
    return ""
