"""What a broadcast needs of a communicator, whichever library it is: queue a piece, wait in order, break off from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Flight(Protocol):
    """One piece on its way."""

    def order(self) -> None:
        """Whatever is queued (GPU) or done (CPU) next in this thread comes after the piece has arrived, or has left."""
        ...

    def land(self) -> None:
        """Wait until it is over. Raises `TransferFailed` where it failed, was broken off, or its channel's time was up."""
        ...


class Channel(Protocol):
    """A communicator of one epoch. One thread uses it; `abort` may come from any other."""

    own_buffers: bool
    """Whether an aborted piece may still be written later, so that it must not be received into memory of someone else."""

    def limit(self, deadline_s: float) -> None:
        """From now on whatever takes longer than this fails. Called before each version."""
        ...

    def broadcast(self, data: Tensor) -> Flight:
        """Queue a piece [n] uint8 of the first member's, after all that this thread has queued on the device so far."""
        ...

    def abort(self) -> None:
        """Break off all that is under way: the waits of every member's thread end. The channel is of no use afterwards."""
        ...

    def close(self) -> None: ...
