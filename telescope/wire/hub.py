"""The orchestrator's socket, and a server's own port: one ROUTER, read and written from its asyncio loop. What to do is
hub_session.py's.

Owns sockets, the clock and the log of malformed messages. The plain socket is watched by its file descriptor rather than
awaited message by message, which costs far less processor time. Routing ids are ZeroMQ's own, one a connection, and the
hello binds a name to one: no peer can take over another's by claiming its id.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket as system_socket
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
import zmq

from telescope.runlog.layout import RunDirectory
from telescope.wire import discovery, security
from telescope.wire.channel import NoCredit
from telescope.wire.codec import MAX_FRAME_BYTES, MAX_FRAMES, NO_ARRAYS, RawArrays
from telescope.wire.hub_session import UNKNOWN_PEER, HubIdentity, HubSession, Timing, UnknownPeer
from telescope.wire.messages import ACK_DELAY_S, DIRECT_PORT, Body, DirectAddress, Hello
from telescope.wire.peer_events import HUB, Delivery, Happening, PeerJoined, PeerLeft, PeerLost, PeerStuck

__all__ = [
    "BindFailed",
    "Delivery",
    "Happening",
    "Hub",
    "NoCredit",
    "PeerJoined",
    "PeerLeft",
    "PeerLost",
    "PeerStuck",
    "UnknownPeer",
]

log = logging.getLogger(__name__)

NOBLOCK, NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # plain ints: an enum's `|` costs a microsecond
POLLIN, EVENTS, FD = int(zmq.POLLIN), int(zmq.EVENTS), int(zmq.FD)
MESSAGES_A_TURN = 64
"""Read at most this many before other tasks of the loop get their turn."""
MESSAGES_A_TICK = 4096
"""And this many before peers are judged: more than all of them send in a beat."""
LOG_EVERY_S = 10.0


class BindFailed(OSError):
    """The hub could not open its port. The text names the interface and the remedy."""


class Hub:
    """Open it with `await Hub.open(...)`; all methods belong to that loop's thread."""

    def __init__(self, session: HubSession, allowed: dict[bytes, str]) -> None:
        self._session = session
        self._allowed = allowed
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._router = self._context.socket(zmq.ROUTER)
        self._arrived = asyncio.Event()
        self._acks_due: asyncio.TimerHandle | None = None
        self._tick_due: asyncio.TimerHandle | None = None
        self._again: asyncio.Handle | None = None
        self._last_tick = self._loop.time()
        self._last_log = -LOG_EVERY_S
        self._logged = 0
        self._closed = False
        self._failure: Exception | None = None
        self._public_key = ""
        self.endpoint = ""

    @classmethod
    async def open(
        cls,
        run_directory: RunDirectory,
        *,
        run: str,
        attempt: str,
        config_hash: str,
        interface: str = "127.0.0.1",
        silent_s: float = 15.0,
        stuck_s: float = 600.0,
        heartbeat_s: float | None = None,
    ) -> Hub:
        """Bind a free port of the interface (an address, or a name such as `eth0`) and write hub.json.

        `heartbeat_s`: a fifth of `silent_s` unless given. Raises `BindFailed` or `BadKeys`.
        """
        timing = Timing(heartbeat_s or silent_s / 5, silent_s, stuck_s)
        keys = security.load_keys(run_directory, HUB)
        session = HubSession(HubIdentity(run, attempt, config_hash), timing, asyncio.get_running_loop().time())
        hub = cls(session, security.allow_list(run_directory, HUB))
        try:
            hub._bind(interface, keys)
            address = discovery.HubAddress(
                attempt, hub.endpoint, keys.public.decode(), system_socket.gethostname(), os.getpid()
            )
            discovery.publish_address(run_directory, address)
        except BaseException:
            hub._tear_down(linger_ms=0)
            raise
        hub._watch()
        return hub

    @classmethod
    async def open_direct(
        cls, run_directory: RunDirectory, name: str, identity: HubIdentity, *, interface: str = "127.0.0.1", silent_s: float
    ) -> Hub:
        """A server's own port, where workers bring their requests directly. Only their keys are let in; nothing is written:
        its `address` travels in the server's hello. Raises `BindFailed` or `BadKeys`."""
        session = HubSession(
            identity, Timing(silent_s / 5, silent_s, float("inf")), asyncio.get_running_loop().time(), DIRECT_PORT
        )
        keys = security.load_keys(run_directory, name)
        port = cls(session, security.list_direct_keys(run_directory))
        try:
            port._bind(interface, keys)
        except BaseException:
            port._tear_down(linger_ms=0)
            raise
        port._watch()
        return port

    @property
    def address(self) -> DirectAddress:
        """Of an open port: where it is and the key that it holds."""
        return DirectAddress(self.endpoint, self._public_key)

    def _bind(self, interface: str, keys: security.Keys) -> None:
        if interface in ("*", "0.0.0.0", "::", "[::]"):
            raise BindFailed(
                f"interface={interface} means all of them, and peers need one address: name one, e.g. eth0 or 10.0.0.7"
            )
        router = self._router
        self._public_key = keys.public.decode()
        security.protect_server(router, self._zap, keys)
        router.ipv6 = ":" in interface
        router.maxmsgsize = MAX_FRAME_BYTES
        router.sndhwm = 0  # credits bound what waits here, not a mark at which sends would fail
        host = f"[{interface}]" if ":" in interface and not interface.startswith("[") else interface
        try:
            router.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            raise BindFailed(f"the hub cannot bind a port on interface={interface}: {error.strerror}; name another") from error
        self.endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")

    def _watch(self) -> None:
        for watched in (self._zap, self._router):
            self._loop.add_reader(_number(watched, FD), self._guarded, self._pump)
        self._tick()

    async def __aenter__(self) -> Hub:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close("the hub's block has ended", timeout_s=0.0 if kind else 2.0)

    # ---- the application's side --------------------------------------------------------------------------------------

    async def next(self, timeout_s: float) -> Happening | None:
        """The next thing that happened, in order; None after `timeout_s`. Raises what a callback of the hub has failed with: a
        hub that no longer reads or judges its peers must not go on in silence."""
        happening = await self._next(timeout_s)
        if self._failure is not None:
            raise self._failure
        return happening

    async def _next(self, timeout_s: float) -> Happening | None:
        happenings = self._session.happenings
        if not happenings:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        return happenings.popleft() if happenings else None

    async def calm(self) -> bool:
        """Whether nothing has happened that `next` has not given. Before it answers yes the event loop has had a turn (acks,
        heartbeats, signals), and what the socket has was read."""
        if not self._session.happenings:
            await asyncio.sleep(0)
            self._guarded(self._pump)
        return not self._session.happenings and self._failure is None

    def send(self, peer: str, body: Body, arrays: Sequence[np.ndarray] = (), answers: Delivery | None = None) -> int:
        """Send, see `HubSession.send`. Gives the message's number; `Delivery.answers` of its answer is the same number."""
        return self.relay(peer, body, RawArrays.of(arrays) if arrays else NO_ARRAYS, answers)

    def relay(self, peer: str, body: Body, frames: RawArrays | Delivery, answers: Delivery | None = None) -> int:
        """Send with the arrays of another delivery: neither decoded nor copied."""
        raw = frames.frames if isinstance(frames, Delivery) else frames
        seq = self._session.send(peer, body, raw, answers, now=self._loop.time())
        self._flush()
        return seq

    def expel(self, peer: str, incarnation: str, why: str) -> None:
        """Give this process of the peer up, see `HubSession.expel`."""
        self._session.expel(peer, incarnation, why)
        self._flush()

    def acknowledge(self, delivery: Delivery) -> None:
        """The delivered RolloutResult is safe on disk: its worker may forget it."""
        self._session.acknowledge(delivery)
        self._schedule_acks()

    def mark_elsewhere(self, delivery: Delivery, waits: bool) -> None:
        """See `HubSession.mark_elsewhere`."""
        self._session.mark_elsewhere(delivery, waits, self._loop.time())

    def credits(self, peer: str) -> int:
        """Work orders that the peer would still take; 0 if it is not here."""
        return self._session.credits(peer)

    @property
    def peers(self) -> dict[str, Hello]:
        """Who is here now, by name."""
        return {name: peer.hello for name, peer in self._session.peers.items()}

    @property
    def malformed(self) -> dict[tuple[str, str], int]:
        """How many messages were dropped, by (process, reason)."""
        return dict(self._session.malformed)

    async def close(self, reason: str, timeout_s: float = 2.0) -> list[Delivery]:
        """Tell everyone to stop, wait for their goodbyes at most `timeout_s` (0: leave at once), and free the port. Gives the
        messages that came meanwhile."""
        last: list[Delivery] = []
        if self._closed:
            return last
        end = self._loop.time() + timeout_s
        if timeout_s > 0:
            self._session.stop_all(reason, self._loop.time())
            self._flush()
            while self._session.peers and self._failure is None and (left := end - self._loop.time()) > 0:
                happening = await self._next(left)
                if isinstance(happening, Delivery):
                    last.append(happening)
        self._tear_down(linger_ms=200 if timeout_s > 0 else 0)
        return last

    # ---- the socket's side -------------------------------------------------------------------------------------------

    def _guarded(self, callback: Callable[[], None]) -> None:
        """Run a callback of the loop, which would only log its error; `next` raises it instead, the first one for ever."""
        try:
            callback()
        except Exception as error:  # the edge of a callback
            log.exception("the hub has failed")
            self._failure = self._failure or error
            self._arrived.set()

    def _pump(self) -> None:
        """Read what is there. The descriptor only tells of changes, so this goes on until nothing is left."""
        self._again = None
        if self._closed:
            return
        self._answer_handshakes()
        now = self._loop.time()
        for _ in range(MESSAGES_A_TURN):
            if not self._read_one(now):
                break
        else:
            self._pump_soon()
        self._after_reading()

    def _pump_soon(self) -> None:
        if self._again is None:
            self._again = self._loop.call_soon(self._guarded, self._pump)

    def _read_one(self, now: float) -> bool:
        """Take one message off the socket; frames beyond the bound are dropped as they come, not gathered."""
        try:
            first = self._router.recv(NOBLOCK, copy=False)
        except zmq.Again:
            return False
        frames: list[zmq.Frame] = []
        more = first.more
        while more:
            frame = self._router.recv(NOBLOCK, copy=False)
            more = frame.more
            if len(frames) <= MAX_FRAMES:
                frames.append(frame)
        protocol = [frames[0].bytes] if frames and len(frames[0]) <= 64 else frames[:1]
        self._session.receive(first.bytes, _user(first), [*protocol, *frames[1:]], now)
        return True

    def _answer_handshakes(self) -> None:
        while True:
            try:
                request = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = security.answer_zap(request, self._allowed)
            if reply[2] != b"200":
                self._session.malformed[(UNKNOWN_PEER, "refused key")] += 1
                self._session.last_malformed = (
                    f"a connection from {request[3].decode('ascii', 'replace')[:64]} with a key not on the list"
                )
            self._zap.send_multipart(reply)

    def _after_reading(self) -> None:
        self._flush()
        self._schedule_acks()
        if self._session.happenings:
            self._arrived.set()
        self._log_malformed()

    def _flush(self) -> None:
        """Send what the session wants sent. What cannot reach its peer now is dropped here: if it matters it is kept there."""
        outbox = self._session.outbox
        if self._closed:
            outbox.clear()
            return
        while outbox:
            route, frames = outbox.popleft()
            self._put(route, frames)
        if _number(self._router, EVENTS) & POLLIN:  # sending may have eaten the descriptor's notice of an arrival
            self._pump_soon()

    def _put(self, route: bytes, frames: Sequence[bytes | zmq.Frame]) -> None:
        try:
            self._router.send(route, NOBLOCK_MORE)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return
        for frame in frames[:-1]:
            self._router.send(frame, NOBLOCK_MORE)
        self._router.send(frames[-1], NOBLOCK)

    def _schedule_acks(self) -> None:
        if self._session.owes_acks and self._acks_due is None:
            self._acks_due = self._loop.call_later(ACK_DELAY_S, self._guarded, self._send_acks)

    def _send_acks(self) -> None:
        self._acks_due = None
        self._session.flush_acks()
        self._flush()

    def _tick(self) -> None:
        """Read dry, then judge: time in which this loop did not run is nobody's silence."""
        beat = self._session.timing.heartbeat_s
        now = self._loop.time()
        late = now - self._last_tick - beat / 2
        if late > beat:
            self._session.excuse(late, now)
        self._last_tick = now
        for _ in range(MESSAGES_A_TICK):
            if not self._read_one(now):
                break
        self._session.tick(now)
        self._after_reading()
        self._tick_due = self._loop.call_later(beat / 2, self._guarded, self._tick)

    def _log_malformed(self) -> None:
        total = sum(self._session.malformed.values()) if self._session.malformed else 0
        if total > self._logged and self._loop.time() - self._last_log >= LOG_EVERY_S:
            log.warning(
                "%d messages dropped as malformed, %d in all; the last: %s",
                total - self._logged,
                total,
                self._session.last_malformed,
            )
            self._last_log, self._logged = self._loop.time(), total

    def _tear_down(self, linger_ms: int) -> None:
        self._closed = True
        for handle in (self._acks_due, self._tick_due, self._again):
            if handle is not None:
                handle.cancel()
        for watched in (self._router, self._zap):
            if not watched.closed:
                self._loop.remove_reader(_number(watched, FD))
                watched.close(linger=linger_ms)
        self._context.term()


def _number(socket: zmq.Socket[bytes], option: int) -> int:
    return int(socket.getsockopt(option))


def _user(frame: zmq.Frame) -> str:
    """The process that the connection's key belongs to, as our ZAP answer named it."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
