"""How one version of the weights gets from the trainer to the servers: publish or send on one side, receive on the other.

Owns the interfaces, the errors and the checksum of host memory; a transport is one file beside this one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from telescope.records import TensorSpec, WeightGroup, WeightManifest
from telescope.weights.buckets import Bucket
from telescope.weights.buckets import Tensor as TensorKind

if TYPE_CHECKING:
    from torch import Tensor

Load = Callable[[Bucket, "Tensor"], None]
"""What is done with a bucket that has arrived: its bytes `[bucket.nbytes]` uint8 are valid during the call only. On a GPU the
work may be queued on the current stream: the bucket's buffer is not overwritten before it."""


class Source(Protocol):
    """A model in training, as transports see it. Every method is called on all trainer ranks alike."""

    def layout(self) -> Sequence[TensorKind]:
        """Names, dtypes and shapes of the full tensors, by Hugging Face name, tied ones once. Not a collective."""
        ...

    def pack(self, bucket: Bucket, out: Tensor | None) -> None:
        """Gather a bucket's tensors and write them, cast to their specs' dtypes, into `out` [bucket.nbytes] uint8.

        A collective of all ranks; only rank 0 gives `out`, the others None. On a GPU the work is queued on the current stream.
        """
        ...


class Publisher(Protocol):
    """The trainer's side, one on every rank. At most two versions exist at once: the served and the next."""

    @property
    def card_bytes(self) -> int:
        """Bytes of this rank's GPU that it holds for the whole run beside torch's allocator, e.g. 0."""
        ...

    def publish(self, version: int) -> WeightManifest | None:
        """Put a version in place (pull transports) or name its layout and meeting place (collective ones). A collective of the
        trainer ranks; rank 0 gives the manifest, the others None. Raises `NoRoomForWeights`."""
        ...

    def send(self, version: int, group: WeightGroup) -> str:
        """Collective transports: broadcast the version to the group; rank 0 gives the checksum of what it sent, the others "".

        Raises `TransferFailed` on rank 0 where a member is missing, dead or late, or `abort` was called; the other ranks
        have then helped to gather all the same. The next epoch may be tried at once.
        """
        ...

    def abort(self, epoch: int) -> None:
        """From another thread: break off the `send` to the group of this epoch, under way or yet to begin."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The side of one server worker; used by one thread, but for `cancel`.

    `deadline_s` is the time that a call may take. Raises `WeightsCorrupt` where bytes and manifest disagree, `TransferFailed`
    where the sender or another member is missing, dead or late, or after `cancel`.
    """

    def receive(self, manifest: WeightManifest, group: WeightGroup | None, staging: Tensor, deadline_s: float) -> str:
        """Fill `staging[:manifest.nbytes]` (flat uint8, on the receiver's device or in host memory), all of it checked when
        this returns. Gives the checksum of the version: the manifest's, or what the sender of a broadcast told at its end."""
        ...

    def verify(self, manifest: WeightManifest, deadline_s: float) -> None:
        """Transports in place: whether what lies there is the version, every byte that `receive` would look at. Nothing is
        kept. There is nothing to verify of a broadcast before it comes."""
        ...

    def receive_buckets(self, manifest: WeightManifest, group: WeightGroup | None, load: Load, deadline_s: float) -> str:
        """The same without a place for the whole: `load` gets bucket by bucket, before the whole can be checked."""
        ...

    def cancel(self, epoch: int | None = None) -> None:
        """From another thread: break off the receive that is under way, and with `epoch` also one from that group that has yet
        to begin in its thread. An epoch broken off, or one that failed, is of no use any more."""
        ...

    def close(self) -> None: ...


class Reader(Protocol):
    """A server's side of weights in host memory, where there is no torch. Raises `WeightsCorrupt`."""

    def read(self, manifest: WeightManifest) -> Iterator[tuple[TensorSpec, memoryview]]: ...

    def close(self) -> None: ...


class WeightsCorrupt(RuntimeError):
    """The bytes found are not those of the manifest."""


class TransferFailed(RuntimeError):
    """A transfer did not come to its end; nothing was wrong with the bytes. It may be tried again in a new group.

    `missing`: members of the group that had not come by then, where it failed for want of them, e.g. `("server-1/0",)`.
    """

    def __init__(self, sentence: str, missing: Sequence[str] = ()) -> None:
        super().__init__(sentence)
        self.missing = tuple(missing)


class NoRoomForWeights(RuntimeError):
    """The place where a version is to be published can't hold it; the message says how much is missing, and where."""


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
