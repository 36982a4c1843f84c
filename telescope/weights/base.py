"""How one version of the weights gets from the trainer to the servers: publish or send on one side, receive on the other.

Owns the interfaces and the errors. A transport is a plug-in: one file with one class derived from `Transport`, which says what
it reads of the settings, where it fits and what it costs, and makes both ends. Ours are in transports/.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from telescope.records import TensorSpec, WeightGroup, WeightManifest
from telescope.settings import Settings
from telescope.weights.buckets import Bucket, ModelTensor

if TYPE_CHECKING:
    from torch import Tensor

    from telescope.config.sections import WeightSyncSettings

Load = Callable[[Bucket, "Tensor"], None]
"""What is done with a bucket that has arrived: its bytes `[bucket.nbytes]` uint8 are valid during the call only. On a GPU the
work may be queued on the current stream: the bucket's buffer is not overwritten before it."""


class WeightSource(Protocol):
    """A model in training, as transports see it. Every method is called on all trainer ranks alike."""

    def layout(self) -> Sequence[ModelTensor]:
        """Names, dtypes and shapes of the full tensors, by Hugging Face name, tied ones once. Not a collective."""
        ...

    def pack(self, bucket: Bucket, out: Tensor | None) -> None:
        """Gather a bucket's tensors and write them, cast to their specs' dtypes, into `out` [bucket.nbytes] uint8.

        A collective of all ranks; only rank 0 gives `out`, the others None. On a GPU the work is queued on the current stream.
        """
        ...

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, Any]]:
        """Whole tensors in host memory by name, in the order of `layout`; floating ones as `dtype` where one is given. A
        collective of all ranks."""
        ...


class Publisher(Protocol):
    """The trainer's side, one on every rank. At most two versions exist at once: the served and the next."""

    @property
    def card_bytes(self) -> int:
        """Bytes of this rank's GPU that it holds for the whole run beside torch's allocator, e.g. 0."""
        ...

    def publish(self, version: int) -> WeightManifest | None:
        """Put a version in place (pull transports) or name its layout and meeting place, without a checksum (collective ones).
        A collective of the trainer ranks; rank 0 gives the manifest, the others None. Raises `NoRoomForWeights`."""
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


class WeightReader(Protocol):
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


class TransportRefused(ValueError):
    """The transport of the settings does not fit where processes run; the text has the remedy."""


SharedGpus = Literal["apart", "same", "mixed"]
"""Servers and trainer ranks on GPUs of their own; all on one and the same GPU; some GPUs shared."""


@dataclass(frozen=True)
class RunPlacement:
    """Where servers and trainer ranks are, as far as a transport depends on it."""

    on_gpu: bool
    gpus: SharedGpus = "apart"
    other_hosts: bool = False
    """Whether a server is on another host than rank 0 of the trainer, which writes what servers read."""
    run_dir_on_all: bool = True
    """Whether all hosts see the run directory."""


@dataclass(frozen=True)
class TransportCost:
    """Seconds from a trained step to the commit = `fixed_s` + bytes / `bytes_s`, and what lies on a GPU meanwhile."""

    fixed_s: float = 0.2
    bytes_s: float = 1e9
    pause_s: float = 0.05
    """Of it, how long servers stand still."""
    server_buckets: bool = False
    """Two buckets wait on each of a server's GPUs, unless a whole version does (`weight_sync.staging=full`)."""
    trainer_version: bool = False
    """A whole version lies on the GPU of trainer rank 0, which a server shares."""


@dataclass(frozen=True)
class TrainerEnd:
    """Where the publisher of one trainer rank stands, and what the settings ask of it. `device`: `cpu` or `cuda:<index>`."""

    run: str
    """The run's id."""
    directory: Path
    device: str
    sync: WeightSyncSettings
    dtype: str | None = None
    """What floating weights travel as; None: as the trainer holds them."""
    rank: int = 0
    address: str = "127.0.0.1"
    """Of this host on the network that reaches the run's hub; where a broadcast group meets."""


@dataclass(frozen=True)
class ServerEnd:
    """Where the receiver of one server worker stands. `device`: `cpu` or `cuda:<index>`."""

    run: str
    member: str
    """The worker's name in weight groups, e.g. `server-0/1`."""
    device: str
    init_timeout_s: float


class Transport(Settings):
    """One way for weights to travel. Fields are settings of its own, given as `weight_sync.transport_kwargs`.

    Imported wherever a run is planned: torch only within methods.
    """

    device: ClassVar[Literal["cpu", "gpu"] | None] = None
    """Where it works alone; None: anywhere."""
    collective: ClassVar[bool] = False
    """Whether the trainer sends to a group of servers, which take part at the same time; else servers fetch what is in
    place."""
    carries_adapters: ClassVar[bool] = False
    """Whether it carries LoRA adapters, which a server reads as a few tensors in host memory (`reader`)."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Settings of `weight_sync` that mean something to it, beside those that mean something to all."""
    cost: ClassVar[TransportCost] = TransportCost()

    @property
    def name(self) -> str:
        """What users type as `weight_sync.transport`: the name of the file."""
        return type(self).__module__.rpartition(".")[2]

    def refusal(self, placement: RunPlacement, sync: WeightSyncSettings, asked: str) -> str:
        """Why it can't work there, in a sentence with the remedy; else empty. `asked`: what the settings say, perhaps auto."""
        if self.device == "gpu" and not placement.on_gpu:
            return f"weight_sync.transport={asked} needs GPUs, and this run is on CPUs: set weight_sync.transport=auto"
        if self.device == "cpu" and placement.on_gpu:
            return f"weight_sync.transport={asked} is for CPUs; on GPUs set weight_sync.transport=auto"
        return ""

    @abstractmethod
    def publisher(self, source: WeightSource, end: TrainerEnd) -> Publisher:
        """The trainer's end on one rank. A collective of the ranks. Raises `NoRoomForWeights`."""

    @abstractmethod
    def receiver(self, end: ServerEnd) -> Receiver:
        """A server worker's end, for manifests of this transport."""

    def reader(self, run: str) -> WeightReader:
        """A server's end for adapters. Raises `TransportRefused` where it carries none."""
        raise TransportRefused(
            f"weight_sync.transport={self.name} carries no adapters, which model.lora pushes: set weight_sync.transport=auto"
        )
