"""The other processes of the run: who must be there, who is, which servers come and go, and what was noted against each.

Restarting a server is the supervisor's, which is asked to over `wire.supervisor_channel`; what a loss means is the core's. The
wire lets pass what is well formed and comes from a peer of the run. Whether it makes sense is checked by who asked for it, and
what does not is a violation of the protocol: a log line and an alert.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from telescope.config.sections import ClusterSettings
from telescope.records import EnvironmentCard
from telescope.wire.hub import Hub
from telescope.wire.messages import NOTED_OF_A_PEER, Hello
from telescope.wire.supervisor_channel import SupervisorChannel

log = logging.getLogger(__name__)

NAMED = 3
"""So many of those who are missing are named on the terminal, which has one line."""
SHOWN_CHARACTERS = 100
"""Of a fact of the model's folder."""


@dataclass
class Peers:
    """Peers by name. `ranks` are in rank order."""

    workers: tuple[str, ...]
    servers: tuple[str, ...]
    ranks: tuple[str, ...]
    present: dict[str, Hello] = field(default_factory=dict)
    _told: dict[str, Hello] = field(default_factory=dict)
    """By the fact of the model's folder, who told it first in this attempt: also a server that is started again must agree."""

    @classmethod
    def from_config(cls, cluster: ClusterSettings, servers: int | None = None) -> Peers:
        """Everyone whom the plan starts. `servers`: None: one an inference worker."""
        servers = cluster.inference_num_workers if servers is None else servers
        return cls(
            workers=tuple(f"worker-{index}" for index in range(cluster.env_num_workers)),
            servers=tuple(f"server-{index}" for index in range(servers)),
            ranks=tuple(f"trainer-{index}" for index in range(cluster.trainer_num_workers)),
        )

    @property
    def expected(self) -> tuple[str, ...]:
        return self.workers + self.servers + self.ranks

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.expected if name not in self.present)

    @property
    def all_ranks_present(self) -> bool:
        return all(rank in self.present for rank in self.ranks)

    @property
    def can_generate(self) -> bool:
        """Every worker and server is there: the first wave is then spread over all of them, in any order of arrival."""
        return all(name in self.present for name in self.workers + self.servers)

    @property
    def present_servers(self) -> list[str]:
        return [name for name in self.servers if name in self.present]

    def lose(self, peer: str) -> Hello:
        """It is gone, and may come again. Gives its last hello."""
        return self.present.pop(peer)

    def admit(self, peer: str, hello: Hello) -> str:
        """Note the peer. Returns why it can't take part, or an empty string."""
        if peer not in self.expected:
            return f"{peer} is not part of this run's plan, which knows {', '.join(self.expected)}"
        self.present[peer] = hello
        for other in self.present.values():
            different = _find_difference(other.environments, hello.environments) if other.role == hello.role == "worker" else ""
            if different:
                return (
                    f"{other.name} and {peer} load different prompts for environments.{different}: "
                    "give every environment worker the same files and settings"
                )
        return self._find_other_model(peer, hello)

    def _find_other_model(self, peer: str, hello: Hello) -> str:
        """Why the peer has not read the model that the others have, or an empty string; what it alone has read is noted."""
        own = hello.model
        for fact, value in own.facts.items() if own is not None else ():
            first = self._told.setdefault(fact, hello)
            if own is not None and first.model is not None and first.model.facts[fact] != value:
                ours, theirs = _show_apart(value, first.model.facts[fact])
                return (
                    f"{peer} is refused, because it has read another model.name={own.name} than {first.name}: {fact} is "
                    f"{ours} in {own.folder} on {hello.host}, and was {theirs} in {first.model.folder} on {first.host}: put "
                    "the same files there on every host and leave them as they are, then begin a new run"
                )
        return ""


def name_few(names: Sequence[str]) -> str:
    """`server-0, server-1, server-2 and 297 more`."""
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _find_difference(some: tuple[EnvironmentCard, ...], others: tuple[EnvironmentCard, ...]) -> str:
    digests = {card.name: card.digest for card in some}
    return next((card.name for card in others if digests.get(card.name) != card.digest), "")


def _show_apart(some: str, other: str) -> tuple[str, str]:
    """Both values of a fact; long ones from a little before where they part."""
    if max(len(some), len(other)) <= SHOWN_CHARACTERS:
        return some, other
    same = next((at for at, (one, two) in enumerate(zip(some, other, strict=False)) if one != two), min(len(some), len(other)))
    begin = max(0, same - SHOWN_CHARACTERS // 4)
    return _cut(some, begin), _cut(other, begin)


def _cut(value: str, begin: int) -> str:
    end = begin + SHOWN_CHARACTERS
    return f"{'…' if begin else ''}{value[begin:end]}{'…' if end < len(value) else ''}"


class FencedServers:
    """`limit`: restarts that the supervisor has for each (`cluster.max_server_restarts`); with 0 none comes back."""

    def __init__(self, supervisor: SupervisorChannel, hub: Hub, peers: Peers, limit: int) -> None:
        self._supervisor, self._hub, self._peers, self._limit = supervisor, hub, peers, limit
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
        return self.underway and self._limit > 0 and peer in self._peers.servers

    def find_ended(self) -> list[tuple[str, str]]:
        """Servers still taken for alive whose process the supervisor has seen end, each with how."""
        if not (self.underway and self._limit):
            return []
        self._supervisor.read()
        present = self._peers.present
        ends = self._supervisor.ends.items()
        return [(name, ended.how) for name, ended in ends if name in present and present[name].pid == ended.pid]

    def find_dying(self) -> tuple[str, ...]:
        """Servers given up whose process the supervisor has not seen end yet."""
        if self._given_up:
            self._supervisor.read()
            ends = self._supervisor.ends
            self._given_up = {name: pid for name, pid in self._given_up.items() if name not in ends or ends[name].pid != pid}
        return tuple(self._given_up)

    def give_up(self, server: str, reason: str) -> None:
        """Hear nothing more of its process, and have the supervisor see to it that there is nothing more to hear."""
        hello = self._peers.lose(server)
        self._hub.expel(server, hello.incarnation, reason)
        self._supervisor.ask_to_fence(server, hello.pid, reason)
        self._given_up[server] = hello.pid


class Alerts(Protocol):
    """The part of the recorder that is used here."""

    def alert(self, level: str, source: str, message: str) -> None: ...


class ProtocolViolations:
    def __init__(self, alerts: Alerts) -> None:
        self._alerts = alerts
        self.counts: Counter[str] = Counter()

    def note(self, peer: str, sentence: str) -> None:
        """`peer` has sent what it should not; `sentence` says what, and what was done about it."""
        self.counts[peer] += 1
        if self.counts[peer] > NOTED_OF_A_PEER:
            return
        if self.counts[peer] == NOTED_OF_A_PEER:
            sentence += " (further ones of this process are not noted)"
        log.warning("%s: %s", peer, sentence)
        self._alerts.alert("warning", peer, sentence)
