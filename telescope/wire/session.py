"""The protocol without I/O: what each side does when frames arrive, time passes, or the application speaks.

`PeerSession` is a link's end, `HubSession` the orchestrator's. Both take frames and a `now` (seconds, any monotonic clock),
and leave frames to be sent in an outbox. Neither raises because of what the other side sent: such messages are counted in
`malformed` and dropped. Refuses sockets, threads, files and clocks of its own (hub.py and link.py bring them).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from telescope.wire.channel import Channel
from telescope.wire.codec import NO_ARRAYS, Malformed, Packet, RawArrays, decode, encode
from telescope.wire.messages import (
    Ack,
    Body,
    Goodbye,
    Heartbeat,
    Hello,
    Reject,
    Stop,
    Welcome,
)
from telescope.wire.rules import FROM_HUB, FROM_PEER, SESSION_OF_HUB, SESSION_OF_PEER

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from telescope.wire.codec import Buffer

HUB = "orchestrator"
ACK_DELAY_S = 0.1
"""Acks wait this long for company: one message tells many."""
ACK_BATCH = 64
MAX_CAPACITY = 1_000_000
MAX_RETIRED = 1024
"""Incarnations remembered as gone, so that a late one of them is refused with its reason."""
UNKNOWN_PEER = "(unknown)"


@dataclass(frozen=True, eq=False)
class Delivery:
    """One message for the application. `answers` is the number of the own message that it settles, else 0."""

    peer: str
    seq: int
    body: Body
    frames: RawArrays = NO_ARRAYS
    """The arrays undecoded, to be passed on as they are."""
    answers: int = 0
    incarnation: str = ""

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Read-only views, in the order of the message's layout."""
        return self.frames.views()


@dataclass(frozen=True)
class PeerJoined:
    peer: str
    hello: Hello


@dataclass(frozen=True)
class PeerLeft:
    """A clean Goodbye. `orders` were still unanswered; nobody will answer them."""

    peer: str
    orders: int


@dataclass(frozen=True)
class PeerLost:
    """Silent, failed by its own word, or replaced by a new process of its name. `cause` is a whole sentence."""

    peer: str
    cause: str


@dataclass(frozen=True)
class PeerStuck:
    """It beats, has orders, and has made no progress for `seconds`. Told once, until it makes progress again."""

    peer: str
    doing: str
    seconds: float


Happening = Delivery | PeerJoined | PeerLeft | PeerLost | PeerStuck


class UnknownPeer(LookupError):
    """No peer of this name has ever said hello here."""


# ---- a link's end ----------------------------------------------------------------------------------------------------


class PeerSession:
    """One peer's view. `lost` and `refused` are sentences once the session is over; nothing is sent after that."""

    def __init__(self, hello: Hello, now: float) -> None:
        self.hello = hello
        self.channel = Channel(None)
        self.outbox: deque[list[Buffer]] = deque()
        self.malformed: Counter[str] = Counter()
        self.welcomed = False
        self.ever_welcomed = False
        self.stopping = False
        self.refused = ""
        self.lost = ""
        self._connected = False
        self._heartbeat_s = 1.0
        self._silent_s = 15.0
        self._heard = now
        self._beat_due = now
        self._ack_due = float("inf")
        self._progress = 0
        self._doing = "starting"

    @property
    def over(self) -> bool:
        return bool(self.refused or self.lost)

    def connected(self, now: float) -> None:
        """The transport is up (again): say hello. What is kept follows once the hub says welcome."""
        self._connected = True
        self._greet(now)

    def disconnected(self) -> None:
        """Frames on their way may be lost: the outbox is too, as all that matters in it is kept."""
        self._connected = False
        self.welcomed = False
        self.outbox.clear()

    def _greet(self, now: float) -> None:
        self.welcomed = False
        self._beat_due = now + self._heartbeat_s
        self.outbox.append(encode(self.hello))

    def send(self, body: Body, raw: RawArrays = NO_ARRAYS, answers: int = 0) -> int:
        """Number, keep and queue the message. Raises `ValueError` if this role may not send it."""
        if type(body) not in FROM_PEER[self.hello.role]:
            raise ValueError(f"a {self.hello.role} does not send {type(body).__name__}")
        seq, frames = self.channel.send(body, raw, answers)
        if self.welcomed:
            self.outbox.append(frames)
        return seq

    def goodbye(self, error: str) -> None:
        if self.welcomed and not self.over:
            self._send_acks()
            self.outbox.append(encode(Goodbye(error)))

    def progress(self, doing: str) -> None:
        self._progress += 1
        self._doing = doing[:200]

    def receive(self, frames: Sequence[Buffer], now: float) -> Delivery | None:
        """Take one message; gives what the application should see of it."""
        if self.over:
            return None
        try:
            return self._take(decode(frames), now)
        except Malformed as error:
            self.malformed[error.reason] += 1
            return None

    def _take(self, packet: Packet, now: float) -> Delivery | None:
        envelope, body = packet.envelope, packet.envelope.body
        if type(body) in SESSION_OF_HUB:
            self._heard = now
            self._take_session(body, now)
            return None
        if type(body) not in FROM_HUB[self.hello.role]:
            raise Malformed("direction", f"{type(body).__name__} is not for a {self.hello.role}")
        self._heard = now
        fresh = self.channel.accept(envelope)
        self._schedule_acks(now)
        if not fresh:
            return None
        self.stopping = self.stopping or isinstance(body, Stop)
        return Delivery(HUB, envelope.seq, body, packet.raw, envelope.answers)

    def _take_session(self, body: Body, now: float) -> None:
        match body:
            case Welcome(heartbeat_s=heartbeat_s, silent_s=silent_s):
                self._heartbeat_s, self._silent_s = max(0.01, heartbeat_s), max(0.05, silent_s)
                if not self.welcomed:
                    self.welcomed = self.ever_welcomed = True
                    self.outbox.extend(kept.frames for kept in self.channel.kept.values())
                    self._beat_due = now
            case Reject(reason=reason):
                self.refused = reason
            case Ack(seqs=seqs):
                self.channel.acknowledged(seqs)
            case _:
                pass

    def _schedule_acks(self, now: float) -> None:
        if len(self.channel.acks) >= ACK_BATCH:
            self._ack_due = now
        elif self.channel.acks:
            self._ack_due = min(self._ack_due, now + ACK_DELAY_S)

    def _send_acks(self) -> None:
        self._ack_due = float("inf")
        acks = self.channel.take_acks()
        if acks:
            self.outbox.append(encode(Ack(acks)))

    def tick(self, now: float) -> None:
        """Heartbeats, acks, another hello while unwelcome, and the judgement that the hub is gone."""
        if self.over:
            return
        if self.ever_welcomed and now - self._heard > self._silent_s:
            self.lost = f"the orchestrator was not heard for {now - self._heard:.1f} s (limit silent_s={self._silent_s:g})"
            return
        if self.welcomed and now >= self._ack_due:
            self._send_acks()
        if self._connected and now >= self._beat_due:
            self._beat_due = now + self._heartbeat_s
            self.outbox.append(encode(Heartbeat(self._progress, self._doing) if self.welcomed else self.hello))

    def excuse(self, seconds: float) -> None:
        """This process itself slept that long (stopped, swapped out): the hub's silence meanwhile counts for nothing."""
        self._heard += seconds

    def wait_s(self, now: float) -> float:
        """Seconds until `tick` has something to do."""
        due = min(
            self._beat_due if self._connected else now + self._heartbeat_s, self._ack_due if self.welcomed else float("inf")
        )
        if self.ever_welcomed:
            due = min(due, self._heard + self._silent_s + 0.001)
        return min(max(0.0, due - now), 1.0)


# ---- the hub's end ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HubIdentity:
    """What a hello must agree with."""

    run: str
    attempt: str
    config_hash: str


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
    channel: Channel
    heard: float
    moved: float
    """When it last made progress, or got an order while it had none."""
    progress: int = -1
    doing: str = "starting"
    told_stuck: bool = False
    stopped: bool = False
    malformed: Counter[str] = field(default_factory=Counter)


class HubSession:
    """All peers as the hub sees them. `happenings` are for the application, `outbox` is `(routing id, frames)`."""

    def __init__(self, identity: HubIdentity, timing: Timing, now: float) -> None:
        self.identity = identity
        self.timing = timing
        self.peers: dict[str, Peer] = {}
        self.outbox: deque[tuple[bytes, list[Buffer]]] = deque()
        self.happenings: deque[Happening] = deque()
        self.malformed: Counter[tuple[str, str]] = Counter()
        """How often, by (peer, reason)."""
        self.last_malformed = ""
        self._by_route: dict[bytes, Peer] = {}
        self._names: set[str] = set()
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

        To a peer that has gone (its PeerLost or PeerLeft has been or will be told) nothing is sent and 0 comes back; the same holds
        for the answer to a message of an incarnation that has gone. Raises `NoCredit`, `UnknownPeer`, or `ValueError` where
        the message is not one for this peer.
        """
        peer = self.peers.get(name)
        if peer is None:
            if name not in self._names:
                raise UnknownPeer(f"{type(body).__name__} cannot be sent: no process {name} has said hello")
            return 0
        if type(body) not in FROM_HUB[peer.hello.role]:
            raise ValueError(f"{type(body).__name__} is not sent to a {peer.hello.role} ({name})")
        if answers is not None and answers.peer != name:
            raise ValueError(f"a message of {answers.peer} cannot be answered to {name}")
        if answers is not None and answers.incarnation != peer.hello.incarnation:
            return 0
        idle = peer.channel.orders == 0
        seq, frames = peer.channel.send(body, raw, answers.seq if answers else 0)
        if idle and peer.channel.orders:
            peer.moved = now
        peer.stopped = peer.stopped or isinstance(body, Stop)
        self.outbox.append((peer.route, frames))
        return seq

    def acknowledge(self, delivery: Delivery) -> None:
        """What was delivered is safe (on disk): its sender may forget it."""
        peer = self.peers.get(delivery.peer)
        if peer is not None and peer.hello.incarnation == delivery.incarnation:
            peer.channel.safe(delivery.seq)
            self._owing[delivery.peer] = peer

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
                self._hello(route, user, packet.envelope.body, now)
            elif peer is None:
                raise Malformed("no hello", f"{type(packet.envelope.body).__name__} before a hello")
            else:
                self._take(peer, packet, now)
        except Malformed as error:
            self._count(peer.hello.name if peer else user, error)
            if error.reason == "protocol" and peer is None:
                self._reject(route, f"{error}; start all processes of a run from one version of Telescope")

    def _count(self, name: str, error: Malformed) -> None:
        self.malformed[(name or UNKNOWN_PEER, error.reason)] += 1
        self.last_malformed = str(error)

    def _hello(self, route: bytes, user: str, hello: Hello, now: float) -> None:
        refusal = self._refusal(user, hello)
        if refusal:
            self._count(user, Malformed("refused hello", refusal))
            self._reject(route, refusal)
            return
        known = self.peers.get(hello.name)
        if known is not None and known.hello.incarnation != hello.incarnation:
            self._retire(known, "was replaced: a new process said hello under its name")
            self.happenings.append(PeerLost(hello.name, f"{hello.name} was replaced by a new process of its name"))
            known = None
        if known is None:
            known = self._admit(route, hello, now)
        else:
            self._by_route.pop(known.route, None)
        known.route, known.heard = route, now
        self._by_route[route] = known
        self.outbox.append((route, encode(Welcome(self.timing.heartbeat_s, self.timing.silent_s))))
        self.outbox.extend((route, kept.frames) for kept in known.channel.kept.values())

    def _admit(self, route: bytes, hello: Hello, now: float) -> Peer:
        peer = Peer(hello, route, Channel(hello.capacity), heard=now, moved=now)
        self.peers[hello.name] = peer
        self._names.add(hello.name)
        self.happenings.append(PeerJoined(hello.name, hello))
        return peer

    def _refusal(self, user: str, hello: Hello) -> str:
        """Why this hello is not welcome, as a whole sentence; empty if it is."""
        ours, name = self.identity, hello.name
        if user != name:
            return f"the process says it is {name[:64]!r}, but its key belongs to {user!r}"
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
        if type(body) not in FROM_PEER[peer.hello.role]:
            raise Malformed("direction", f"{type(body).__name__} does not come from a {peer.hello.role}")
        peer.heard = now
        try:
            fresh = peer.channel.accept(envelope)
        finally:
            if peer.channel.acks:
                self._owing[name] = peer
        if fresh:
            self._moved(peer, now)
            self.happenings.append(Delivery(name, envelope.seq, body, packet.raw, envelope.answers, peer.hello.incarnation))

    def _take_session(self, peer: Peer, body: Body, now: float) -> None:
        match body:
            case Heartbeat(progress=progress, doing=doing):
                peer.doing = doing[:200]
                if progress != peer.progress:
                    peer.progress = progress
                    self._moved(peer, now)
            case Ack(seqs=seqs):
                peer.channel.acknowledged(seqs)
            case Goodbye(error=error):
                name, orders = peer.hello.name, peer.channel.orders
                self._retire(peer, "has said goodbye")
                self.happenings.append(PeerLost(name, error[:2000]) if error else PeerLeft(name, orders))
            case _:
                pass

    def _moved(self, peer: Peer, now: float) -> None:
        peer.moved = now
        peer.told_stuck = False

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
        return peer.channel.orders > 0 and not peer.told_stuck and now - peer.moved > self.timing.stuck_s

    def _lose_silent(self, peer: Peer, seconds: float) -> None:
        name = peer.hello.name
        why = f"was not heard for {seconds:.1f} s (limit silent_s={self.timing.silent_s:g}) and is given up"
        self._reject(peer.route, f"{name} {why}")
        self._retire(peer, why)
        doing = f"; it was last doing: {peer.doing}" if peer.doing else ""
        self.happenings.append(PeerLost(name, f"{name} (pid {peer.hello.pid} on {peer.hello.host}) {why}{doing}"))

    def excuse(self, seconds: float) -> None:
        """The hub itself was not listening that long: nobody's silence or stillness meanwhile counts."""
        for peer in self.peers.values():
            peer.heard += seconds
            peer.moved += seconds
