"""What orchestrator and supervisor tell each other, on a socket pair that the supervisor gives the orchestrator at its start.

The supervisor is not a peer of the hub: it starts before the hub and outlives it. So its words to the orchestrator go beside
the lifeline of the orchestrator's shim, one JSON message a packet, in order. The orchestrator asks it to *fence* a server (kill
it and all below it, whatever it does); it tells how a server has ended that it starts again, so that the orchestrator need not
wait for the silence, and why it stops the run. Neither end ever waits for the other: what does not fit is kept, and sent at the
next look. Owns the messages and the two ends; refuses to decide anything.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import MutableMapping
from typing import Any

import msgspec

from telescope.records import Record

DESCRIPTOR = "TELESCOPE_SUPERVISOR_FD"
"""The variable that tells an orchestrator the number of its end."""
MAX_PACKET_BYTES = 65_536
MAX_REASON_CHARACTERS = 8_000
MAX_PACKETS = 1_000
"""Taken in at one look; further ones wait for the next, so that a flood holds nobody up."""


class RunUnderway(Record, tag=True):
    """All parts are there: from now on a server that dies is worth another start."""


class EndingNotice(Record, tag=True):
    """Whatever dies now stays dead."""


class FenceServer(Record, tag=True):
    """This process of the name must not run on, whatever state it is in."""

    server: str
    pid: int
    reason: str


class ServerEnded(Record, tag=True):
    """How the last incarnation of a server ended. Another one follows."""

    server: str
    incarnation: int
    """Counts from 1: starts of the process in this run."""
    pid: int
    how: str
    """E.g. `server-0 was killed by signal 9 (SIGKILL).`"""


class StopNotice(Record, tag=True):
    """Why the orchestrator gets the signal that follows, where that is not the user's: a sentence."""

    reason: str
    failed: bool
    """Another process has failed; else the run is only told to stop."""


class _ChannelEnd:
    empty_is_end = True
    """An empty packet means that the other end is gone."""

    def __init__(self, end: socket.socket | None, heard: Any) -> None:
        """`heard`: the type of what the other end says. Without a socket nobody is there."""
        self._socket = end
        self._decoder = msgspec.json.Decoder(heard)
        self._unsent: deque[bytes] = deque()
        if end is not None:
            end.setblocking(False)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: Record) -> None:
        self._unsent.append(msgspec.json.encode(message))
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                if self._socket is not None:
                    self._socket.send(self._unsent[0])
            except BlockingIOError:
                return  # it does not read at this moment
            except OSError:
                self.close()  # it is gone, and hears nothing any more
            self._unsent.popleft()

    def _receive(self) -> list[Any]:
        """What has come since the last call, oldest first."""
        self._flush()
        found: list[Any] = []
        for _ in range(MAX_PACKETS):
            if self._socket is None:
                break
            try:
                packet = self._socket.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet and self.empty_is_end:
                self.close()
                break
            try:
                found.append(self._decoder.decode(packet))
            except (ValueError, RecursionError):  # not a message, or one that was cut off: it says nothing
                continue
        return found


class OrchestratorChannel(_ChannelEnd):
    """The supervisor's end. The other one stays open here too until this is closed: a wait on `descriptor` does not end for
    nothing once the orchestrator has gone."""

    empty_is_end = False

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours, RunUnderway | EndingNotice | FenceServer)
        self.descriptor = ours.fileno()
        """Readable when there is something to read."""
        self.passed = self._theirs.fileno()
        """What the orchestrator must inherit, under the same number."""
        self.underway = False
        """The run would rather have a server started again than end."""
        self.fences: dict[str, FenceServer] = {}
        """The latest request for each server; whoever obeys it takes it out."""

    def close(self) -> None:
        super().close()
        self._theirs.close()

    @property
    def variables(self) -> dict[str, str]:
        """What tells the orchestrator of its end."""
        return {DESCRIPTOR: str(self.passed)}

    def read(self) -> None:
        """Take in what the orchestrator said. Call it before each judgement of servers: what was said first counts first."""
        for message in self._receive():
            match message:
                case RunUnderway():
                    self.underway = True
                case EndingNotice():
                    self.underway = False
                case FenceServer(server=server):
                    self.fences[server] = message

    def tell_end(self, server: str, incarnation: int, pid: int, how: str) -> None:
        self._send(ServerEnded(server, incarnation, pid, how[:MAX_REASON_CHARACTERS]))

    def tell_stop(self, reason: str, *, failed: bool) -> None:
        """Before the signal that asks it to stop."""
        self._send(StopNotice(reason[:MAX_REASON_CHARACTERS], failed))


class SupervisorChannel(_ChannelEnd):
    """The orchestrator's end."""

    def __init__(self, end: socket.socket | None = None) -> None:
        """`end`: None where no supervisor has started this process."""
        super().__init__(end, ServerEnded | StopNotice)
        self.ends: dict[str, ServerEnded] = {}
        """Of each server that has ended and is started again: how it did so last."""
        self.stop: StopNotice | None = None
        """The first reason to stop that was told."""

    @classmethod
    def take_over(cls, environ: MutableMapping[str, str]) -> SupervisorChannel:
        """The end that the supervisor has left in this process, which no child of ours gets: its variable is taken out."""
        number = environ.pop(DESCRIPTOR, "")
        if not number:
            return cls()
        os.set_inheritable(int(number), False)
        return cls(socket.socket(fileno=int(number)))

    def read(self) -> None:
        """Take in what the supervisor said."""
        for message in self._receive():
            match message:
                case ServerEnded(server=server):
                    self.ends[server] = message
                case StopNotice():
                    self.stop = self.stop or message

    def tell_underway(self) -> None:
        self._send(RunUnderway())

    def tell_ending(self) -> None:
        self._send(EndingNotice())

    def ask_to_fence(self, server: str, pid: int, reason: str) -> None:
        self._send(FenceServer(server, pid, reason[:MAX_REASON_CHARACTERS]))
