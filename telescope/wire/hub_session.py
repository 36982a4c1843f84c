"""The hub's end of the protocol without I/O: who is here, what each is owed, who is silent or stuck.

Takes frames and a `now` (seconds, any monotonic clock), and leaves frames in `outbox` and news in `happenings`. Never raises
because of what a peer sent: such messages are counted in `malformed` and dropped. Refuses sockets and clocks (hub.py brings
them); a link's end is session.py.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from telescope.wire.channel import MessageChannel
from telescope.wire.codec import NO_ARRAYS, MalformedMessage, Packet, RawArrays, decode, encode
from telescope.wire.messages import HUB_PORT, SESSION_OF_PEER, Ack, Body, Goodbye, Heartbeat, Hello, Port, Reject, Stop, Welcome
from telescope.wire.peer_events import Delivery, Happening, PeerJoined, PeerLeft, PeerLost, PeerStuck

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telescope.wire.codec import Buffer

MAX_CAPACITY = 1_000_000
MAX_RETIRED = 1024
"""Incarnations remembered as gone, so that a late one of them is refused with its reason."""
UNKNOWN_PEER = "(unknown)"


class UnknownPeer(LookupError):
    """No peer of this name has ever said hello here."""


@dataclass(frozen=True)
class HubIdentity:
    """What a hello must agree with."""

    run: str
    attempt: str
    config_hash: str


STARTING = "starting"
"""What a peer does that has not said anything else yet."""


@dataclass(frozen=True)
class Timing:
    heartbeat_s: float
    silent_s: float
    stuck_s: float


@dataclass(slots=True)
class Peer:
    """A peer in session. `route` is the routing id of its connection."""

    hello: Hello
    route: bytes
    channel: MessageChannel
    heard: float
    moved: float
    """When it last made progress, or got something to do while it had nothing."""
    connection: int = 0
    progress: int = -1
    doing: str = STARTING
    told_stuck: bool = False
    stopped: bool = False
    elsewhere: set[int] = field(default_factory=set)
    """Its questions that another process is answering."""

    @property
    def has_work(self) -> bool:
        """It has orders, and does not wait for an answer from here: a worker whose turns are at the servers is not at fault."""
        return self.channel.orders > 0 and not self.channel.questions and not self.elsewhere


class HubSession:
    """All peers as the hub sees them. `happenings` are for the application, `outbox` is `(routing id, frames)`."""

    def __init__(self, identity: HubIdentity, timing: Timing, now: float, port: Port = HUB_PORT) -> None:
        self.identity = identity
        self._port = port
        self.timing = timing
        self.peers: dict[str, Peer] = {}
        self.outbox: deque[tuple[bytes, list[Buffer]]] = deque()
        self.happenings: deque[Happening] = deque()
        self.malformed: Counter[tuple[str, str]] = Counter()
        """How often, by (peer, reason)."""
        self.last_malformed = ""
        self._by_route: dict[bytes, Peer] = {}
        self._names: set[str] = set()
        self._unheard: set[str] = set()  # came again, and the application may not know yet
        self._retired: OrderedDict[tuple[str, str], str] = OrderedDict()  # (name, incarnation) -> why
        self._owing: dict[str, Peer] = {}  # peers with acks to be told
        self._beat_due = now

    # ---- what the application does -----------------------------------------------------------------------------------

    def credits(self, name: str) -> int:
        """Work orders that may still be sent; 0 for a peer that is not here."""
        peer = self.peers.get(name)
        return peer.channel.credits if peer else 0

    def send(self, name: str, body: Body, raw: RawArrays = NO_ARRAYS, answers: Delivery | None = None, *, now: float) -> int:
        """Send to a peer; gives the message's number, 0 if it is not kept.

        To a peer that has gone (its PeerLost or PeerLeft has been or will be told) nothing is sent and 0 comes back, also where
        a new process of its name is here whose PeerJoined has not been taken yet: what is sent is meant for the old one. The
        same holds for the answer to a message of an incarnation that has gone. Raises `NoCredit`, `UnknownPeer`, or
        `ValueError` where the message is not one for this peer.
        """
        peer = self.peers.get(name)
        if peer is None:
            if name not in self._names:
                raise UnknownPeer(f"{type(body).__name__} cannot be sent: no process {name} has said hello")
            return 0
        if name in self._unheard and self._is_unheard(name):
            return 0
        if type(body) not in self._port.from_hub[peer.hello.role]:
            raise ValueError(f"{type(body).__name__} is not sent to a {peer.hello.role} ({name})")
        if answers is not None and answers.peer != name:
            raise ValueError(f"a message of {answers.peer} cannot be answered to {name}")
        if answers is not None and answers.incarnation != peer.hello.incarnation:
            return 0
        had_work = peer.has_work
        seq, frames = peer.channel.send(body, raw, answers.seq if answers else 0)
        if peer.has_work and not had_work:
            peer.moved = now
        peer.stopped = peer.stopped or isinstance(body, Stop)
        self.outbox.append((peer.route, frames))
        return seq

    def _is_unheard(self, name: str) -> bool:
        waiting = any(isinstance(told, PeerJoined) and told.peer == name for told in self.happenings)
        if not waiting:
            self._unheard.discard(name)
        return waiting

    def acknowledge(self, delivery: Delivery) -> None:
        """What was delivered is safe (on disk): its sender may forget it."""
        peer = self.peers.get(delivery.peer)
        if peer is not None and peer.hello.incarnation == delivery.incarnation:
            peer.channel.mark_safe(delivery.seq)
            self._owing[delivery.peer] = peer

    def mark_elsewhere(self, delivery: Delivery, waits: bool, now: float) -> None:
        """The sender of the delivered question has its answer from here, and now waits (or waits no longer) for another
        process: meanwhile it is not at fault for its stillness."""
        peer = self.peers.get(delivery.peer)
        if peer is None or peer.hello.incarnation != delivery.incarnation:
            return
        had_work = peer.has_work
        (peer.elsewhere.add if waits else peer.elsewhere.discard)(delivery.seq)
        if peer.has_work and not had_work:
            peer.moved = now

    def expel(self, name: str, incarnation: str, why: str) -> None:
        """The application is done with this process of the peer: it is told so, and neither heard nor sent anything from now
        on. Nothing happens where it has gone already; no PeerLost is told, as the application knows."""
        peer = self.peers.get(name)
        if peer is not None and peer.hello.incarnation == incarnation:
            self._reject(peer.route, f"{name} is given up: {why}")
            self._retire(peer, f"was given up ({why})")

    def stop_all(self, reason: str, now: float) -> None:
        """Tell each peer that has not been told."""
        for name in [name for name, peer in self.peers.items() if not peer.stopped]:
            self.send(name, Stop(reason), now=now)

    # ---- what arrives ------------------------------------------------------------------------------------------------

    def receive(self, route: bytes, user: str, frames: Sequence[Buffer], now: float) -> None:
        """One message from the connection `route`, whose key belongs to the process `user`."""
        peer = self._by_route.get(route)
        try:
            packet = decode(frames)
            if isinstance(packet.envelope.body, Hello):
                self._take_hello(route, user, packet.envelope.body, now)
            elif peer is None:
                raise MalformedMessage("no hello", f"{type(packet.envelope.body).__name__} before a hello")
            else:
                self._take(peer, packet, now)
        except MalformedMessage as error:
            self._count(peer.hello.name if peer else user, error)
            if error.reason == "protocol" and peer is None:
                self._reject(route, f"{error}; start all processes of a run from one version of Telescope")

    def _count(self, name: str, error: MalformedMessage) -> None:
        self.malformed[(name or UNKNOWN_PEER, error.reason)] += 1
        self.last_malformed = str(error)

    def _take_hello(self, route: bytes, user: str, hello: Hello, now: float) -> None:
        refusal = self._find_refusal(user, hello)
        if refusal:
            self._count(user, MalformedMessage("refused hello", refusal))
            self._reject(route, refusal)
            return
        known = self.peers.get(hello.name)
        if known is not None and _comes_late(known, route, hello):
            raise MalformedMessage("late hello", f"connection {hello.connection} of {hello.incarnation} ({hello.name}) is over")
        if known is not None and known.hello.incarnation != hello.incarnation:
            self._retire(known, "was replaced: a new process said hello under its name")
            self.happenings.append(PeerLost(hello.name, f"{hello.name} was replaced by a new process of its name"))
            known = None
        if known is None:
            known = self._admit(route, hello, now)
        else:
            self._by_route.pop(known.route, None)
        known.route, known.heard, known.connection = route, now, hello.connection
        self._by_route[route] = known
        self.outbox.append((route, encode(Welcome(self.timing.heartbeat_s, self.timing.silent_s, hello.connection))))
        self.outbox.extend((route, kept.frames) for kept in known.channel.kept.values())

    def _admit(self, route: bytes, hello: Hello, now: float) -> Peer:
        peer = Peer(hello, route, MessageChannel(hello.capacity), heard=now, moved=now)
        self.peers[hello.name] = peer
        if hello.name in self._names:
            self._unheard.add(hello.name)
        self._names.add(hello.name)
        self.happenings.append(PeerJoined(hello.name, hello))
        return peer

    def _find_refusal(self, user: str, hello: Hello) -> str:
        """Why this hello is not welcome, as a whole sentence; empty if it is."""
        ours, name = self.identity, hello.name
        if user != name:
            return f"the process says it is {name[:64]!r}, but its key belongs to {user!r}"
        if hello.role not in self._port.from_peer:
            return f"{name} is a {hello.role}, and this port is for {', '.join(self._port.from_peer)}s"
        if name.rpartition("-")[0] != hello.role:
            return f"{name} says it is a {hello.role}; a {hello.role} is named {hello.role}-<index>"
        if hello.run != ours.run:
            return f"{name} belongs to run {hello.run[:64]!r}, this is the hub of run {ours.run!r}"
        if hello.attempt != ours.attempt:
            return f"{name} belongs to attempt {hello.attempt[:64]!r}, this is attempt {ours.attempt!r}: end the old processes"
        if hello.config_hash != ours.config_hash:
            return (
                f"{name} runs with config {hello.config_hash[:12]!r}, the orchestrator with {ours.config_hash[:12]!r}: "
                "start both from the same config.json"
            )
        if not 0 <= hello.capacity <= MAX_CAPACITY:
            return f"{name} offers capacity={hello.capacity}, expected 0 to {MAX_CAPACITY}"
        why = self._retired.get((name, hello.incarnation))
        return f"this process of {name} {why}; start it anew" if why else ""

    def _reject(self, route: bytes, reason: str) -> None:
        self.outbox.append((route, encode(Reject(reason))))

    def _take(self, peer: Peer, packet: Packet, now: float) -> None:
        envelope, body = packet.envelope, packet.envelope.body
        if type(body) in SESSION_OF_PEER:
            peer.heard = now
            self._take_session(peer, body, now)
            return
        name = peer.hello.name
        if type(body) not in self._port.from_peer[peer.hello.role]:
            raise MalformedMessage("direction", f"{type(body).__name__} does not come from a {peer.hello.role}")
        peer.heard = now
        try:
            fresh = peer.channel.accept(envelope)
        finally:
            if peer.channel.acks:
                self._owing[name] = peer
        if fresh:
            _note_progress(peer, now)
            self.happenings.append(Delivery(name, envelope.seq, body, packet.raw, envelope.answers, peer.hello.incarnation))

    def _take_session(self, peer: Peer, body: Body, now: float) -> None:
        match body:
            case Heartbeat(progress=progress, doing=doing):
                peer.doing = doing[:200]
                if progress != peer.progress:
                    peer.progress = progress
                    _note_progress(peer, now)
            case Ack(seqs=seqs):
                peer.channel.forget(seqs)
            case Goodbye(error=error):
                name, orders = peer.hello.name, peer.channel.orders
                self.outbox.append((peer.route, encode(Goodbye())))
                self._retire(peer, "has said goodbye")
                self.happenings.append(PeerLost(name, error[:2000]) if error else PeerLeft(name, orders))
            case _:
                pass

    def _retire(self, peer: Peer, why: str) -> None:
        name = peer.hello.name
        self.peers.pop(name, None)
        self._owing.pop(name, None)
        self._by_route.pop(peer.route, None)
        self._retired[(name, peer.hello.incarnation)] = why
        while len(self._retired) > MAX_RETIRED:
            self._retired.popitem(last=False)

    # ---- time --------------------------------------------------------------------------------------------------------

    @property
    def owes_acks(self) -> bool:
        return bool(self._owing)

    def flush_acks(self) -> None:
        """Tell each peer what is safe here. The driver calls it ACK_DELAY_S after the first is owed."""
        for peer in self._owing.values():
            acks = peer.channel.take_acks()
            if acks:
                self.outbox.append((peer.route, encode(Ack(acks))))
        self._owing.clear()

    def tick(self, now: float) -> None:
        """Heartbeats, and the judgement who is silent or stuck. The driver reads its socket dry before it calls this."""
        if now >= self._beat_due:
            self._beat_due = now + self.timing.heartbeat_s
            frames = encode(Heartbeat(0, "orchestrating"))
            self.outbox.extend((peer.route, frames) for peer in self.peers.values())
        for peer in list(self.peers.values()):
            if now - peer.heard > self.timing.silent_s:
                self._lose_silent(peer, now - peer.heard)
            elif self._is_stuck(peer, now):
                peer.told_stuck = True
                self.happenings.append(PeerStuck(peer.hello.name, peer.doing, now - peer.moved))

    def _is_stuck(self, peer: Peer, now: float) -> bool:
        return peer.has_work and not peer.told_stuck and now - peer.moved > self.timing.stuck_s

    def _lose_silent(self, peer: Peer, seconds: float) -> None:
        name = peer.hello.name
        why = f"was not heard for {seconds:.1f} s (limit silent_s={self.timing.silent_s:g}) and is given up"
        self._reject(peer.route, f"{name} {why}")
        self._retire(peer, why)
        doing = f"; it was last doing: {peer.doing}" if peer.doing not in ("", STARTING) else ""
        self.happenings.append(PeerLost(name, f"{name} (pid {peer.hello.pid} on {peer.hello.host}) {why}{doing}"))

    def excuse(self, seconds: float, now: float) -> None:
        """The hub itself was not listening that long: nobody's silence or stillness meanwhile counts."""
        for peer in self.peers.values():
            peer.heard = min(now, peer.heard + seconds)
            peer.moved = min(now, peer.moved + seconds)


def _comes_late(peer: Peer, route: bytes, hello: Hello) -> bool:
    """A hello left over from a connection or process before the present one: ZeroMQ may hand it out after the new one's."""
    if hello.incarnation != peer.hello.incarnation:
        return hello.started_ns < peer.hello.started_ns
    return route != peer.route and hello.connection <= peer.connection


def _note_progress(peer: Peer, now: float) -> None:
    peer.moved = now
    peer.told_stuck = False
