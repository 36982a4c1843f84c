"""What a server's process and its engine's workers tell each other about updates. No torch, no vLLM."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, Literal

import msgspec

StagingPlace = Literal["full", "host", "none"]
"""Where a version waits until it is committed; see staging.py."""


class NotifySocket(msgspec.Struct, frozen=True):
    """The end of a socket pair that a worker inherited from its server: the descriptor, and which file it must still be."""

    descriptor: int = -1
    device: int = 0
    inode: int = 0


class UpdateSetup(msgspec.Struct, frozen=True):
    """What a worker needs to know before its first update."""

    run: str
    server: str
    place: StagingPlace
    deadline_s: float
    init_timeout_s: float
    notify: NotifySocket = NotifySocket()
    plugin_path: tuple[str, ...] = ()
    transport_kwargs: dict[str, Any] = {}
    """Of a transport of the user's own: where its file lies, and its settings."""


class UpdateSupport(msgspec.Struct, frozen=True):
    """How a worker will take updates. `refused`: a sentence if it can't; `no_plan`: why it uses vLLM's own loader, or empty;
    `arranged`: layers whose experts are arranged for vLLM's kernel at each update; `idle`: the checkpoint's tensors that the
    engine computes nothing with."""

    refused: str = ""
    no_plan: str = ""
    copies: int = 0
    arranged: int = 0
    nbytes: int = 0
    staging_bytes: int = 0
    seconds: float = 0.0
    idle: tuple[str, ...] = ()

    @property
    def way(self) -> str:
        """How versions are put in place, for the log."""
        if self.no_plan:
            return f"updates go through vLLM's own loader, which takes longer: {self.no_plan}"
        return (
            f"updates are {self.copies} copies of {self.nbytes / 1e9:.2f} GB in all, found and checked in {self.seconds:.1f} "
            f"s; staging buffer {self.staging_bytes / 1e9:.2f} GB; {self.arranged} layers' experts are arranged for "
            "their kernel"
        )


class StageState(msgspec.Struct, frozen=True):
    """How far a version has come in a worker. `cause`: why it will not come; `touched`: parameters may have been written;
    `missing`: the members of its group that this worker waited for in vain."""

    over: bool
    cause: str = ""
    checksum: str = ""
    touched: bool = False
    missing: tuple[str, ...] = ()


class Comparison(msgspec.Struct, frozen=True):
    """Parameters against a staged version: how many of its tensors were compared (0: there was no way), and which are other."""

    tensors: int
    other: tuple[str, ...]


LARGEST = 1 << 16
"""Bytes of a notice; a longer one is cut off, and is then not read."""


class StagingNotice(msgspec.Struct, frozen=True):
    """What a worker says once a version is over: with the order to stage that it speaks of, so that an earlier one can't be
    taken for it."""

    order: int
    rank: int
    state: StageState


class StagingNotices:
    """The server's end, used from one event loop.

    vLLM lets a server ask its workers between two engine steps, and gives workers no way to speak first; an answer may wait for
    a step, and a question takes part of one. The pair is made before the engine's process is forked, so its workers have the
    other end and nobody else does. A notice that can't be sent is lost: the server then asks.
    """

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._order, self._workers = 0, 0
        self._states: dict[int, StageState] = {}
        self._all = asyncio.Event()

    def open(self) -> None:
        """Call before the engine's process is forked."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in (ours, theirs):
            end.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._read)
        self._ends = ours, theirs

    @property
    def workers_end(self) -> NotifySocket:
        """What workers are told of their end."""
        if self._ends is None:
            return NotifySocket()
        descriptor = self._ends[1].fileno()
        status = os.fstat(descriptor)
        return NotifySocket(descriptor, status.st_dev, status.st_ino)

    def expect(self, workers: int) -> int:
        """The number of the next order to stage, which so many workers are given."""
        self._order, self._workers = self._order + 1, workers
        self._states.clear()
        self._all.clear()
        return self._order

    async def wait(self, limit_s: float) -> list[StageState] | None:
        """By rank, what all workers have said of the order that is expected; None where they have not after so long."""
        try:
            async with asyncio.timeout(limit_s):
                await self._all.wait()
        except TimeoutError:
            return None
        return [self._states[rank] for rank in sorted(self._states)]

    def close(self) -> None:
        if self._ends is not None:
            asyncio.get_running_loop().remove_reader(self._ends[0])
            for end in self._ends:
                end.close()
            self._ends = None

    def _read(self) -> None:
        assert self._ends is not None
        try:
            notice = msgspec.json.decode(self._ends[0].recv(LARGEST), type=StagingNotice)
        except (BlockingIOError, ValueError, RecursionError):  # msgspec's errors are such, and bytes that are not text
            return
        if notice.order == self._order and 0 <= notice.rank < self._workers:
            self._states[notice.rank] = notice.state
            if len(self._states) == self._workers:
                self._all.set()


def notify(end: NotifySocket, order: int, rank: int, state: StageState) -> None:
    """A worker's end, from any thread. Waits for nothing; a server that can't be told asks."""
    try:
        status = os.fstat(end.descriptor)
        if (status.st_dev, status.st_ino) == (end.device, end.inode):  # else this process did not inherit it
            os.write(end.descriptor, msgspec.json.encode(StagingNotice(order, rank, state)))
    except OSError:
        pass
