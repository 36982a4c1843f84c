"""Which server answers a request. A group's requests stay on one server, whose prefix cache knows their prompt; a group's first
request goes where the KV cache is least pressed, and among those where the fewest tokens are in flight. A pressed server loses
its groups to one that is not and has half its tokens at most. Never to a server older than the group (v_start), and never to a
full one: a request counts at its server until the server has answered it, whatever has become of its rollout."""

from __future__ import annotations

from telescope.flow.concurrency import Share
from telescope.flow.events import ServerLoad
from telescope.flow.groups import Group
from telescope.flow.lanes import Flight
from telescope.flow.ranking import Ranking
from telescope.flow.settings import FlowSettings

PRESSED = 1 << 48
"""A pressure outweighs any number of tokens in the order of the servers."""

FULL = 1 << 60
"""Added to the rank of a server without room: where only such are left, nobody looks through all of them."""


class Request:
    __slots__ = ("flight", "prompt_tokens", "request_id", "server", "tokens", "turn")

    def __init__(self, request_id: str, flight: Flight, turn: int, prompt_tokens: int) -> None:
        self.request_id = request_id
        self.flight = flight
        self.turn = turn
        self.prompt_tokens = prompt_tokens
        self.server: str | None = None
        self.tokens = 0  # charged to the server


class Server:
    __slots__ = ("capacity", "lanes", "load", "outstanding", "share", "version")

    def __init__(self, version: int, capacity: int, share: Share) -> None:
        self.version = version
        self.capacity = capacity
        self.share = share
        self.lanes = 0  # as counted in the sum over all servers
        self.load = 0
        self.outstanding = 0  # requests placed and not answered

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
        self.servers: dict[str, Server] = {}
        self.requests: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        """Requests no server may answer yet, in order of arrival; all are in `requests` too."""
        self._least_loaded = Ranking()
        self._answered = 0
        self._answered_tokens = 0

    def join(self, server: str, version: int, capacity: int) -> None:
        known = self.servers[server] = Server(version, capacity, Share(self._settings))
        self._weigh(server, known)

    def lose(self, server: str) -> list[Request]:
        """Forget the server; the requests placed on it are returned in order and forgotten too."""
        lost = [request for request in self.requests.values() if request.server == server]
        for request in lost:
            del self.requests[request.request_id]
            request.server = None
        self._least_loaded.remove(server)
        self.lanes -= self.servers.pop(server).lanes
        return lost

    def serve(self, server: str, version: int) -> None:
        """The server has committed the version."""
        self.servers[server].version = version

    def place(self, request: Request) -> str | None:
        """The server for the request, now charged with it; None (and it waits) if none is young enough and has room."""
        self.requests[request.request_id] = request
        group = request.flight.group
        name = self._choice(group)
        if name is None:
            self.waiting[request.request_id] = request
            return None
        if self.waiting:
            self.waiting.pop(request.request_id, None)
        group.server = request.server = name
        mean = self._answered_tokens // self._answered if self._answered else 0
        request.tokens = request.prompt_tokens + mean
        self._charge(name, request.tokens, +1)
        return name

    def hear(self, load: ServerLoad, now: float) -> None:
        """A server's engine has reported its load."""
        server = self.servers.get(load.server)
        if server is not None:
            server.share.hear(load, server.outstanding, now)
            self._weigh(load.server, server)

    def next_waiting(self) -> Request | None:
        """The first waiting request that a server would take now."""
        if not self.waiting:
            return None
        youngest = max((server.version for server in self.servers.values() if server.has_room), default=-1)
        if youngest < 0:
            return None
        return next((request for request in self.waiting.values() if request.flight.group.v_start <= youngest), None)

    def finish(self, request_id: str, completion_tokens: int) -> Request | None:
        """Its server has answered; None if the request is not at a server (any more)."""
        request = self.requests.get(request_id)
        if request is None or request.server is None:
            return None
        del self.requests[request_id]
        self._charge(request.server, -request.tokens, -1)
        self._answered += 1
        self._answered_tokens += completion_tokens
        return request

    def withdraw(self, request_id: str) -> bool:
        """Forget the request if it still waits. One that is at a server stays there until the server has answered."""
        if self.waiting.pop(request_id, None) is None:
            return False
        del self.requests[request_id]
        return True

    def _choice(self, group: Group) -> str | None:
        sticky, v_start = group.server, group.v_start
        known = self.servers.get(sticky) if sticky is not None else None
        if known is not None:
            if known.version < v_start or known.outstanding >= known.capacity:
                known = None
            elif not known.share.pressure:
                return sticky
        best = self._least_loaded.first_that(lambda server: self._takes(server, v_start), below=FULL)
        if known is None or best is None:
            return best
        other = self.servers[best]
        # the prefix cache is worth more than a little room
        moves = other.share.pressure < known.share.pressure and 2 * other.load <= known.load
        return best if moves else sticky

    def _takes(self, server: str, version: int) -> bool:
        known = self.servers.get(server)
        return known is not None and known.version >= version and known.has_room

    def _charge(self, name: str, tokens: int, requests: int) -> None:
        server = self.servers[name]
        server.load += tokens
        server.outstanding += requests
        if server.outstanding == 0:
            server.share.idle()
        self._weigh(name, server)

    def _weigh(self, name: str, server: Server) -> None:
        """The server's place in the order, and its lanes in the sum, after a change."""
        rank = server.load + server.share.pressure * PRESSED
        self._least_loaded.put(name, rank if server.outstanding < server.capacity else rank + FULL)
        if not self._settings.adaptive and server.lanes:
            return  # they never change
        lanes = server.share.lanes(server.outstanding)
        self.lanes += lanes - server.lanes
        server.lanes = lanes
