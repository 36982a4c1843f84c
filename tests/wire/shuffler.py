"""A relay in front of the hub that understands messages: it repeats some, and hands others out of their order.

It holds every key of the run, so that it is the hub to the peers and each peer to the hub. What belongs to the session (hello,
welcome, beats, acknowledgements, goodbye) passes at once; the rest waits in a small heap, of which any may come next.
"""

from __future__ import annotations

import threading
from random import Random

import msgspec
import zmq

from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.wire.codec import decode
from telescope.wire.discovery import HubAddress
from telescope.wire.messages import SESSION_OF_HUB, SESSION_OF_PEER, Hello
from telescope.wire.security import load_keys

SESSION = SESSION_OF_PEER | SESSION_OF_HUB
HELD = 4
"""Messages that wait at most, each way of a peer."""
PATIENCE_MS = 20
"""Without anything new all that waits goes on: nothing is lost here."""


class Shuffler:
    """Stands before the hub until `close`. `repeated` and `overtaken` count what it did."""

    def __init__(self, run: RunDirectory, seed: int) -> None:
        self._run, self._random = run, Random(seed)
        self.repeated = self.overtaken = 0
        self._context = zmq.Context()
        address = msgspec.json.decode(run.hub_json.read_bytes(), type=HubAddress)
        keys = load_keys(run, "orchestrator")
        self._hub, self._hub_key = address.endpoint, keys.public
        self._front = self._context.socket(zmq.ROUTER)
        self._front.curve_server = True
        self._front.curve_publickey, self._front.curve_secretkey = keys.public, keys.secret
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        moved = msgspec.structs.replace(address, endpoint=f"tcp://127.0.0.1:{port}")
        write_atomically(run.hub_json, msgspec.json.encode(moved).decode(), 0o600)
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._waiting: dict[tuple[bytes, bool], list[list[bytes]]] = {}
        self._ended = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._relay, name="shuffler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Raises what went wrong in the relay."""
        self._ended.set()
        self._thread.join(60)
        if self._failed is not None:
            raise self._failed

    def _relay(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        try:
            while not self._ended.is_set():
                ready = dict(poller.poll(PATIENCE_MS))
                if not ready:
                    for key in self._waiting:
                        self._let_go(key, 0)
                if self._front in ready:
                    route, *frames = self._front.recv_multipart()
                    if route not in self._backs:
                        self._join(route, frames, poller)
                    self._take((route, True), frames)
                for route, back in self._backs.items():
                    if back in ready:
                        self._take((route, False), back.recv_multipart())
        except Exception as error:  # noqa: BLE001 the thread's edge; close() raises it
            self._failed = error
        finally:
            self._context.destroy(linger=0)

    def _join(self, route: bytes, frames: list[bytes], poller: zmq.Poller) -> None:
        hello = decode(frames).envelope.body
        assert isinstance(hello, Hello), hello
        keys = load_keys(self._run, hello.name)
        back = self._context.socket(zmq.DEALER)
        back.curve_serverkey = self._hub_key
        back.curve_publickey, back.curve_secretkey = keys.public, keys.secret
        back.connect(self._hub)
        self._backs[route] = back
        poller.register(back, zmq.POLLIN)

    def _take(self, key: tuple[bytes, bool], frames: list[bytes]) -> None:
        if type(decode(frames).envelope.body) in SESSION:
            self._pass(key, frames)
            return
        waiting = self._waiting.setdefault(key, [])
        waiting.append(frames)
        if self._random.random() < 0.3:
            waiting.append(frames)
            self.repeated += 1
        self._let_go(key, self._random.randrange(HELD + 1))

    def _let_go(self, key: tuple[bytes, bool], most: int) -> None:
        waiting = self._waiting[key]
        while len(waiting) > most:
            place = self._random.randrange(len(waiting))
            self.overtaken += place > 0
            self._pass(key, waiting.pop(place))

    def _pass(self, key: tuple[bytes, bool], frames: list[bytes]) -> None:
        route, to_hub = key
        if to_hub:
            self._backs[route].send_multipart(frames)
        else:
            self._front.send_multipart([route, *frames])
