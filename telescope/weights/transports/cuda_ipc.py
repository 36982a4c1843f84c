"""Weights within one card: the trainer keeps a version in a buffer on the GPU that the server's worker opens by its handle.

For servers and trainer on the same GPU, where NCCL refuses two ranks. Owns that memory, its handle and its mapping, through
the CUDA driver: the memory of torch's allocator has no handle of its own.

The buffer holds one version, the newest published; servers have copied the one before when the next is published. The handle
stays the same for the run, so a server opens it once.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from telescope.records import WeightGroup, WeightManifest
from telescope.weights.base import (
    Load,
    NoRoomForWeights,
    Publisher,
    Receiver,
    RunPlacement,
    ServerEnd,
    TrainerEnd,
    TransferFailed,
    Transport,
    TransportCost,
    WeightsCorrupt,
    WeightSource,
)
from telescope.weights.buckets import buckets, lay_out
from telescope.weights.device_streams import new_stream, on_stream, wait_for_device
from telescope.weights.host_memory import refuse_to_send

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from telescope.config.sections import WeightSyncSettings

TRANSPORT = "cuda_ipc"
HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1


class CudaIpc(Transport):
    device: ClassVar[Literal["cpu", "gpu"] | None] = "gpu"
    reads: ClassVar[tuple[str, ...]] = ("bucket_mb",)
    cost: ClassVar[TransportCost] = TransportCost(0.042, 105e9, 0.0075, trainer_version=True)
    """One model of 6.17 GB on one H200 (benchmarks/results/updates)."""

    def refusal(self, placement: RunPlacement, sync: WeightSyncSettings, asked: str) -> str:
        if not placement.on_gpu or placement.gpus == "same":
            return super().refusal(placement, sync, asked)
        return (
            f"weight_sync.transport={asked} is for servers and trainer on one and the same GPU, and this run has several: set "
            "weight_sync.transport=auto"
        )

    def publisher(self, source: WeightSource, end: TrainerEnd) -> Publisher:
        return CudaIpcPublisher(source, end)

    def receiver(self, end: ServerEnd) -> Receiver:
        return CudaIpcReceiver(end.device)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


class CudaDriver:
    """The functions of libcuda that memory between processes needs, in the context that torch has made current."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
        self._library.cuMemFree_v2.argtypes = [ctypes.c_void_p]
        self._library.cuIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
        torch.cuda.init()  # type: ignore[no-untyped-call]

    def allocate(self, nbytes: int) -> int:
        return self._pointer("cuMemAlloc_v2", lambda place: self._library.cuMemAlloc_v2(place, ctypes.c_size_t(nbytes)))

    def free(self, pointer: int) -> None:
        self._call("cuMemFree", self._library.cuMemFree_v2, pointer)

    def handle(self, pointer: int) -> str:
        """64 bytes in hexadecimal by which another process of this user opens the memory."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", self._library.cuIpcGetMemHandle, ctypes.byref(handle), ctypes.c_void_p(pointer))
        return bytes(handle).hex()

    def open(self, handle: str) -> int:
        raw = _Handle.from_buffer_copy(bytes.fromhex(handle))
        return self._pointer(
            "cuIpcOpenMemHandle", lambda place: self._library.cuIpcOpenMemHandle_v2(place, raw, LAZY_PEER_ACCESS)
        )

    def close(self, pointer: int) -> None:
        self._call("cuIpcCloseMemHandle", self._library.cuIpcCloseMemHandle, pointer)

    def view(self, pointer: int, nbytes: int) -> Tensor:
        """The memory as bytes [nbytes] uint8; it does not own it."""
        import torch

        return torch.as_tensor(_Memory(pointer, nbytes), device=self._device)

    def _pointer(self, name: str, call: Any) -> int:
        place = ctypes.c_void_p()
        self._call(name, call, ctypes.byref(place))
        return place.value or 0

    def _call(self, name: str, function: Any, *arguments: Any) -> None:
        import torch

        torch.cuda.set_device(self._device)
        torch.cuda.current_stream(self._device).query()  # makes torch's context the current one of this thread
        code = function(*arguments)
        if code:
            said = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(said))
            raise DriverError(f"{name}: {(said.value or b'unknown error').decode()} ({code})")


class _Memory:
    """What torch asks of memory that is not its own."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class CudaIpcPublisher:
    """See `telescope.weights.base.Publisher`. Rank 0 holds the buffer; the other ranks help to gather."""

    def __init__(self, source: WeightSource, end: TrainerEnd) -> None:
        """Raises `NoRoomForWeights` where the card is full."""
        import torch

        self._source, self._rank, self._device = source, end.rank, torch.device(end.device)
        self._compare_all = end.sync.compare == "all"
        self._specs, self._nbytes = lay_out(source.layout(), end.dtype)
        self._bucket_bytes = end.sync.bucket_bytes
        self._cut = buckets(self._specs, self._bucket_bytes)
        self._stream = new_stream(self._device)
        self._pointer = 0
        if end.rank == 0:
            self._driver = CudaDriver(self._device)
            self._pointer = self._allocate()
            self._buffer = self._driver.view(self._pointer, self._nbytes)
            self._buffer.zero_()
            self._handle = self._driver.handle(self._pointer)

    @property
    def card_bytes(self) -> int:
        return self._nbytes if self._pointer else 0

    def publish(self, version: int) -> WeightManifest | None:
        from telescope.weights.sampled_digest import SampledDigest

        with on_stream(self._device, self._stream):
            for bucket in self._cut:
                self._source.pack(bucket, self._buffer[bucket.start : bucket.stop] if self._rank == 0 else None)
            if self._rank != 0:
                return None
            sample = SampledDigest(self._specs, version, everything=self._compare_all, device=self._device)
            sample.add(self._buffer)
            found = sample.text()
            wait_for_device(self._device)
        return WeightManifest(
            version, TRANSPORT, self._handle, self._specs, self._nbytes, found, self._bucket_bytes, self._compare_all
        )

    def send(self, version: int, group: WeightGroup) -> str:
        refuse_to_send(version)

    def abort(self, epoch: int) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        if self._pointer:
            del self._buffer
            self._driver.free(self._pointer)
            self._pointer = 0

    def _allocate(self) -> int:
        import torch

        try:
            return self._driver.allocate(self._nbytes)
        except DriverError as error:
            free, _ = torch.cuda.mem_get_info(self._device)
            raise NoRoomForWeights(
                f"the card has no room for the {self._nbytes} bytes in which weights are handed to the server ({free} are "
                f"free): lower inference.gpu_memory_utilization, or set weight_sync.transport=shared_memory ({error})"
            ) from error


class CudaIpcReceiver:
    """See `telescope.weights.base.Receiver`. On the trainer's card, in another process."""

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)
        self._driver = CudaDriver(self._device)
        self._stream = new_stream(self._device)
        self._handle, self._pointer = "", 0

    def receive(self, manifest: WeightManifest, group: WeightGroup | None, staging: Tensor, deadline_s: float) -> str:
        if staging.numel() < manifest.nbytes:
            raise WeightsCorrupt(
                f"{manifest.nbytes} bytes of weights version {manifest.version} don't fit into {staging.numel()}"
            )
        with on_stream(self._device, self._stream):
            staging[: manifest.nbytes].copy_(self._opened(manifest), non_blocking=True)
            wait_for_device(self._device)
            self._compare(manifest, staging)
            return manifest.checksum

    def verify(self, manifest: WeightManifest, deadline_s: float) -> None:
        with on_stream(self._device, self._stream):
            self._compare(manifest, self._opened(manifest))

    def receive_buckets(self, manifest: WeightManifest, group: WeightGroup | None, load: Load, deadline_s: float) -> str:
        """Here everything is checked before the first `load`, and nothing is copied but by it."""
        with on_stream(self._device, self._stream):
            whole = self._opened(manifest)
            self._compare(manifest, whole)
            for bucket in buckets(manifest.tensors, manifest.bucket_bytes):
                load(bucket, whole[bucket.start : bucket.stop])
            wait_for_device(self._device)
            return manifest.checksum

    def cancel(self, epoch: int | None = None) -> None:
        """A copy within a card takes milliseconds and waits for nobody."""

    def close(self) -> None:
        if self._pointer:
            self._driver.close(self._pointer)
            self._handle, self._pointer = "", 0

    def _opened(self, manifest: WeightManifest) -> Tensor:
        if manifest.transport != TRANSPORT or len(manifest.location) != 2 * HANDLE_BYTES:
            raise TransferFailed(f"weights version {manifest.version} come by {manifest.transport}, not by {TRANSPORT}")
        if manifest.location != self._handle:
            self.close()
            try:
                self._pointer, self._handle = self._driver.open(manifest.location), manifest.location
            except DriverError as error:
                raise TransferFailed(
                    f"the trainer's memory can't be opened ({error}): weight_sync.transport=cuda_ipc is for servers and "
                    "trainer on one GPU of one host"
                ) from error
        return self._driver.view(self._pointer, manifest.nbytes)

    def _compare(self, manifest: WeightManifest, data: Tensor) -> None:
        from telescope.weights.sampled_digest import SampledDigest

        sample = SampledDigest(manifest.tensors, manifest.version, everything=manifest.compare_all, device=self._device)
        sample.add(data)
        found = sample.text()
        if found != manifest.checksum:
            raise WeightsCorrupt(
                f"weights version {manifest.version} have checksum {found} in the server, {manifest.checksum} in the trainer"
            )
