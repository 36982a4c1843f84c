"""Where a version waits inside a vLLM worker until it is committed, and how it gets there: a thread receives it while the
engine generates. Owns the buffer, the thread and the order of GPU streams; refuses to know vLLM and what tensors are for.

| place | the version waits in | commit copies |
|---|---|---|
| `full` | a buffer on the device, as large as the model | device to device: milliseconds |
| `host` | pinned host memory | host to device |
| `none` | nowhere: each bucket goes straight into the parameters, and a failure after the first one is fatal | nothing |

Bytes that lie in this host's memory already (shared memory, on a CPU) are used where they are, whatever the place.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from telescope.inference.vllm.worker_protocol import StagingPlace
from telescope.records import TensorSpec, WeightGroup, WeightManifest
from telescope.weights.base import Receiver, TransferFailed
from telescope.weights.buckets import Bucket
from telescope.weights.transports.shared_memory import TRANSPORT as SHARED_MEMORY
from telescope.weights.transports.shared_memory import SharedMemoryReader

Put = Callable[[Callable[[str], torch.Tensor], tuple[TensorSpec, ...]], None]
"""Puts tensors, each given as a row of elements by its name, into the engine's parameters."""


class Staging:
    """One a worker. All methods are for the worker's main thread; only the receiving runs beside it."""

    def __init__(self, place: StagingPlace, device: torch.device, run: str, make_receiver: Callable[[str], Receiver]) -> None:
        self._place = place
        self._device = device
        self._run = run
        self._make = make_receiver
        self._receivers: dict[str, Receiver] = {}
        self._making = threading.Lock()
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._free: Any = None  # event: the buffer's last commit has been read
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.arrival: Arrival | None = None

    def reserve(self, nbytes: int) -> None:
        """Have a buffer of at least `nbytes`. Raises `torch.OutOfMemoryError`."""
        if self.buffer.numel() >= nbytes or self._place == "none":
            return
        self.buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
        on_device = self._place == "full"
        pinned = not on_device and self._device.type == "cuda"
        with torch.inference_mode(False):  # whichever mode the caller is in: a thread without one writes to it
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device if on_device else "cpu", pin_memory=pinned)

    def begin(
        self,
        manifest: WeightManifest,
        group: WeightGroup | None,
        check: Callable[[], str],
        put: Put,
        deadline_s: float,
        ended: Callable[[Arrival], None] = lambda arrival: None,
    ) -> None:
        """Start to check and receive a version. One that is under way is broken off. `put` is called here only for a version
        that is broadcast and not staged; generation must be paused then. `ended`: called in the receiving thread when it is
        over, whatever came of it."""
        before = self.arrival
        if before is not None:
            before.cancel()
        self.arrival = Arrival(self, manifest, group, check, put, deadline_s, before, ended)

    def get(self, version: int) -> Arrival | None:
        return self.arrival if self.arrival is not None and self.arrival.manifest.version == version else None

    def forget(self, version: int) -> None:
        """Break off the version. What its thread did, and whether it is over, is to be asked of its arrival."""
        if (arrival := self.get(version)) is not None:
            arrival.cancel()

    def row(self, spec: TensorSpec) -> torch.Tensor:
        """A tensor's place in the buffer, as a row of elements."""
        return typed(self.buffer[spec.offset : spec.offset + spec.nbytes], spec)

    def done(self) -> None:
        """The staged version was put in place: its bytes may be overwritten once the copies queued so far are through."""
        if self._stream is not None:
            self._free = torch.cuda.current_stream(self._device).record_event()
        self.arrival = None

    def in_place(self, manifest: WeightManifest) -> bool:
        """Whether the version lies in this host's memory and is used where it is."""
        return manifest.transport == SHARED_MEMORY and self._device.type == "cpu"

    def unstaged(self, manifest: WeightManifest) -> bool:
        """Whether the version goes into the parameters as it arrives."""
        return self._place == "none" and not self.in_place(manifest)

    def receiver(self, transport: str) -> Receiver:
        with self._making:  # asked for by the thread that receives and by whoever cancels
            if transport not in self._receivers:
                self._receivers[transport] = self._make(transport)
            return self._receivers[transport]

    def on_stream(self) -> AbstractContextManager[Any]:
        """Receiving has a stream of its own, so that it does not wait for the engine's kernels nor they for it."""
        if self._stream is None:
            return nullcontext()
        if self._free is not None:
            self._stream.wait_event(self._free)
        return torch.cuda.stream(self._stream)

    def joined(self) -> None:
        """Let the engine's stream wait for what was received."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        if self.arrival is not None:
            self.arrival.cancel()
        for receiver in self._receivers.values():
            receiver.close()


class Arrival:
    """A version on its way into a worker."""

    def __init__(
        self,
        staging: Staging,
        manifest: WeightManifest,
        group: WeightGroup | None,
        check: Callable[[], str],
        put: Put,
        deadline_s: float,
        before: Arrival | None,
        ended: Callable[[Arrival], None],
    ) -> None:
        self.over = False
        """Nothing more is done for it in its thread."""
        self.manifest = manifest
        self.cause = ""
        self.checksum = manifest.checksum
        self.touched = False
        """Whether a parameter may have been written: a failure is fatal then."""
        self.missing: tuple[str, ...] = ()
        """Members of the group that had not come when it was given up."""
        self._put = put
        self._staging = staging
        self._group = group
        self._deadline_s = deadline_s
        self._cancelled = False
        self._ended = ended
        self._views: dict[str, torch.Tensor] = {}
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._thread = threading.Thread(target=self._run, args=(check, before), daemon=True, name=f"stage-{manifest.version}")
        self._thread.start()

    def cancel(self) -> None:
        self._cancelled = True
        self.cause = self.cause or f"weights version {self.manifest.version} were broken off"
        if not self.over and not self._staging.in_place(self.manifest):
            epoch = self._group.epoch if self._group is not None else None
            self._staging.receiver(self.manifest.transport).cancel(epoch)

    def flat(self, name: str) -> torch.Tensor:
        """A staged tensor as a row of elements: a view."""
        if name in self._views:
            return self._views[name]
        return self._staging.row(self._specs[name])

    def put_buckets(self) -> None:
        """Receive straight into the parameters. The engine must be between two steps or paused; an error after the first bucket
        leaves the model unusable."""
        receiver = self._staging.receiver(self.manifest.transport)

        def load(bucket: Bucket, piece: torch.Tensor) -> None:
            if self._cancelled:  # what is in the buffer may be half a bucket
                raise RuntimeError(self.cause)
            self.touched = True
            begin = bucket.start
            flat = {
                spec.name: typed(piece[spec.offset - begin : spec.offset - begin + spec.nbytes], spec) for spec in bucket.specs
            }
            with torch.inference_mode():
                self._put(flat.__getitem__, bucket.specs)

        self.checksum = receiver.receive_buckets(self.manifest, self._group, load, self._deadline_s)

    def _run(self, check: Callable[[], str], before: Arrival | None) -> None:
        try:
            if before is not None:
                before._thread.join(self._deadline_s)
                if not before.over:
                    self.cause = f"weights version {before.manifest.version} could not be broken off"
                    return
            misfit = "" if self.cause else check()
            self.cause = self.cause or misfit  # it may have been broken off in the meantime
            if not self.cause:
                self._receive()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: the cause travels to the one who asks
            self.cause = self.cause or f"{error}" or type(error).__name__
            self.missing = error.missing if isinstance(error, TransferFailed) else ()
        finally:
            self.over = True
            self._ended(self)

    def _receive(self) -> None:
        staging, manifest = self._staging, self.manifest
        if staging.in_place(manifest):
            read = SharedMemoryReader(staging._run).read(manifest)
            self._views = {spec.name: _view(data, spec) for spec, data in read if spec.nbytes}
        elif staging.unstaged(manifest):
            if manifest.collective:
                with staging.on_stream():
                    self.put_buckets()
            else:  # it is put in place at the commit, from where there is no way back
                staging.receiver(manifest.transport).verify(manifest, self._deadline_s)
        else:
            staging.reserve(manifest.nbytes)
            with staging.on_stream():
                receiver = staging.receiver(manifest.transport)
                self.checksum = receiver.receive(manifest, self._group, staging.buffer, self._deadline_s)


def typed(piece: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Bytes of a tensor as a row of its elements."""
    return piece.view(getattr(torch, spec.dtype))


def _view(data: memoryview, spec: TensorSpec) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # and nobody writes to it
        return torch.frombuffer(data, dtype=getattr(torch, spec.dtype))
