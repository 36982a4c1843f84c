"""A peer's end of the wire: one DEALER in its own thread, so that the process is heard while its main thread computes.

Owns the thread, the socket, the wake-up and the clock; what to say and when is session.py's. `send`, `progress`, `receive` and
`close` may be called from any thread, `received` from any event loop. A signal handler that raises in the middle of them would
leave a lock held: note the signal and look at it afterwards (`process.ProcessSignals.hold`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket as system_socket
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import zmq
from msgspec import structs
from zmq.utils.monitor import parse_monitor_message

from telescope.runlog.layout import RunDirectory
from telescope.wire import discovery, security
from telescope.wire.codec import MAX_FRAME_BYTES, MAX_FRAMES, NO_ARRAYS, RawArrays
from telescope.wire.messages import DIRECT_PORT, Body, DirectAddress, Hello
from telescope.wire.peer_events import HUB, Delivery
from telescope.wire.session import PeerSession

__all__ = ["Delivery", "Link", "LinkLost", "WireRefused", "WireTimeout"]

log = logging.getLogger(__name__)

NOBLOCK, POLLIN, EVENTS = int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.EVENTS)  # plain ints: enums cost a microsecond each
MESSAGES_A_TURN = 64
RECONNECT_MS, RECONNECT_MAX_MS = 100, 2_000
FLUSH_S = 2.0
"""How long `close` waits for what was sent to be safe on the other side."""
PART_S = 1.0
"""And then for the hub to hear the Goodbye."""
WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class WireRefused(ConnectionError):
    """The hub does not want this process: wrong key, run, attempt or config, or given up earlier. Trying again is of no use."""


class WireTimeout(TimeoutError):
    """The hub was not found or did not answer before the deadline."""


class LinkLost(ConnectionError):
    """The hub is gone, silent, or has refused this process; or the link was closed. The process should end."""


class Link:
    """Made by `Link.connect`. A context manager: leaving its block says Goodbye."""

    def __init__(self, session: PeerSession, address: discovery.HubAddress | DirectAddress, keys: security.Keys) -> None:
        self._session = session
        self._endpoint = address.endpoint
        self._changed = threading.Condition()  # guards the session and all below
        self._inbox: deque[Delivery] = deque()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._woken = False
        self._closing: str | None = None
        self._parting: float | None = None
        self._over = ""
        self._context = zmq.Context()
        self._socket = _dealer(self._context, address, keys)
        self._monitor = self._socket.get_monitor_socket(WATCHED)
        self._socket.connect(address.endpoint)  # only now: a handshake that nobody saw would leave this link silent for ever
        self._wake_in, self._wake_out = system_socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"link-{session.hello.name}", daemon=True)

    @classmethod
    def connect(cls, run_directory: RunDirectory, hello: Hello, deadline_s: float) -> Link:
        """Find the hub of the hello's attempt, connect, and wait for its welcome, all within `deadline_s`.

        Raises `WireRefused` or `WireTimeout` with a sentence for the user, or `BadKeys`.
        """
        end = time.monotonic() + deadline_s
        keys = security.load_keys(run_directory, hello.name)
        try:
            address = discovery.find_hub(run_directory, hello.attempt, deadline_s)
        except discovery.HubNotFound as error:
            raise WireTimeout(f"{hello.name}: {error}") from error
        link = cls(PeerSession(structs.replace(hello, started_ns=time.time_ns()), time.monotonic()), address, keys)
        return link._opened(end, deadline_s)

    @classmethod
    def connect_direct(
        cls, run_directory: RunDirectory, hello: Hello, server: str, address: DirectAddress, deadline_s: float
    ) -> Link:
        """Connect to a server's own port and wait for its welcome. Raises as `connect`."""
        session = PeerSession(structs.replace(hello, started_ns=time.time_ns()), time.monotonic(), DIRECT_PORT, server)
        link = cls(session, address, security.load_keys(run_directory, hello.name))
        return link._opened(time.monotonic() + deadline_s, deadline_s)

    def _opened(self, end: float, deadline_s: float) -> Link:
        self._thread.start()
        try:
            self._await_welcome(end, deadline_s)
        except BaseException:
            self._end_thread(time.monotonic())
            raise
        return self

    def _await_welcome(self, end: float, deadline_s: float) -> None:
        session, name = self._session, self._session.hello.name
        with self._changed:
            self._changed.wait_for(lambda: session.ever_welcomed or self._over, max(0.0, end - time.monotonic()))
            if session.ever_welcomed:
                return
            if self._over:
                raise WireRefused(self._over)
        raise WireTimeout(
            f"{name}: {self._where} did not answer within {deadline_s:g} s: it is not running, not reachable "
            f"from this host, or does not hold the key that {'hub.json names' if session.hub == HUB else 'it has told'}"
        )

    def __enter__(self) -> Link:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """The Goodbye gives the error of the block: every process of a run connects, works and leaves by this."""
        self.close("" if error is None else _reason(error))

    async def __aenter__(self) -> Link:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """The same without holding the loop up."""
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    @property
    def _where(self) -> str:
        return f"{'the hub' if self._session.hub == HUB else self._session.hub} at {self._endpoint}"

    @property
    def name(self) -> str:
        return self._session.hello.name

    # ---- the application's side --------------------------------------------------------------------------------------

    def send(self, body: Body, arrays: Sequence[np.ndarray] = (), answers: Delivery | None = None) -> int:
        """Queue a message; gives its number. It is sent again after a lost connection until answered or acknowledged.

        Arrays are copied. Raises `LinkLost` once the link is over, `ValueError` where the message breaks the protocol.
        """
        raw = RawArrays.of(arrays) if arrays else NO_ARRAYS
        with self._changed:
            self._check_alive()
            seq = self._session.send(body, raw, answers.seq if answers else 0)
            self._wake()
        return seq

    def progress(self, doing: str) -> None:
        """Work was done; the next heartbeat says so. Cheap: call it after each turn, micro-batch or engine step."""
        with self._changed:
            self._session.progress(doing)

    def receive(self, timeout_s: float) -> Delivery | None:
        """The next message, or None after `timeout_s`. Raises `LinkLost` when the hub is gone and all that came is read."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._over, timeout_s)
            return self._pop()

    async def received(self) -> Delivery:
        """The next message, for asyncio users. Safe to cancel: no message is lost."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                delivery = self._pop()
                if delivery is not None:
                    return delivery
                waiter = loop.create_future()
                self._waiters.append((loop, waiter))
            await waiter

    def close(self, error: str = "") -> None:
        """Say Goodbye and end the thread. Without an error it first waits, `FLUSH_S` at most, until what was sent is safe
        there, unless the hub itself has said Stop. Calling it again does nothing."""
        end = time.monotonic() + FLUSH_S
        with self._changed:
            if not error:
                self._changed.wait_for(self._flushed, FLUSH_S)
            if self._closing is None:
                self._closing = error
        self._end_thread(end)

    def _flushed(self) -> bool:
        return bool(self._over) or self._session.stopping or not self._session.channel.unacknowledged

    def _pop(self) -> Delivery | None:
        if self._inbox:
            return self._inbox.popleft()
        self._check_alive()
        return None

    def _check_alive(self) -> None:
        if self._over:
            raise LinkLost(self._over)

    def _end_thread(self, end: float) -> None:
        with self._changed:
            if self._closing is None:
                self._closing = ""
            self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, end - time.monotonic()) + FLUSH_S)

    def _wake(self) -> None:
        """Called with the lock held. One byte a sleep is enough."""
        if not self._woken and not self._over:
            self._woken = True
            self._wake_in.send(b"\0")

    # ---- the thread's side -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """The thread's whole life. An error here is a fault of ours: it ends the link rather than leaving it deaf."""
        try:
            self._loop()
        except Exception as error:
            log.exception("the link's thread failed")
            self._finish(f"the link's thread failed: {type(error).__name__}: {error}")
        finally:
            self._finish("the link is closed")
            self._socket.disable_monitor()
            self._socket.close(linger=int(FLUSH_S * 1000) if self._session.welcomed else 0)
            self._context.destroy(linger=None)
            self._wake_in.close()
            self._wake_out.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        for watched in (self._socket, self._monitor, self._wake_out):
            poller.register(watched, zmq.POLLIN)
        asleep = time.monotonic()
        while not self._over:
            with self._changed:
                now = time.monotonic()
                self._session.excuse(max(0.0, now - asleep - 2.0))  # a poll ends after a second: more, and we were stopped
                frames, wait_s = self._turn(now)
            self._put(frames)
            if self._over or self._has_parted(now):
                return
            asleep = time.monotonic()
            poller.poll(math.ceil(wait_s * 1000))
            self._clear_wake()
            self._watch_connection()
            self._read()

    def _has_parted(self, now: float) -> bool:
        """Goodbye is said, and the hub has heard it or has had `PART_S`. A socket closed at once, with something unread in it,
        is reset, and what was sent last may be lost with it."""
        if self._parting is None:
            return False
        return self._session.parted or not self._session.welcomed or now - self._parting >= PART_S

    def _turn(self, now: float) -> tuple[list[Sequence[bytes | zmq.Frame]], float]:
        """What to send now and how long to sleep; with the lock held."""
        session = self._session
        session.tick(now)
        if self._closing is not None and self._parting is None:
            session.goodbye(self._closing)
            self._parting = now
        frames: list[Sequence[bytes | zmq.Frame]] = list(session.outbox)
        session.outbox.clear()
        ended = session.refused or session.lost
        if ended:
            self._finish(f"{session.hello.name}: {ended}")
        wait_s = session.wait_s(now)
        return frames, wait_s if self._parting is None else min(wait_s, PART_S / 4)

    def _put(self, messages: list[Sequence[bytes | zmq.Frame]]) -> None:
        """Send, or drop where there is no connection: a new one begins with a hello, and then what is kept follows."""
        for frames in messages:
            try:
                self._socket.send_multipart(frames, NOBLOCK)
            except zmq.Again:
                return

    def _clear_wake(self) -> None:
        with self._changed:
            if self._woken:
                self._woken = False
                self._wake_out.recv(64)

    def _watch_connection(self) -> None:
        while int(self._monitor.getsockopt(EVENTS)) & POLLIN:  # a poll of no time costs ten times this
            event = parse_monitor_message(self._monitor.recv_multipart(NOBLOCK))["event"]
            with self._changed:
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._session.connected(time.monotonic())
                elif event == zmq.EVENT_DISCONNECTED:
                    self._session.disconnected()
                elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    name = self._session.hello.name
                    self._finish(f"{name}: {self._where} refused this process's key: it is not one of this run's")

    def _read(self) -> None:
        arrived: list[Delivery] = []
        for _ in range(MESSAGES_A_TURN):
            try:
                frames = self._socket.recv_multipart(NOBLOCK)
            except zmq.Again:
                break
            with self._changed:
                delivery = self._session.receive(frames[: MAX_FRAMES + 1], time.monotonic())
            if delivery is not None:
                arrived.append(delivery)
        with self._changed:
            self._inbox.extend(arrived)
            self._tell()

    def _tell(self) -> None:
        """Wake whoever waits; with the lock held."""
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            try:
                loop.call_soon_threadsafe(_set, waiter)
            except RuntimeError:  # that loop was closed: nobody waits there any more
                continue

    def _finish(self, why: str) -> None:
        with self._changed:
            self._over = self._over or why
            self._tell()


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: discovery.HubAddress | DirectAddress, keys: security.Keys
) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    security.protect_client(socket, keys, address.public_key.encode())
    socket.ipv6 = "[" in address.endpoint
    socket.immediate = True  # nothing is queued for a connection that does not stand: the session knows what to repeat
    socket.sndhwm = 0
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
    return socket


def _reason(error: BaseException) -> str:
    """As the process itself tells it (`process.KnownErrors`): what is neither ours nor comes with a sentence is named by its
    type, as `'step'` of a KeyError and `0` of a SystemExit say nothing."""
    said, kind = str(error), type(error)
    if said and (kind.__module__.startswith("telescope.") or isinstance(error, ValueError | OSError)):
        return said
    return f"{kind.__name__}: {said}" if said else kind.__name__
