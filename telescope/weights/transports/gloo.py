"""Weights between CPUs: NCCL's way over TCP, by torch's gloo. For servers on other hosts, and so that all else can be tested.

Gloo can't take back what it has queued: an aborted piece may still arrive in its buffer until its time is up. Buffers are
therefore left to it, and its threads are waited for by a thread of their own.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from telescope.records import WeightGroup
from telescope.weights.base import Publisher, Receiver, ServerEnd, TrainerEnd, TransferFailed, Transport, WeightSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Gloo(Transport):
    device: ClassVar[Literal["cpu", "gpu"] | None] = "cpu"
    collective: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("mode", "bucket_mb", "cpu_staging", "pin_memory", "init_timeout_s")

    def publisher(self, source: WeightSource, end: TrainerEnd) -> Publisher:
        from telescope.weights.broadcast.publisher import BroadcastPublisher

        return BroadcastPublisher(self.name, GlooCommunicator, source, end)

    def receiver(self, end: ServerEnd) -> Receiver:
        from telescope.weights.broadcast.receiver import BroadcastReceiver

        return BroadcastReceiver(self.name, GlooCommunicator, end)


class PendingGlooBroadcast:
    def __init__(self, work: Any, communicator: GlooCommunicator, data: Tensor) -> None:
        self._work, self._communicator, self._data = work, communicator, data
        self._over = False
        work.get_future().add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        """In a thread of gloo's. The work itself says that it is completed a little later."""
        self._over = True
        self._communicator.wake()

    def wait_on_stream(self) -> None:
        self.wait()

    def wait(self) -> None:
        self._communicator.wait_for(lambda: self._over)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransferFailed(f"a broadcast of epoch {self._communicator.epoch} failed: {_said(error)}") from error


class GlooCommunicator:
    """See `telescope.weights.broadcast.communicator.Communicator`."""

    own_buffers = True

    def __init__(
        self,
        store: Any,
        group: WeightGroup,
        rank: int,
        *,
        device: torch.device,
        location: str,
        timeout_s: float,
        cancelled: threading.Event,
    ) -> None:
        """Connects to all other members, which are there by now. Raises `TransferFailed`."""
        import torch.distributed as dist

        from telescope.weights.broadcast.rendezvous import facing

        self.epoch = group.epoch
        self._changed = threading.Condition()
        self._aborted = False
        self.limit(timeout_s)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=facing(location))]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 2
        try:
            below = dist.PrefixStore("gloo", store)  # type: ignore[attr-defined]
            self._group: Any = dist.ProcessGroupGloo(below, rank, len(group.members), options)
        except RuntimeError as error:
            raise TransferFailed(f"the members of epoch {group.epoch} could not connect: {_said(error)}") from error

    def limit(self, deadline_s: float) -> None:
        self._limit_s, self._end = deadline_s, time.monotonic() + deadline_s

    def broadcast(self, data: Tensor) -> PendingGlooBroadcast:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=max(0.001, self._end - time.monotonic()))
        if self._group is None:
            raise TransferFailed(f"the group of epoch {self.epoch} was broken off")
        try:
            return PendingGlooBroadcast(self._group.broadcast([data], options), self, data)
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
