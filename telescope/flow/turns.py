"""One request of a rollout after the other: placed, answered, refused. Each is answered exactly once.

    TurnStarted ─▶ Place | wait for room | Refuse        TurnDone ─▶ room for those that wait

Owns what is said to whoever asks for tokens; which server it is, is placement.py's.
"""

from __future__ import annotations

from collections.abc import Callable

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.groups import Group, State
from telescope.flow.lanes import Flight, Lanes
from telescope.flow.placement import Placement, Request

Say = Callable[[do.AnyCommand], None]
Reach = Callable[[Group, State], None]


class Turns:
    """`say` takes a command, `reach` tells how far a group has come."""

    def __init__(self, lanes: Lanes, placement: Placement, say: Say, reach: Reach) -> None:
        self._lanes = lanes
        self._placement = placement
        self._say = say
        self._reach = reach

    def started(self, event: seen.TurnStarted) -> None:
        if event.request_id in self._placement.requests:
            return  # a repetition
        flight = self._lanes.flights.get((event.rollout_id, event.attempt))
        if flight is None or flight.stopping:
            self._say(do.RefuseRequest(event.request_id, "its rollout does not count any more"))
        elif event.request_id in flight.requests:
            self._say(do.RefuseRequest(event.request_id, "a request of this id was answered before"))
        elif flight.generated:
            self._say(do.RefuseRequest(event.request_id, "its rollout has said that it asks for no more tokens"))
        else:
            flight.requests = (*flight.requests, event.request_id)
            self._place(Request(event.request_id, flight, event.turn, event.prompt_tokens))

    def done(self, event: seen.TurnDone, travelling: bool, version: int) -> None:
        """A server has answered. `travelling`: a weight update is under way; `version`: served now."""
        request = self._placement.finish(event.request_id, event.completion_tokens)
        if request is None:
            return
        flight = request.flight
        if not flight.ended:
            flight.tokens += event.completion_tokens
            if event.finish_reason == "abort":
                flight.aborted = flight.aborted or travelling or flight.version < version
            else:
                flight.aborted = False  # another server has answered what a lost one had: what fails later, fails by itself
            self._reach(flight.group, State.ENV)
        if self._placement.waiting:
            self.place_waiting()  # it has left room

    def server_lost(self, server: str, why: str) -> None:
        """Another one answers what it had, from the start; what the rollouts have played so far is kept."""
        for request in self._placement.lose(server):
            if request.flight.ended or request.flight.stopping:
                self._say(do.RefuseRequest(request.request_id, why))
            else:
                request.flight.aborted = True  # where its worker had brought the request there itself, the attempt fails
                self._place(request)

    def place_waiting(self) -> None:
        while (request := self._placement.next_waiting()) is not None:
            self._place(request)

    def withdraw(self, flight: Flight, why: str) -> None:
        """Answer what the flight still waits for; what a server has is the server's to answer."""
        if not self._placement.waiting:
            return
        for request_id in flight.requests:
            if self._placement.withdraw(request_id):
                self._say(do.RefuseRequest(request_id, why))

    def _place(self, request: Request) -> None:
        server = self._placement.place(request)
        if server is not None:
            # earlier turns first
            self._say(do.PlaceRequest(request.request_id, server, request.turn))
            self._reach(request.flight.group, State.GENERATING)
