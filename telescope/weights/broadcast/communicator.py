"""What a broadcast needs of a communicator, whichever library it is, and one member's communicator from epoch to epoch.

Owns when a communicator is made, kept and broken off, and the two buffers that pieces travel in. Imports torch; knows no
weights.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import torch
from torch import Tensor

from telescope.records import WeightGroup
from telescope.weights.base import TransferFailed
from telescope.weights.broadcast.rendezvous import Rendezvous
from telescope.weights.buckets import IN_TURN


class PendingBroadcast(Protocol):
    """One piece on its way."""

    def wait_on_stream(self) -> None:
        """Whatever is queued (GPU) or done (CPU) next in this thread comes after the piece has arrived, or has left."""
        ...

    def wait(self) -> None:
        """Wait until it is over. Raises `TransferFailed` where it failed, was broken off, or its communicator's time was up."""
        ...


class Communicator(Protocol):
    """Of the members of one epoch. One thread uses it; `abort` may come from any other."""

    own_buffers: bool
    """Whether an aborted piece may still be written later, so that it must not be received into memory of someone else."""

    def limit(self, deadline_s: float) -> None:
        """From now on whatever takes longer than this fails. Called before each version."""
        ...

    def broadcast(self, data: Tensor) -> PendingBroadcast:
        """Queue a piece [n] uint8 of the first member's, after all that this thread has queued on the device so far."""
        ...

    def abort(self) -> None:
        """Break off all that is under way: the waits of every member's thread end. It is of no use afterwards."""
        ...

    def close(self) -> None: ...


class Connect(Protocol):
    """How a library makes the communicator of a group whose members are all there. Raises `TransferFailed`."""

    def __call__(
        self,
        store: Any,
        group: WeightGroup,
        rank: int,
        *,
        device: torch.device,
        location: str,
        timeout_s: float,
        cancelled: threading.Event,
    ) -> Communicator:
        """`store`: the epoch's part of the rendezvous's key-value store, whose address is `location`. `rank`: this member's
        place in the group; 0 sends. Once `cancelled` is set nobody waits any more."""
        ...


class GroupCommunicator:
    """One member's communicator: made when its group is new, kept as long as the group is the same."""

    def __init__(self, connect: Connect, me: str, device: torch.device, init_timeout_s: float) -> None:
        self._make, self._me, self._device, self._init_timeout_s = connect, me, device, init_timeout_s
        self._lock = threading.Lock()  # guards all below
        self._group: WeightGroup | None = None
        self._communicator: Communicator | None = None
        self._cancelled = threading.Event()
        self._dead = -1

    def of_group(self, group: WeightGroup, rendezvous: Rendezvous, deadline_s: float) -> Communicator:
        """The communicator of the group. A collective of its members where it is new. Raises `TransferFailed`."""
        with self._lock:
            if group.epoch <= self._dead:
                raise TransferFailed(f"the group of epoch {group.epoch} was broken off; the next one has a higher number")
            held, left = (self._communicator, None) if self._group == group else (None, self._communicator)
            self._communicator, self._group = held, group
            self._cancelled = threading.Event() if held is None else self._cancelled
        if left is not None:
            left.close()
        if held is None:
            held = self._connect(group, rendezvous)
        held.limit(deadline_s)
        return held

    def abort(self, epoch: int | None = None) -> None:
        """From any thread: whoever waits for or in the communicator of this epoch (None: of the present one) is told so, and
        whoever asks for it from now on."""
        with self._lock:
            present = self._group.epoch if self._group is not None else self._dead
            self._dead = max(self._dead, present if epoch is None else epoch)
            if present > self._dead:
                return
            self._cancelled.set()
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def close(self) -> None:
        with self._lock:
            communicator, self._communicator, self._group = self._communicator, None, None
        if communicator is not None:
            communicator.close()

    def _connect(self, group: WeightGroup, rendezvous: Rendezvous) -> Communicator:
        cancelled = self._cancelled
        if self._me not in group.members:
            raise TransferFailed(f"{self._me} is not a member of the group of epoch {group.epoch}: {', '.join(group.members)}")
        rank, end = group.members.index(self._me), time.monotonic() + self._init_timeout_s
        store = rendezvous.roll_call(group, self._me, self._init_timeout_s, cancelled)
        left = max(0.1, end - time.monotonic())
        communicator = self._make(
            store,
            group,
            rank,
            device=self._device,
            location=rendezvous.location,
            timeout_s=left,
            cancelled=cancelled,
        )
        with self._lock:
            if not cancelled.is_set():
                self._communicator = communicator
                return communicator
        communicator.abort()
        raise TransferFailed(f"the group of epoch {group.epoch} was broken off")


class BufferPair:
    """Two device buffers in turn, made anew when they are too small or were left to an aborted communicator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []

    def get(self, number: int, nbytes: int) -> Tensor:
        return self._buffers[number % IN_TURN][:nbytes]

    def prepare(self, nbytes: int) -> None:
        if not self._buffers or self._buffers[0].numel() < nbytes:
            self.drop()
            self._buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=self._device) for _ in range(IN_TURN)]

    def drop(self) -> None:
        self._buffers = []
