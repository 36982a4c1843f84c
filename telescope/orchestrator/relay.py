"""Requests for tokens on their way from a worker to a server and back. Arrays pass through undecoded; on the direct path
(`wire.direct=true`) the worker gets a grant, its server an order to expect it, and the arrays don't come here at all.

Each request is answered exactly once: by its server once it is placed, else by `refuse`. A placed one is remembered until its
server has answered, also where its rollout has ended meanwhile: only the answer gives the server's credit back. Where its
server is lost, the same frames go to another one: the worker notices nothing but the time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from telescope.flow import events
from telescope.orchestrator.peers import ProtocolViolations
from telescope.orchestrator.rollout_store import Rollout, RolloutStore, TurnRequest
from telescope.wire.direct import revoke_grant, send_grant
from telescope.wire.hub import Hub
from telescope.wire.messages import Abort, Completion, Generate, GenerateFailed, RequestGrant, Served
from telescope.wire.peer_events import Delivery

MAX_ID_CHARACTERS = 200
MAX_CAUSE_CHARACTERS = 2000

Events = Iterable[events.AnyEvent]


class TurnLog(Protocol):
    """The part of the recorder that is used here."""

    def record_turn(self, row: Mapping[str, Any]) -> None: ...


class Relay:
    """Carries the store's requests; the core places and refuses them. What ends a request gives the events that follow, its
    rollout's own among them where that waited for it (`Rollout.release`)."""

    def __init__(self, hub: Hub, store: RolloutStore, turns: TurnLog, violations: ProtocolViolations) -> None:
        self._hub, self._store, self._turns, self._violations = hub, store, turns, violations
        self._requests = store.requests

    # ---- what workers say

    def ask(self, delivery: Delivery, body: Generate | RequestGrant) -> events.TurnStarted | None:
        """A worker wants tokens: remember the request, tell the core. None: the request is refused for what it says."""
        rollout = self._store.find(body.rollout_id, body.attempt)
        if wrong := self._find_wrong(delivery, body, rollout):
            self._violations.note(delivery.peer, f"its {type(body).__name__} was refused: {wrong}")
            failed = GenerateFailed(request_id=body.request_id[:MAX_ID_CHARACTERS], cause=wrong)
            self._hub.send(delivery.peer, failed, answers=delivery)
            return None
        request = self._requests[body.request_id] = TurnRequest(delivery, body, rollout)
        if rollout is not None:
            rollout.requests[body.request_id] = request
        return events.TurnStarted(
            request_id=body.request_id,
            rollout_id=body.rollout_id,
            attempt=body.attempt,
            turn=body.turn,
            prompt_tokens=request.prompt_tokens,
        )

    def _find_wrong(self, delivery: Delivery, body: Generate | RequestGrant, rollout: Rollout | None) -> str:
        if rollout is not None and rollout.answer is None and rollout.worker != delivery.peer:
            return f"rollout {body.rollout_id} attempt {body.attempt} plays on {rollout.worker}"
        if len(body.request_id) > MAX_ID_CHARACTERS:
            return f"its request id has more than {MAX_ID_CHARACTERS} characters"
        if body.request_id in self._requests:
            return f"a request {body.request_id} is in flight already"
        if isinstance(body, RequestGrant) and body.prompt_tokens < 0:
            return f"it names {body.prompt_tokens} prompt tokens"
        return ""

    def abort(self, peer: str, request_id: str) -> None:
        """A worker gives a request up, without an answer of its own. It may be answered already."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.asked.peer != peer:
            self._violations.note(peer, f"its Abort was ignored: request {request_id} is one of {request.asked.peer}")
            return
        self._stop(request)

    # ---- what the core says

    def place(self, request_id: str, server: str, priority: int) -> Events:
        """Send it on. Gives its end at once where nobody waits for it any more."""
        request = self._requests.get(request_id)
        if request is None:
            return ()
        if request.ended:
            rollout_id = request.body.rollout_id
            ended = events.TurnDone(request_id=request_id, rollout_id=rollout_id, completion_tokens=0, finish_reason="abort")
            return (ended, *self._forget(request))
        request.server, request.placed_ns = server, time.time_ns()
        if isinstance(request.body, RequestGrant):
            request.number = send_grant(self._hub, request.asked, request.body, server, priority)
        else:
            body = msgspec.structs.replace(request.body, priority=priority)
            request.number = self._hub.relay(server, body, request.asked.frames)
        if request.unwanted:
            self._stop(request)
        return ()

    def refuse(self, request_id: str, cause: str) -> Events:
        request = self._requests.get(request_id)
        if request is None:
            return ()
        if request.granted:
            revoke_grant(self._hub, request.asked, request_id, cause)
        elif not request.ended:
            self._hub.send(request.asked.peer, GenerateFailed(request_id=request_id, cause=cause), answers=request.asked)
        return self._forget(request)

    def cancel(self, rollout: Rollout) -> None:
        """Abort what the rollout still generates. The server's answer is relayed as it comes, to settle the worker's wait."""
        for request in tuple(rollout.requests.values()):
            self._stop(request)

    def lose(self, server: str) -> Events:
        """The server is gone: what it had waits for another place, or for a refusal. What its worker has given up, or has
        brought there itself, has failed with it."""
        freed: list[events.AnyEvent] = []
        for request in self._requests.values():
            if request.server != server:
                continue
            why = f"{server} was lost"
            request.ended = request.granted or request.unwanted
            if request.granted:
                revoke_grant(self._hub, request.asked, request.request_id, why)
            elif request.unwanted:
                failed = GenerateFailed(request_id=request.request_id, cause=why)
                self._hub.send(request.asked.peer, failed, answers=request.asked)
            request.server, request.number = None, 0
            if request.rollout is not None:
                freed.extend(request.rollout.release())
        return freed

    # ---- what servers say

    def answer(self, delivery: Delivery, body: Completion | GenerateFailed | Served) -> Events:
        """A server has answered: pass it on (unless its worker has the answer from the server itself), and note the turn.

        What counts is which request it answers; where it speaks of another one, the request it answers has failed.
        """
        request = self._find_placed(delivery, body.request_id)
        if request is None:
            self._violations.note(delivery.peer, f"its {type(body).__name__} answers no request that was placed on it; ignored")
            return ()
        if wrong := _find_contradiction(request, body):
            self._violations.note(delivery.peer, f"its answer to request {request.request_id} counts as failed: {wrong}")
            body = GenerateFailed(request_id=request.request_id, cause=f"{delivery.peer} answered wrongly: {wrong}")
        if request.granted:
            self._hub.mark_elsewhere(request.asked, waits=False)
        elif isinstance(body, GenerateFailed):
            body = msgspec.structs.replace(body, cause=body.cause[:MAX_CAUSE_CHARACTERS])
            self._hub.send(request.asked.peer, body, answers=request.asked)
        elif isinstance(body, Completion):
            self._hub.relay(request.asked.peer, body, delivery.frames, answers=request.asked)
        self._turns.record_turn(_make_row(request, delivery.peer, body))
        tokens = 0 if isinstance(body, GenerateFailed) else body.tokens
        reason = "abort" if isinstance(body, GenerateFailed) else body.finish_reason
        rollout_id = request.body.rollout_id
        done = events.TurnDone(
            request_id=body.request_id, rollout_id=rollout_id, completion_tokens=tokens, finish_reason=reason
        )
        return (done, *self._forget(request))

    def _find_placed(self, delivery: Delivery, request_id: str) -> TurnRequest | None:
        """That whose order to the server the message answers, whatever request it speaks of."""
        named = self._requests.get(request_id)
        if named is not None and (named.server, named.number) == (delivery.peer, delivery.answers):
            return named
        placed = (delivery.peer, delivery.answers)
        return next((one for one in self._requests.values() if (one.server, one.number) == placed), None)

    def _stop(self, request: TurnRequest) -> None:
        """Tell its server; where it has none yet, as soon as it has."""
        request.unwanted = True
        if request.server is not None:
            self._hub.send(request.server, Abort(request_id=request.request_id))

    def _forget(self, request: TurnRequest) -> Events:
        del self._requests[request.request_id]
        rollout = request.rollout
        if rollout is None:
            return ()
        del rollout.requests[request.request_id]
        return rollout.release()


def _make_row(request: TurnRequest, server: str, body: Completion | GenerateFailed | Served) -> dict[str, Any]:
    """Of the stream `turns`."""
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


def _find_contradiction(request: TurnRequest, body: Completion | GenerateFailed | Served) -> str:
    """What in the answer cannot be; empty where nothing."""
    if body.request_id != request.request_id:
        return f"it names request {body.request_id[:MAX_ID_CHARACTERS]}"
    if not isinstance(body, GenerateFailed) and not 0 <= body.cached_tokens <= request.prompt_tokens:
        return f"it names {body.cached_tokens} cached tokens of a prompt of {request.prompt_tokens}"
    if isinstance(body, Served) and body.tokens < 0:
        return f"it names {body.tokens} tokens"
    return ""
