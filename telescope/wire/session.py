"""A link's end of the protocol without I/O: what a peer does when frames arrive, time passes, or the application speaks.

Takes frames and a `now` (seconds, any monotonic clock), and leaves frames to be sent in an outbox. Never raises because of what
the hub sent: such messages are counted in `malformed` and dropped. Refuses sockets, threads and files (link.py brings them);
the hub's end is hub_session.py.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from msgspec import structs

from telescope.wire.channel import MessageChannel
from telescope.wire.codec import NO_ARRAYS, MalformedMessage, Packet, RawArrays, decode, encode
from telescope.wire.messages import (
    ACK_BATCH,
    ACK_DELAY_S,
    HUB_PORT,
    SESSION_OF_HUB,
    Ack,
    Body,
    Goodbye,
    Heartbeat,
    Hello,
    Port,
    Reject,
    Stop,
    Welcome,
)
from telescope.wire.peer_events import HUB, Delivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telescope.wire.codec import Buffer


class PeerSession:
    """One peer's view. `lost` and `refused` are sentences once the session is over; nothing is sent after that.

    `hub`: the process at the other end, the orchestrator or (at its own port) a server.
    """

    def __init__(self, hello: Hello, now: float, port: Port = HUB_PORT, hub: str = HUB) -> None:
        self.hello = hello
        self.hub = hub
        self._says, self._hears = port.from_peer[hello.role], port.from_hub[hello.role]
        self.channel = MessageChannel(None)
        self.outbox: deque[list[Buffer]] = deque()
        self.malformed: Counter[str] = Counter()
        self.welcomed = False
        self.ever_welcomed = False
        self.stopping = False
        self.parted = False
        """The hub has heard our Goodbye."""
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
        self.hello = structs.replace(self.hello, connection=self.hello.connection + 1)
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
        if type(body) not in self._says:
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
        except MalformedMessage as error:
            self.malformed[error.reason] += 1
            return None

    def _take(self, packet: Packet, now: float) -> Delivery | None:
        envelope, body = packet.envelope, packet.envelope.body
        if type(body) in SESSION_OF_HUB:
            self._heard = now
            self._take_session(body, now)
            return None
        if type(body) not in self._hears:
            raise MalformedMessage("direction", f"{type(body).__name__} is not for a {self.hello.role}")
        self._heard = now
        fresh = self.channel.accept(envelope)
        self._schedule_acks(now)
        if not fresh:
            return None
        self.stopping = self.stopping or isinstance(body, Stop)
        return Delivery(self.hub, envelope.seq, body, packet.raw, envelope.answers)

    def _take_session(self, body: Body, now: float) -> None:
        match body:
            case Welcome(heartbeat_s=heartbeat_s, silent_s=silent_s, connection=connection):
                self._heartbeat_s, self._silent_s = max(0.01, heartbeat_s), max(0.05, silent_s)
                if not self.welcomed and connection == self.hello.connection:
                    self.welcomed = self.ever_welcomed = True
                    self.outbox.extend(kept.frames for kept in self.channel.kept.values())
                    self._beat_due = now
            case Reject(reason=reason):
                self.refused = reason
            case Ack(seqs=seqs):
                self.channel.forget(seqs)
            case Goodbye():
                self.parted = True
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
            who = "the orchestrator" if self.hub == HUB else self.hub
            self.lost = f"{who} was not heard for {now - self._heard:.1f} s (limit silent_s={self._silent_s:g})"
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
