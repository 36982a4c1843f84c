"""A communicator over TCP for tensors on the CPU, by torch's gloo: as NCCL's is for GPUs, so that all else can be tested.

Gloo can't take back what it has queued: an aborted piece may still arrive in its buffer until its time is up. Buffers are
therefore left to it, and its threads are waited for by a thread of their own.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor

from telescope.records import WeightGroup
from telescope.weights.base import TransferFailed
from telescope.weights.rendezvous import facing


class GlooFlight:
    def __init__(self, work: Any, channel: GlooChannel, data: Tensor) -> None:
        self._work, self._channel, self._data = work, channel, data
        self._over = False
        work.get_future().add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        """In a thread of gloo's. The work itself says that it is completed a little later."""
        self._over = True
        self._channel.wake()

    def order(self) -> None:
        self.land()

    def land(self) -> None:
        self._channel.wait_for(lambda: self._over)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransferFailed(f"a broadcast of epoch {self._channel.epoch} failed: {_said(error)}") from error


class GlooChannel:
    """See `telescope.weights.channel.Channel`."""

    own_buffers = True

    def __init__(self, store: Any, group: WeightGroup, rank: int, location: str, timeout_s: float) -> None:
        """Connects to all other members, which are there by now. Raises `TransferFailed`."""
        self.epoch = group.epoch
        self._changed = threading.Condition()
        self._aborted = False
        self.limit(timeout_s)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=facing(f"tcp://{urlsplit(location).netloc}"))]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 2
        try:
            below = dist.PrefixStore("gloo", store)  # type: ignore[attr-defined]
            self._group: Any = dist.ProcessGroupGloo(below, rank, len(group.members), options)
        except RuntimeError as error:
            raise TransferFailed(f"the members of epoch {group.epoch} could not connect: {_said(error)}") from error

    def limit(self, deadline_s: float) -> None:
        self._limit_s, self._end = deadline_s, time.monotonic() + deadline_s

    def broadcast(self, data: Tensor) -> GlooFlight:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=max(0.001, self._end - time.monotonic()))
        if self._group is None:
            raise TransferFailed(f"the group of epoch {self.epoch} was broken off")
        try:
            return GlooFlight(self._group.broadcast([data], options), self, data)
        except RuntimeError as error:
            raise TransferFailed(f"a broadcast of epoch {self.epoch} failed: {_said(error)}") from error

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, over: Any) -> None:
        """Until `over()`. Raises `TransferFailed` on abort, and when the time is up."""
        with self._changed:
            left = max(0.0, self._end - time.monotonic())
            came = self._changed.wait_for(lambda: self._aborted or over(), left)
            if self._aborted:
                raise TransferFailed(f"the group of epoch {self.epoch} was broken off")
            if not came:
                raise TransferFailed(
                    f"a broadcast of epoch {self.epoch} was not over within weight_sync.update_timeout_s={self._limit_s:g} s"
                )

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        self.close()

    def close(self) -> None:
        """Its destructor waits for what is queued, for which nobody here has time."""
        group, self._group = self._group, None
        if group is not None:
            holder = [group]
            del group
            threading.Thread(target=holder.clear, daemon=True, name=f"gloo-epoch-{self.epoch}").start()


def _said(error: BaseException) -> str:
    """Gloo's first sentence, without the advice behind it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0]
