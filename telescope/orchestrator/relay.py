"""Generate requests on their way from a worker to a server and back. Arrays pass through undecoded."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from telescope.flow import events
from telescope.wire.happenings import Delivery
from telescope.wire.hub import Hub
from telescope.wire.messages import Abort, Completion, Generate, GenerateFailed


@dataclass
class _Request:
    asked: Delivery
    body: Generate
    server: str | None = None
    placed_ns: int = 0


class Relay:
    """Requests in flight, by id. The core places and refuses them; the relay carries."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def ask(self, delivery: Delivery, body: Generate) -> events.TurnStarted:
        """A worker wants tokens: remember the request, tell the core."""
        self._requests[body.request_id] = _Request(delivery, body)
        return events.TurnStarted(
            request_id=body.request_id,
            rollout_id=body.rollout_id,
            attempt=body.attempt,
            turn=body.turn,
            prompt_tokens=_prompt_tokens(delivery),
        )

    def place(self, request_id: str, server: str, priority: int) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        request.server, request.placed_ns = server, time.time_ns()
        self._hub.relay(server, msgspec.structs.replace(request.body, priority=priority), request.asked.frames)

    def refuse(self, request_id: str, cause: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._hub.send(request.asked.peer, GenerateFailed(request_id=request_id, cause=cause), answers=request.asked)

    def cancel(self, rollout_id: int, attempt: int) -> None:
        """Abort what the rollout still generates. The server's answer is relayed as it comes, to settle the worker's wait."""
        for request in self._requests.values():
            if request.body.rollout_id == rollout_id and request.body.attempt == attempt and request.server is not None:
                self._hub.send(request.server, Abort(request_id=request.body.request_id))

    def answer(self, delivery: Delivery, body: Completion | GenerateFailed) -> tuple[events.TurnDone, dict[str, Any]] | None:
        """A server has answered: pass it on. Returns the core's event and a row of the turns stream."""
        request = self._requests.pop(body.request_id, None)
        if request is None:
            return None
        self._hub.relay(request.asked.peer, body, delivery.frames, answers=request.asked)
        tokens = body.tokens if isinstance(body, Completion) else 0
        reason = body.finish_reason if isinstance(body, Completion) else "abort"
        event = events.TurnDone(
            request_id=body.request_id, rollout_id=request.body.rollout_id, completion_tokens=tokens, finish_reason=reason
        )
        return event, self._row(request, delivery.peer, body)

    @staticmethod
    def _row(request: _Request, server: str, body: Completion | GenerateFailed) -> dict[str, Any]:
        row: dict[str, Any] = {
            "request_id": body.request_id,
            "rollout_id": request.body.rollout_id,
            "turn": request.body.turn,
            "server": server,
            "prompt_tokens": _prompt_tokens(request.asked),
            "placed_ns": request.placed_ns,
            "done_ns": time.time_ns(),
        }
        if isinstance(body, Completion):
            row |= {
                "completion_tokens": body.tokens,
                "cached_tokens": body.cached_tokens,
                "finish_reason": body.finish_reason,
                "queued_s": body.queued_s,
                "generated_s": body.generated_s,
            }
        return row


def _prompt_tokens(delivery: Delivery) -> int:
    return delivery.frames.specs[0].shape[0]
