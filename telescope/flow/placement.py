"""Which server answers a request. A group's requests stay on one server, whose prefix cache knows their prompt; a group's first
request goes where the fewest tokens are in flight. Never to a server older than the group (v_start)."""

from __future__ import annotations

from telescope.flow.lanes import Flight
from telescope.flow.ranking import Ranking


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
    __slots__ = ("load", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.load = 0


class Placement:
    """Servers, their versions, and the tokens in flight on each.

    A request is charged its prompt and the mean completion seen so far; the real length is known only when it ends.
    """

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self.requests: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        """Requests no server may answer yet, in order of arrival; all are in `requests` too."""
        self._least_loaded = Ranking()
        self._answered = 0
        self._answered_tokens = 0

    def join(self, server: str, version: int) -> None:
        self.servers[server] = Server(version)
        self._least_loaded.put(server, 0)

    def lose(self, server: str) -> list[Request]:
        """Forget the server; the requests placed on it are returned in order and forgotten too."""
        lost = [request for request in self.requests.values() if request.server == server]
        for request in lost:
            del self.requests[request.request_id]
        self._least_loaded.remove(server)
        del self.servers[server]
        return lost

    def serve(self, server: str, version: int) -> None:
        """The server has committed the version."""
        self.servers[server].version = version

    def place(self, request: Request) -> str | None:
        """The server for the request, now charged with it; None (and it waits) if none is young enough."""
        self.requests[request.request_id] = request
        group = request.flight.group
        name = group.server
        if name is None or not self._serves(name, group.v_start):
            name = self._least_loaded.first_that(lambda server: self._serves(server, group.v_start))
        if name is None:
            self.waiting[request.request_id] = request
            return None
        self.waiting.pop(request.request_id, None)
        group.server = request.server = name
        request.tokens = request.prompt_tokens + self._answered_tokens // max(1, self._answered)
        self._charge(name, request.tokens)
        return name

    def finish(self, request_id: str, completion_tokens: int) -> Request | None:
        """The request has its answer; None if it is not known (any more)."""
        request = self.drop(request_id)
        if request is not None:
            self._answered += 1
            self._answered_tokens += completion_tokens
        return request

    def drop(self, request_id: str) -> Request | None:
        """Forget the request and what it was charged."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        self.waiting.pop(request_id, None)
        if request.server is not None:
            self._charge(request.server, -request.tokens)
        return request

    def _serves(self, server: str, version: int) -> bool:
        known = self.servers.get(server)
        return known is not None and known.version >= version

    def _charge(self, name: str, tokens: int) -> None:
        server = self.servers[name]
        server.load += tokens
        self._least_loaded.put(name, server.load)
