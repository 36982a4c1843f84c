"""Requests for tokens: which server answers each, and how many rollouts a server carries.

    TurnStarted ─▶ PlaceRequest | wait for room | RefuseRequest        TurnDone ─▶ room for those that wait

A group's requests stay on one server, whose prefix cache knows their prompt; a group's first request goes where the KV cache is
least pressed, and among those where the fewest tokens are in flight. A pressed server loses its groups to one that is not and
has half its tokens at most. Never to a server older than the group (v_start), and never to a full one: a request counts at its
server until the server has answered it, whatever has become of its rollout. Each request is answered exactly once.

How hard a KV cache is pressed is judged by what its engine reports. With `adaptive_concurrency` a server's lanes follow the
reports as a network's congestion window does: one report of a full cache, of requests thrown out of it or of a lasting queue
takes a quarter away at once, calm gives them back a few at a time. Fewer lanes only keep new rollouts from starting; one that
has begun goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.groups import GroupState, RolloutAttempt, RolloutGroup
from telescope.flow.lanes import Lanes
from telescope.flow.ranking import Ranking
from telescope.flow.settings import FlowSettings

SETTLE_S = 2.0
"""After a cut the lanes stay as they are for so long: what was cut off needs its time to end and to show in the reports."""
GROW_S = 1.0
GROWTH_PARTS = 16
"""Calm lanes grow by so small a part of themselves each `GROW_S`, and by one at least: from 1 to 256 in a minute, and beyond
what the cache holds by little."""


class Pressure(IntEnum):
    CALM = 0
    SOFT = 1  # above kv_soft, or a queue that lasts: no new rollouts start for this server
    HARD = 2  # above kv_hard, or requests were thrown out: fewer lanes


class ServerLanes:
    """One server's part of all lanes. Made when it joins, so an engine's counters begin at 0 with it."""

    __slots__ = ("_next_cut", "_next_growth", "_preemptions", "_queued", "_settings", "limit", "pressure")

    def __init__(self, settings: FlowSettings) -> None:
        self._settings = settings
        self.limit = settings.lanes_per_server
        self.pressure = Pressure.CALM
        self._preemptions = 0
        self._queued = False
        self._next_cut = 0.0
        self._next_growth = 0.0

    def count(self, outstanding: int) -> int:
        """Lanes the server offers while it has so many requests: under pressure those in use and no more. At least one, so
        that a run whose reports have stopped still goes on."""
        if not self._settings.adaptive_concurrency:
            return self.limit
        return self.limit if self.pressure is Pressure.CALM else max(1, min(self.limit, outstanding))

    def hear(self, load: seen.ServerLoad, outstanding: int, now: float) -> None:
        """Judge a report; cut or grow the lanes where it is time to. Of a server that has nothing of ours it is late."""
        judged = self._judge(load)
        self.pressure = judged if outstanding else Pressure.CALM
        if not self._settings.adaptive_concurrency:
            return
        if self.pressure is Pressure.HARD:
            if now >= self._next_cut:
                self.limit = max(1, min(self.limit, outstanding) * 3 // 4)
                self._next_cut = self._next_growth = now + SETTLE_S
        elif self.pressure is Pressure.CALM and load.waiting == 0 and now >= self._next_growth:
            self.limit = min(self._settings.lanes_per_server, self.limit + max(1, self.limit // GROWTH_PARTS))
            self._next_growth = now + GROW_S

    def calm_down(self) -> None:
        """The server has nothing of ours any more, so its cache is free whatever it last said."""
        self.pressure = Pressure.CALM

    def _judge(self, load: seen.ServerLoad) -> Pressure:
        thrown_out = load.preemptions > self._preemptions
        self._preemptions = max(self._preemptions, load.preemptions)
        # a burst of new requests waits for one report; only what still waits at the next one is a queue
        lasting = self._queued and load.waiting > load.running
        self._queued = load.waiting > load.running
        if load.kv_used >= self._settings.kv_hard or thrown_out:
            return Pressure.HARD
        if lasting:
            return Pressure.HARD if self._settings.adaptive_concurrency else Pressure.SOFT
        return Pressure.SOFT if load.kv_used >= self._settings.kv_soft else Pressure.CALM


PRESSED = 1 << 48
"""A pressure outweighs any number of tokens in the order of the servers."""

FULL = 1 << 60
"""Added to the rank of a server without room: where only such are left, nobody looks through all of them."""


class TokenRequest:
    """One turn's request. A rollout may have several open at once, and a server may owe one longer than its rollout lives."""

    __slots__ = ("charged", "prompt_tokens", "request_id", "rollout", "server", "turn")

    def __init__(self, request_id: str, rollout: RolloutAttempt, turn: int, prompt_tokens: int) -> None:
        self.request_id = request_id
        self.rollout = rollout
        self.turn = turn
        self.prompt_tokens = prompt_tokens
        self.server: str | None = None
        self.charged = 0
        """Tokens, to the server."""


class ServerRoom:
    __slots__ = ("capacity", "counted", "lanes", "load", "outstanding", "version")

    def __init__(self, version: int, capacity: int, lanes: ServerLanes) -> None:
        self.version = version
        self.capacity = capacity
        self.lanes = lanes
        self.counted = 0
        """Its lanes, as they are in the sum over all servers."""
        self.load = 0
        """Tokens of its requests."""
        self.outstanding = 0
        """Requests placed and not answered."""

    @property
    def has_room(self) -> bool:
        return self.outstanding < self.capacity


class Placement:
    """Servers, their versions, and the requests and tokens in flight on each.

    A request is charged its prompt and the mean completion seen so far; the real length is known only when it ends.
    """

    def __init__(self, settings: FlowSettings) -> None:
        self._settings = settings
        self.lanes = 0
        """Of all servers together."""
        self.servers: dict[str, ServerRoom] = {}
        self.requests: dict[str, TokenRequest] = {}
        self.waiting: dict[str, TokenRequest] = {}
        """Requests no server may answer yet, in order of arrival; all are in `requests` too."""
        self.apart: frozenset[str] = frozenset()
        """Servers that take nothing of training; empty but for evals that have servers of their own."""
        self._held: frozenset[str] = frozenset()
        """Of these, the ones that take requests of dedicated evals, which no other server does."""
        self._least_loaded = Ranking()
        self._answered = 0
        self._answered_tokens = 0

    def join(self, server: str, version: int, capacity: int) -> None:
        known = self.servers[server] = ServerRoom(version, capacity, ServerLanes(self._settings))
        self._weigh(server, known)

    def put_apart(self, held: tuple[str, ...], returning: tuple[str, ...]) -> None:
        """From now on these take nothing of training: the `held` are for dedicated evals, those `returning` for nobody."""
        self._held, self.apart = frozenset(held), frozenset((*held, *returning))

    def split_lanes(self) -> tuple[int, int]:
        """Lanes of the servers that are not apart, and of those held for evals."""
        apart = sum(self.servers[name].counted for name in self.apart)
        return self.lanes - apart, sum(self.servers[name].counted for name in self._held)

    def lose(self, server: str) -> list[TokenRequest]:
        """Forget the server; the requests placed on it are returned in order and forgotten too."""
        lost = [request for request in self.requests.values() if request.server == server]
        for request in lost:
            del self.requests[request.request_id]
            request.server = None
        self._least_loaded.remove(server)
        self.lanes -= self.servers.pop(server).counted
        return lost

    def serve(self, server: str, version: int) -> None:
        """The server has committed the version."""
        self.servers[server].version = version

    def place(self, request: TokenRequest) -> str | None:
        """The server for the request, now charged with it; None (and it waits) if none is young enough and has room."""
        self.requests[request.request_id] = request
        group = request.rollout.group
        name = self._choose(group)
        if name is None:
            self.waiting[request.request_id] = request
            return None
        if self.waiting:
            self.waiting.pop(request.request_id, None)
        group.server = request.server = name
        mean = self._answered_tokens // self._answered if self._answered else 0
        request.charged = request.prompt_tokens + mean
        self._charge(name, request.charged, +1)
        return name

    def hear(self, load: seen.ServerLoad, now: float) -> None:
        """A server's engine has reported its load."""
        server = self.servers.get(load.server)
        if server is not None:
            server.lanes.hear(load, server.outstanding, now)
            self._weigh(load.server, server)

    def next_waiting(self) -> TokenRequest | None:
        """The first waiting request that a server would take now."""
        if not self.waiting:
            return None
        youngest = self._find_youngest(self.servers.keys() - self.apart if self.apart else self.servers)
        dedicated = self._find_youngest(self._held)
        if youngest < 0 and dedicated < 0:
            return None
        for request in self.waiting.values():
            group = request.rollout.group
            if group.v_start <= (dedicated if group.dedicated else youngest):
                return request
        return None

    def _find_youngest(self, names: Iterable[str]) -> int:
        """The latest version of those with room; -1 where none has any."""
        servers = (self.servers[name] for name in names)
        return max((server.version for server in servers if server.has_room), default=-1)

    def finish(self, request_id: str, completion_tokens: int) -> TokenRequest | None:
        """Its server has answered; None if the request is not at a server (any more)."""
        request = self.requests.get(request_id)
        if request is None or request.server is None:
            return None
        del self.requests[request_id]
        self._charge(request.server, -request.charged, -1)
        self._answered += 1
        self._answered_tokens += completion_tokens
        return request

    def withdraw(self, request_id: str) -> bool:
        """Forget the request if it still waits. One that is at a server stays there until the server has answered."""
        if self.waiting.pop(request_id, None) is None:
            return False
        del self.requests[request_id]
        return True

    def _choose(self, group: RolloutGroup) -> str | None:
        sticky, v_start = group.server, group.v_start
        known = self.servers.get(sticky) if sticky is not None else None
        if known is not None:
            apart = self.apart and not self._serves(group, sticky)
            if apart or known.version < v_start or known.outstanding >= known.capacity:
                known = None
            elif not known.lanes.pressure:
                return sticky
        best = self._least_loaded.first_that(lambda server: self._takes(server, group), below=FULL)
        if known is None or best is None:
            return best
        other = self.servers[best]
        # the prefix cache is worth more than a little room
        moves = other.lanes.pressure < known.lanes.pressure and 2 * other.load <= known.load
        return best if moves else sticky

    def _takes(self, server: str, group: RolloutGroup) -> bool:
        known = self.servers.get(server)
        able = known is not None and known.version >= group.v_start and known.has_room
        return able and (not self.apart or self._serves(group, server))

    def _serves(self, group: RolloutGroup, server: str | None) -> bool:
        """While servers are apart: whether this one is there for such a group at all."""
        return server in self._held if group.dedicated else server not in self.apart

    def _charge(self, name: str, tokens: int, requests: int) -> None:
        server = self.servers[name]
        server.load += tokens
        server.outstanding += requests
        if server.outstanding == 0:
            server.lanes.calm_down()
        self._weigh(name, server)

    def _weigh(self, name: str, server: ServerRoom) -> None:
        """The server's place in the order, and its lanes in the sum, after a change."""
        rank = server.load + server.lanes.pressure * PRESSED
        self._least_loaded.put(name, rank if server.outstanding < server.capacity else rank + FULL)
        if not self._settings.adaptive_concurrency and server.counted:
            return  # they never change
        lanes = server.lanes.count(server.outstanding)
        self.lanes += lanes - server.counted
        server.counted = lanes


Reach = Callable[[RolloutGroup, GroupState], None]


class TokenRequests:
    """What is said to whoever asks for tokens. `say` takes a command, `reach` learns how far a group has come."""

    def __init__(self, lanes: Lanes, placement: Placement, say: do.Say, reach: Reach) -> None:
        self._lanes = lanes
        self._placement = placement
        self._say = say
        self._reach = reach

    def start(self, event: seen.TurnStarted) -> None:
        if event.request_id in self._placement.requests:
            return  # a repetition
        rollout = self._lanes.in_flight.get((event.rollout_id, event.attempt))
        if rollout is None or rollout.cancelled:
            self._say(do.RefuseRequest(event.request_id, "its rollout does not count any more"))
        elif event.request_id in rollout.requests:
            self._say(do.RefuseRequest(event.request_id, "a request of this id was answered before"))
        elif rollout.generated:
            self._say(do.RefuseRequest(event.request_id, "its rollout has said that it asks for no more tokens"))
        else:
            rollout.requests = (*rollout.requests, event.request_id)
            self._place(TokenRequest(event.request_id, rollout, event.turn, event.prompt_tokens))

    def finish(self, event: seen.TurnDone, travelling: bool, version: int) -> None:
        """A server has answered. `travelling`: a weight update is under way; `version`: served now."""
        request = self._placement.finish(event.request_id, event.completion_tokens)
        if request is None:
            return
        rollout = request.rollout
        if not rollout.ended:
            rollout.tokens += event.completion_tokens
            if event.finish_reason == "abort":
                rollout.aborted = rollout.aborted or travelling or rollout.version < version
            else:
                rollout.aborted = False  # another server has answered what a lost one had: what fails later, fails by itself
            self._reach(rollout.group, GroupState.ENV)
        if self._placement.waiting:
            self.place_waiting()  # it has left room

    def lose_server(self, server: str, why: str) -> None:
        """Another one answers what it had, from the start; what the rollouts have played so far is kept."""
        for request in self._placement.lose(server):
            rollout = request.rollout
            if rollout.ended or rollout.cancelled:
                self._say(do.RefuseRequest(request.request_id, why))
            else:
                rollout.aborted = True  # where its worker had brought the request there itself, the attempt fails
                self._place(request)

    def place_waiting(self) -> None:
        while (request := self._placement.next_waiting()) is not None:
            self._place(request)

    def withdraw(self, rollout: RolloutAttempt, why: str) -> None:
        """Answer what the rollout still waits for; what a server has is the server's to answer."""
        if not self._placement.waiting:
            return
        for request_id in rollout.requests:
            if self._placement.withdraw(request_id):
                self._say(do.RefuseRequest(request_id, why))

    def _place(self, request: TokenRequest) -> None:
        server = self._placement.place(request)
        if server is not None:
            # earlier turns first
            self._say(do.PlaceRequest(request.request_id, server, request.turn))
            self._reach(request.rollout.group, GroupState.GENERATING)
