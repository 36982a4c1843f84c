"""One member's communicator from epoch to epoch, and the buffers that travel in turn. Imports torch; knows no weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from telescope.records import WeightGroup
from telescope.weights.base import TransferFailed
from telescope.weights.buckets import IN_TURN
from telescope.weights.channel import Channel
from telescope.weights.rendezvous import Meeting


class Epochs:
    """One member's communicator: made when its group is new, kept as long as the group is the same."""

    def __init__(self, transport: str, me: str, device: torch.device, init_timeout_s: float) -> None:
        self._transport, self._me, self._device, self._init_timeout_s = transport, me, device, init_timeout_s
        self._lock = threading.Lock()  # guards all below
        self._group: WeightGroup | None = None
        self._channel: Channel | None = None
        self._cancelled = threading.Event()
        self._dead = -1

    def channel(self, group: WeightGroup, meeting: Meeting, deadline_s: float) -> Channel:
        """The communicator of the group. A collective of its members where it is new. Raises `TransferFailed`."""
        with self._lock:
            if group.epoch <= self._dead:
                raise TransferFailed(f"the group of epoch {group.epoch} was broken off; the next one has a higher number")
            held, left = (self._channel, None) if self._group == group else (None, self._channel)
            self._channel, self._group = held, group
            self._cancelled = threading.Event() if held is None else self._cancelled
        if left is not None:
            left.close()
        if held is None:
            held = self._connect(group, meeting)
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
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.abort()

    def close(self) -> None:
        with self._lock:
            channel, self._channel, self._group = self._channel, None, None
        if channel is not None:
            channel.close()

    def _connect(self, group: WeightGroup, meeting: Meeting) -> Channel:
        cancelled = self._cancelled
        if self._me not in group.members:
            raise TransferFailed(f"{self._me} is no member of the group of epoch {group.epoch}: {', '.join(group.members)}")
        rank, end = group.members.index(self._me), time.monotonic() + self._init_timeout_s
        store = meeting.roll_call(group, self._me, self._init_timeout_s, cancelled)
        left = max(0.1, end - time.monotonic())
        channel = self._make(store, group, rank, meeting.location, left, cancelled)
        with self._lock:
            if not cancelled.is_set():
                self._channel = channel
                return channel
        channel.abort()
        raise TransferFailed(f"the group of epoch {group.epoch} was broken off")

    def _make(
        self, store: Any, group: WeightGroup, rank: int, location: str, left_s: float, cancelled: threading.Event
    ) -> Channel:
        if self._transport == "gloo":
            from telescope.weights.gloo import GlooChannel

            return GlooChannel(store, group, rank, location, left_s)
        from telescope.weights.nccl import NcclChannel

        return NcclChannel(store, group, rank, self._device, left_s, cancelled)


class Turns:
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


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of one's own on a GPU; a CPU has none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


@contextmanager
def on_stream(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Within, this thread queues its work on `stream`, after all that the device's default stream and the one this thread is on
    were given before: a caller that has waited there for a buffer to be free has waited for us, too."""
    if stream is None:
        yield
        return
    torch.cuda.set_device(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def wait_for_device(device: torch.device) -> None:
    """Until what this thread has queued on its stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
