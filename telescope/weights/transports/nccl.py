"""Weights between GPUs: trainer rank 0 broadcasts each version over NCCL, spoken to directly: non-blocking, so that each wait
has a deadline and can be broken off.

torch's own NCCL group ends the whole process when one of its waits fails, and may block inside the library while it connects;
a trainer and its servers must survive each other. Owns the few functions of libnccl that a broadcast needs, the communicator's
stream, and the rule that every call is made with the lock held and returns at once, so that `abort` never waits long.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from telescope.records import WeightGroup
from telescope.weights.base import (
    Publisher,
    Receiver,
    RunPlacement,
    ServerEnd,
    TrainerEnd,
    TransferFailed,
    Transport,
    TransportCost,
    WeightSource,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from telescope.config.sections import WeightSyncSettings

SUCCESS, IN_PROGRESS = 0, 7
UINT8 = 1
UNDEFINED = -(1 << 31)
CONFIG_MAGIC, CONFIG_VERSION = 0xCAFEBEEF, 21800
"""The configuration's fields are those of NCCL 2.18; a later library fills in the rest."""
LOOKS, LOOK_S = 400, 0.0005
"""Queueing a piece takes the library some 50 µs in a thread of its own: so many looks come at once, the rest with pauses."""
IN_FLIGHT = 8
"""Pieces queued at once: a stuck group must not fill the device's queue, in which a launch would then block."""


class NCCL(Transport):
    device: ClassVar[Literal["cpu", "gpu"] | None] = "gpu"
    collective: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("mode", "bucket_mb", "cpu_staging", "pin_memory", "init_timeout_s")
    cost: ClassVar[TransportCost] = TransportCost(0.014, 290e9, 0.007, server_buckets=True)
    """The straight line through four models of 0.99 to 8.04 GB on two H200 of one host, within 20 %
    (benchmarks/results/updates)."""

    def refusal(self, placement: RunPlacement, sync: WeightSyncSettings, asked: str) -> str:
        if not placement.on_gpu or placement.gpus == "apart":
            return super().refusal(placement, sync, asked)
        return (
            f"weight_sync.transport={asked} refuses two ranks on a card, and here a server and a trainer rank share one: set "
            "weight_sync.transport=auto"
        )

    def publisher(self, source: WeightSource, end: TrainerEnd) -> Publisher:
        from telescope.weights.broadcast.publisher import BroadcastPublisher

        return BroadcastPublisher(self.name, NcclCommunicator, source, end)

    def receiver(self, end: ServerEnd) -> Receiver:
        from telescope.weights.broadcast.receiver import BroadcastReceiver

        return BroadcastReceiver(self.name, NcclCommunicator, end)


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


def library() -> ctypes.CDLL:
    """The libnccl that torch has loaded, or that of NVIDIA's Python package. Raises `OSError` where there is none."""
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError:
        found = importlib.util.find_spec("nvidia.nccl")
        places = [Path(place) for place in found.submodule_search_locations or ()] if found else []
        for place in places:
            if (place / "lib" / "libnccl.so.2").is_file():
                return ctypes.CDLL(str(place / "lib" / "libnccl.so.2"))
        raise


class PendingNcclBroadcast:
    def __init__(self, communicator: NcclCommunicator, event: torch.cuda.Event) -> None:
        self._communicator, self._event = communicator, event

    def wait_on_stream(self) -> None:
        import torch

        torch.cuda.current_stream(self._communicator.device).wait_event(self._event)

    def wait(self) -> None:
        self._communicator.wait_for(self._event)


class NcclCommunicator:
    """See `telescope.weights.broadcast.communicator.Communicator`."""

    own_buffers = False

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
        """Connects to all other members, which are there by now. Raises `TransferFailed` after `timeout_s`."""
        import torch

        self.epoch, self.device = group.epoch, device
        self._lock = threading.Lock()
        self._library = library()
        self._said = ctypes.PyDLL(self._library._name).ncclCommGetAsyncError
        """Asked many times in a row and answered at once: without leaving the interpreter to its other threads in between."""
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()
        self._queued: deque[PendingNcclBroadcast] = deque()
        self._deadline = WaitDeadline(self.abort, timeout_s)
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        identity = self._identity(store, rank, timeout_s, cancelled)
        config = _Config(
            ctypes.sizeof(_Config), CONFIG_MAGIC, CONFIG_VERSION, 0, UNDEFINED, UNDEFINED, UNDEFINED, None, UNDEFINED
        )
        begin = self._library.ncclCommInitRankConfig
        begin.argtypes = [ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.c_void_p]
        try:
            self._call(
                "connect",
                lambda: begin(ctypes.byref(self._comm), len(group.members), identity, rank, ctypes.byref(config)),
                cancelled,
            )
        except TransferFailed:
            self.abort()
            raise

    def limit(self, deadline_s: float) -> None:
        self._deadline.limit(deadline_s)

    def broadcast(self, data: Tensor) -> PendingNcclBroadcast:
        import torch

        while len(self._queued) >= IN_FLIGHT:
            self._queued.popleft().wait()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._call(
            "broadcast",
            lambda: self._library.ncclBroadcast(
                ctypes.c_void_p(data.data_ptr()),
                ctypes.c_void_p(data.data_ptr()),
                ctypes.c_size_t(data.numel()),
                UINT8,
                0,
                self._comm,
                ctypes.c_void_p(self._stream.cuda_stream),
            ),
        )
        data.record_stream(self._stream)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        pending = PendingNcclBroadcast(self, event)
        self._queued.append(pending)
        return pending

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait on the host. The time's end, like `abort`, makes the library's kernels give up, and so ends the wait itself."""
        if not event.query():  # type: ignore[no-untyped-call]
            with self._deadline.waiting():
                event.synchronize()
        with self._lock:
            self._check_alive()
            self._check(self._async_error(), "broadcast")

    def abort(self) -> None:
        self._deadline.stop()
        with self._lock:
            comm, self._comm = self._comm, None
            if comm is not None and comm.value:
                self._library.ncclCommAbort(comm)

    def close(self) -> None:
        """Aborting an idle communicator frees it without asking the others, who may be gone."""
        self.abort()

    def _identity(self, store: Any, rank: int, timeout_s: float, cancelled: threading.Event) -> _UniqueId:
        from telescope.weights.broadcast.rendezvous import fetch

        identity = _UniqueId()
        if rank == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(identity)), "get an id")
            store.set("nccl", bytes(identity).hex())
        else:
            ctypes.memmove(ctypes.byref(identity), bytes.fromhex(fetch(store, "nccl", timeout_s, cancelled).decode()), 128)
        return identity

    def _call(self, doing: str, call: Any, cancelled: threading.Event | None = None) -> None:
        """Make a call and wait until the library has done its part on the host, without the lock in between."""
        with self._lock:
            self._check_alive()
            code = call()
        pause, looks = cancelled or threading.Event(), 0
        while code == IN_PROGRESS:
            looks += 1
            if looks > LOOKS and pause.wait(LOOK_S):
                raise TransferFailed(f"the group of epoch {self.epoch} was broken off")
            if self._deadline.is_up:
                self.abort()
                raise TransferFailed(f"NCCL did not {doing} the group of epoch {self.epoch} in its time")
            with self._lock:
                self._check_alive()
                code = self._async_error()
        self._check(code, doing)

    def _async_error(self) -> int:
        code = ctypes.c_int()
        self._said(self._comm, ctypes.byref(code))
        return code.value

    def _check_alive(self) -> None:
        if self._comm is None:
            raise TransferFailed(f"the group of epoch {self.epoch} was broken off, or its time was up")

    def _check(self, code: int, doing: str) -> None:
        if code not in (SUCCESS, IN_PROGRESS):
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
            said = self._library.ncclGetErrorString(code).decode()
            raise TransferFailed(f"NCCL could not {doing} in the group of epoch {self.epoch}: {said}")


class WaitDeadline:
    """The deadline of waits that can't be given one: a thread looks on, and breaks off what is still waited for at its end. One
    thread a communicator, made at its first wait: a thread for each wait would cost more than most waits take.

    `late` is called where a wait is under way at the end of the time, or begins after it; it is to end the wait. The first
    such call is the last one from its own thread."""

    def __init__(self, late: Callable[[], None], seconds: float) -> None:
        self._late = late
        self._changed = threading.Condition()  # guards all below
        self._end = time.monotonic() + seconds
        self._wakes = math.inf
        """When the thread looks next by itself."""
        self._waits = 0
        self._stopped = False
        self._thread: threading.Thread | None = None

    def limit(self, seconds: float) -> None:
        """From now on the time ends after so many seconds, for a wait that is under way, too."""
        with self._changed:
            self._end = time.monotonic() + seconds
            if self._end < self._wakes:
                self._changed.notify_all()

    @property
    def is_up(self) -> bool:
        return time.monotonic() >= self._end

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait."""
        with self._changed:
            counted = int(not self.is_up)
            self._waits += counted
            if self._thread is None and counted and not self._stopped:
                self._thread = threading.Thread(target=self._look_on, daemon=True, name="nccl-deadline")
                self._thread.start()
        try:
            if not counted:
                self._late()
            yield
        finally:
            with self._changed:
                self._waits -= counted

    def stop(self) -> None:
        """End the thread, which is not waited for."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _look_on(self) -> None:
        with self._changed:
            while not self._stopped:
                left = self._end - time.monotonic()
                if left <= 0 and self._waits:
                    break
                self._wakes = self._end if left > 0 else math.inf  # a wait that begins too late sees to itself
                self._changed.wait(left if left > 0 else None)
            else:
                return
        self._late()
