"""Servers that come and go while the run goes on: what the supervisor says of them, and whom it is asked to fence.

Owns what is done with the channel to the supervisor. Restarting is the supervisor's; what a loss means is the core's.
"""

from __future__ import annotations

from telescope.orchestrator.roster import Roster
from telescope.wire.hub import Hub
from telescope.wire.supervisor_channel import SupervisorChannel


class Servers:
    """`limit`: restarts that the supervisor has for each (`cluster.max_server_restarts`); with 0 none comes back."""

    def __init__(self, supervisor: SupervisorChannel, hub: Hub, roster: Roster, limit: int) -> None:
        self._supervisor, self._hub, self._roster, self._limit = supervisor, hub, roster, limit
        self.underway = False
        """Every part of the run has been there."""
        self._given_up: dict[str, int] = {}
        """The pid of each server's last process that was given up, until it has ended."""

    def begin(self) -> None:
        """All parts are there: from now on the run waits for a server rather than end with it."""
        self.underway = True
        if self._limit:
            self._supervisor.tell_underway()

    def end(self) -> None:
        self._supervisor.tell_ending()

    def can_return(self, peer: str) -> bool:
        return self.underway and self._limit > 0 and peer in self._roster.servers

    def ended(self) -> list[tuple[str, str]]:
        """Servers still taken for alive whose process the supervisor has seen end, each with how."""
        if not (self.underway and self._limit):
            return []
        self._supervisor.read()
        present = self._roster.present
        ends = self._supervisor.ends.items()
        return [(name, ended.how) for name, ended in ends if name in present and present[name].pid == ended.pid]

    def dying(self) -> tuple[str, ...]:
        """Servers given up whose process the supervisor has not seen end yet."""
        if self._given_up:
            self._supervisor.read()
            ends = self._supervisor.ends
            self._given_up = {name: pid for name, pid in self._given_up.items() if name not in ends or ends[name].pid != pid}
        return tuple(self._given_up)

    def give_up(self, server: str, reason: str) -> None:
        """Hear nothing more of its process, and have the supervisor see to it that there is nothing more to hear."""
        hello = self._roster.lose(server)
        self._hub.expel(server, hello.incarnation, reason)
        self._supervisor.ask_to_fence(server, hello.pid, reason)
        self._given_up[server] = hello.pid
