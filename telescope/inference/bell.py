"""How a worker tells its server that a version has arrived, or will not: a datagram to a socket that the server reads.

vLLM lets a server ask its workers between two engine steps, and gives workers no way to speak first; an answer may wait for a
step, and a question takes part of one. Owns the socket and what comes by it; refuses to know what is done about it. What the
bell says is lost where it can't be rung (the server then asks), and whoever does not know its word is not heard.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket

import msgspec

from telescope.inference.opening import BellPlace, StageState

LARGEST = 1 << 16
"""Bytes of a message; a longer one is cut off, and so is none."""


class Rung(msgspec.Struct, frozen=True):
    """What a worker says: with the order to stage that it speaks of, so that the one before can't be taken for it."""

    word: str
    order: int
    rank: int
    state: StageState


class Bell:
    """The server's end, used from one event loop."""

    def __init__(self) -> None:
        self._word = secrets.token_hex(16)
        self._socket: socket.socket | None = None
        self._order, self._workers = 0, 0
        self._told: dict[int, StageState] = {}
        self._all = asyncio.Event()

    def hang(self) -> BellPlace:
        """Where workers ring it: a name that Linux chooses, which no file has, and which ends with the socket. Nowhere on other
        systems: the workers are then asked."""
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bell.setblocking(False)
        try:
            bell.bind("")
        except OSError:
            bell.close()
            return BellPlace()
        asyncio.get_running_loop().add_reader(bell, self._read)
        self._socket = bell
        return BellPlace(bell.getsockname().hex(), self._word)

    def expect(self, workers: int) -> int:
        """The number of the next order to stage, which so many workers are given."""
        self._order, self._workers = self._order + 1, workers
        self._told.clear()
        self._all.clear()
        return self._order

    async def told(self, patience_s: float) -> list[StageState] | None:
        """By rank, what all workers have said of the order that is expected; None where they have not after so long."""
        try:
            async with asyncio.timeout(patience_s):
                await self._all.wait()
        except TimeoutError:
            return None
        return [self._told[rank] for rank in sorted(self._told)]

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _read(self) -> None:
        assert self._socket is not None
        try:
            rung = msgspec.json.decode(self._socket.recv(LARGEST), type=Rung)
        except (BlockingIOError, ValueError):  # msgspec's errors are such, and bytes that are no text
            return
        if hmac.compare_digest(rung.word.encode(), self._word.encode()) and rung.order == self._order:
            self._told[rung.rank] = rung.state
            if len(self._told) == self._workers:
                self._all.set()


def ring(place: BellPlace, order: int, rank: int, state: StageState) -> None:
    """A worker's end, from any thread. Waits for nothing; a server that can't be told asks."""
    if not place.address:
        return
    rung = msgspec.json.encode(Rung(place.word, order, rank, state))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.setblocking(False)
            end.sendto(rung, bytes.fromhex(place.address))
    except OSError:
        pass
