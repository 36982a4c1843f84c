"""What transports by way of host memory or files share: both ends around one writer and one reader, and the checks of bytes.

Owns the joining of the trainer's ranks with a writer, and of a reader with a place on a device. Torch is imported when bytes
are received, not before: a run without models does without it.
"""

from __future__ import annotations

import errno
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from telescope.records import TensorSpec, WeightGroup, WeightManifest
from telescope.weights.base import Load, TransferFailed, WeightReader, WeightsCorrupt
from telescope.weights.buckets import ITEM_BYTES, Bucket, buckets

if TYPE_CHECKING:
    from torch import Tensor

LOAD_BUCKET_BYTES = 64 << 20
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers that mean: there is no room."""


class VersionWriter(Protocol):
    """The place of versions: rank 0's. At most two exist at once: the served and the next."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Any]]) -> WeightManifest: ...

    def close(self) -> None: ...


class HostPublisher:
    """See `telescope.weights.base.Publisher`. `tensors` gives a version's tensors; it is a collective of the trainer ranks."""

    def __init__(self, tensors: Callable[[], Iterator[tuple[str, Any]]], writer: VersionWriter | None) -> None:
        """`writer` is rank 0's; the others have none."""
        self._tensors, self._writer = tensors, writer

    @property
    def card_bytes(self) -> int:
        return 0

    def publish(self, version: int) -> WeightManifest | None:
        tensors = self._tensors()
        manifest = None if self._writer is None else self._writer.publish(version, tensors)
        for _ in tensors:  # the other ranks run along, as gathering is a collective
            pass
        return manifest

    def send(self, version: int, group: WeightGroup) -> str:
        refuse_to_send(version)

    def abort(self, epoch: int) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class HostReceiver:
    """See `telescope.weights.base.Receiver`."""

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader
        self._cancelled = threading.Event()

    def receive(self, manifest: WeightManifest, group: WeightGroup | None, staging: Tensor, deadline_s: float) -> str:
        import torch

        self._begin(deadline_s)
        if staging.numel() < manifest.nbytes:
            raise WeightsCorrupt(
                f"{manifest.nbytes} bytes of weights version {manifest.version} don't fit into {staging.numel()}"
            )
        for spec, data in self._reader.read(manifest):
            self._check(manifest)
            if data.nbytes:
                staging[spec.offset : spec.offset + spec.nbytes].copy_(_tensor(data), non_blocking=False)
        if staging.is_cuda:
            torch.cuda.current_stream(staging.device).synchronize()
        return manifest.checksum

    def verify(self, manifest: WeightManifest, deadline_s: float) -> None:
        self._begin(deadline_s)
        for _ in self._reader.read(manifest):
            self._check(manifest)

    def receive_buckets(self, manifest: WeightManifest, group: WeightGroup | None, load: Load, deadline_s: float) -> str:
        """From shared memory everything has been checked before the first `load`; from a file it can't be."""
        import torch

        self._begin(deadline_s)
        waiting = iter(buckets(manifest.tensors, LOAD_BUCKET_BYTES))
        bucket: Bucket | None = None
        place = torch.empty(0, dtype=torch.uint8)
        for spec, data in self._reader.read(manifest):
            self._check(manifest)
            if bucket is None or spec.offset >= bucket.stop:
                bucket = next(waiting)
                place = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            if data.nbytes:
                place[spec.offset - bucket.start :][: spec.nbytes].copy_(_tensor(data))
            if spec == bucket.specs[-1]:
                load(bucket, place)
        return manifest.checksum

    def cancel(self, epoch: int | None = None) -> None:
        self._cancelled.set()

    def close(self) -> None:
        self._reader.close()

    def _begin(self, deadline_s: float) -> None:
        self._cancelled.clear()
        self._deadline_s, self._end = deadline_s, time.monotonic() + deadline_s

    def _check(self, manifest: WeightManifest) -> None:
        if self._cancelled.is_set() or time.monotonic() > self._end:
            late = f"was not over within weight_sync.update_timeout_s={self._deadline_s:g} s"
            why = "was broken off" if self._cancelled.is_set() else late
            raise TransferFailed(f"reading weights version {manifest.version} {why}")


def refuse_to_send(version: int) -> NoReturn:
    raise ValueError(f"version {version} was published in place; there is nothing to send")


def _tensor(data: memoryview) -> Tensor:
    """A tensor over bytes; who got it only reads."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)


class Checksum:
    """CRC-32 over bytes in order, e.g. `crc32:0d4a1185`. It guards against torn, short and stale data, not against forgers.

    Of what the standard library has it is the fast one that also spreads short inputs: 2.6 GiB/s on one core of the machine
    it was chosen on, against 0.8 for BLAKE2b; it frees the interpreter's lock while it runs.
    """

    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: bytes | memoryview) -> None:
        self._crc = zlib.crc32(data, self._crc)

    def text(self) -> str:
        return f"crc32:{self._crc:08x}"


def checksum(data: Any) -> str:
    """The checksum of a whole segment, as it stands in its manifest."""
    whole = Checksum()
    whole.update(data)
    return whole.text()


def check_bounds(spec: TensorSpec, manifest: WeightManifest) -> None:
    """Raise `WeightsCorrupt` for a tensor that can't lie where it is said to: slicing a view past its end is silent."""
    expected = math.prod(spec.shape) * ITEM_BYTES.get(spec.dtype, -1)
    if spec.nbytes != expected or spec.offset < 0 or spec.offset + spec.nbytes > manifest.nbytes:
        raise WeightsCorrupt(
            f"tensor {spec.name} of weights version {manifest.version} is described as {spec.dtype}{list(spec.shape)} in "
            f"bytes {spec.offset} to {spec.offset + spec.nbytes} of {manifest.nbytes}, which can't be"
        )


def describe(tensor: Any) -> tuple[str, tuple[int, ...], memoryview]:
    """Dtype by torch's name, shape and bytes of a CPU tensor: numpy's or torch's (bfloat16, which numpy lacks, included)."""
    if isinstance(tensor, np.ndarray):
        array = np.ascontiguousarray(tensor)
        if array.dtype.byteorder == ">":
            raise ValueError(f"an array of dtype {array.dtype.str} is big-endian; weights are little-endian")
        return array.dtype.name, tuple(tensor.shape), array.reshape(-1).view(np.uint8).data
    import torch  # whoever holds a torch tensor has paid for this already

    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on {tensor.device} can't be shared through host memory; copy it to the CPU first")
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), memoryview(flat.numpy())
