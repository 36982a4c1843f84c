"""Which transport a run uses, and its two ends. Torch is imported only for transports that need it.

Owns what `weight_sync.transport=auto` and `weight_sync.dtype=auto` mean. Refuses to know processes and messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from telescope.weights.base import Publisher, Receiver, Source
from telescope.weights.disk import DiskPublisher, DiskReader
from telescope.weights.host import HostPublisher, HostReceiver
from telescope.weights.shared_memory import SharedMemoryPublisher, SharedMemoryReader

if TYPE_CHECKING:
    from typing import Any

    from telescope.config.parts import WeightSyncSettings

Transport = Literal["nccl", "gloo", "cuda_ipc", "shared_memory", "disk"]
Cards = Literal["apart", "same", "mixed"]
"""Servers and trainer ranks on GPUs of their own; all on one and the same GPU; some GPUs shared."""
FOLDER = "weights"
"""Where in the run directory the disk transport writes when `weight_sync.dir` names no folder."""


class Trained(Source, Protocol):
    """What is asked of a backend: the source of buckets, and whole tensors in host memory."""

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, Any]]: ...


class TransportRefused(ValueError):
    """The transport of the settings does not fit where processes run; the text has the remedy."""


@dataclass(frozen=True)
class Here:
    """Where an end of a transport stands. `device`: `cpu` or `cuda:<index>`."""

    run: str
    directory: Path
    device: str
    rank: int = 0
    address: str = "127.0.0.1"
    """Of this host on the network that reaches the run's hub; where a broadcast group meets."""


class _Process(msgspec.Struct):
    role: str
    host: str
    gpus: tuple[str, ...] = ()


class _Plan(msgspec.Struct):
    processes: tuple[_Process, ...]
    device: str = "cpu"


class _Placed(Protocol):
    """A process of a plan."""

    @property
    def role(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def gpus(self) -> tuple[str, ...]: ...


class Placed(Protocol):
    """What of a run's plan matters here."""

    @property
    def processes(self) -> Sequence[_Placed]: ...
    @property
    def device(self) -> str: ...


def _read(plan_json: Path) -> _Plan:
    """One without processes, on CPUs, where there is no plan."""
    try:
        return msgspec.json.decode(plan_json.read_bytes(), type=_Plan)
    except FileNotFoundError:
        return _Plan(())


def cards(plan_json: Path) -> Cards:
    """How the plan places servers and trainer ranks. `apart` where there is no plan."""
    return _cards(_read(plan_json))


def _cards(plan: Placed) -> Cards:
    used: dict[str, set[tuple[str, str]]] = {"server": set(), "trainer": set()}
    for process in plan.processes:
        used.setdefault(process.role, set()).update((process.host, gpu) for gpu in process.gpus)
    if not used["server"] & used["trainer"]:
        return "apart"
    return "same" if used["server"] == used["trainer"] and len(used["server"]) == 1 else "mixed"


def spread(plan_json: Path) -> bool:
    """Whether a server is on another host than rank 0 of the trainer, which writes what servers read."""
    return _spread(_read(plan_json))


def _spread(plan: Placed) -> bool:
    writer = next((process.host for process in plan.processes if process.role == "trainer"), None)
    return writer is not None and any(process.host != writer for process in plan.processes if process.role == "server")


def planned_device(plan_json: Path) -> str:
    """Where the plan puts servers and trainer: gpu or cpu. cpu where there is no plan."""
    return _read(plan_json).device


def planned(transport: str, plan_json: Path, *, adapters: bool = False) -> Transport:
    """The same for the whole run, as its plan has it. Raises `TransportRefused`."""
    return of_plan(transport, _read(plan_json), adapters=adapters)


def of_plan(transport: str, plan: Placed, *, adapters: bool = False) -> Transport:
    """The same for a plan that is not written down yet. Raises `TransportRefused`."""
    device = "cuda" if plan.device == "gpu" else "cpu"
    return choose(transport, device, _cards(plan), adapters=adapters, hosts=_spread(plan))


def choose(transport: str, device: str, placed: Cards, *, adapters: bool = False, hosts: bool = False) -> Transport:
    """The transport that `weight_sync.transport` means on a device. `adapters`: versions are LoRA adapters, which are small and
    which a server reads as files. `hosts`: not all servers are on the trainer's host. Raises `TransportRefused`."""
    on_gpu = device.startswith("cuda")
    if transport == "auto" and adapters:
        return "disk" if hosts else "shared_memory"
    if hosts and (transport == "shared_memory" or (transport == "auto" and on_gpu and placed != "apart")):
        raise TransportRefused(
            f"weight_sync.transport={transport} is shared memory here, which servers on other hosts do not see: set "
            "weight_sync.transport=disk and weight_sync.dir to a folder that all hosts see, or give servers and ranks GPUs of "
            "their own"
        )
    if transport == "auto" and hosts:
        return "nccl" if on_gpu else "gloo"
    if transport == "auto":
        on_cards: dict[Cards, Transport] = {"apart": "nccl", "same": "cuda_ipc", "mixed": "shared_memory"}
        return on_cards[placed] if on_gpu else "shared_memory"
    if transport in ("nccl", "cuda_ipc") and not on_gpu:
        raise TransportRefused(
            f"weight_sync.transport={transport} needs GPUs, and this run is on CPUs: set weight_sync.transport=auto"
        )
    if transport == "cuda_ipc" and placed != "same":
        raise TransportRefused(
            "weight_sync.transport=cuda_ipc is for servers and trainer on one and the same GPU, and this run has several: set "
            "weight_sync.transport=auto"
        )
    if transport == "nccl" and placed != "apart":
        raise TransportRefused(
            "weight_sync.transport=nccl refuses two ranks on a card, and here a server and a trainer rank share one: set "
            "weight_sync.transport=auto"
        )
    if transport == "gloo" and on_gpu:
        raise TransportRefused("weight_sync.transport=gloo is for CPUs; on GPUs set weight_sync.transport=auto")
    known: dict[str, Transport] = {name: name for name in ("nccl", "gloo", "cuda_ipc", "shared_memory", "disk")}
    return known[transport]


def wire_dtype(settings: WeightSyncSettings, device: str, served: str) -> str | None:
    """What floating weights travel as; None: as the trainer holds them. `served`: `inference.dtype`."""
    if settings.dtype != "auto":
        return None if settings.dtype == "master" else settings.dtype
    if not device.startswith("cuda"):
        return None
    return "bfloat16" if served == "auto" else served


def make_publisher(
    transport: Transport, backend: Trained, here: Here, settings: WeightSyncSettings, dtype: str | None
) -> Publisher:
    """The trainer's end on one rank. A collective of the ranks. Raises `NoRoomForWeights`."""
    if transport in ("shared_memory", "disk"):
        writer: SharedMemoryPublisher | DiskPublisher | None = None
        if here.rank == 0:
            folder = Path(settings.dir) / here.run if settings.dir else here.directory / FOLDER
            writer = (
                SharedMemoryPublisher(here.run)
                if transport == "shared_memory"
                else DiskPublisher(folder, backend.layout, dtype)
            )
        return HostPublisher(partial(backend.weights, dtype), writer)
    if transport == "cuda_ipc":
        from telescope.weights.cuda_ipc import CudaIpcPublisher

        return CudaIpcPublisher(
            backend,
            rank=here.rank,
            device=here.device,
            dtype=dtype,
            bucket_bytes=settings.bucket_bytes,
            compare_all=settings.compare == "all",
        )
    from telescope.weights.collective import CollectivePublisher

    staging = None if not settings.cpu_staging else "pinned" if settings.pin_memory else "pageable"
    return CollectivePublisher(
        transport,
        backend,
        rank=here.rank,
        device=here.device,
        address=here.address,
        dtype=dtype,
        bucket_bytes=settings.bucket_bytes,
        init_timeout_s=settings.init_timeout_s,
        update_timeout_s=settings.update_timeout_s,
        compare_all=settings.compare == "all",
        staging=staging,
    )


def make_receiver(transport: str, *, run: str, member: str, device: str, init_timeout_s: float) -> Receiver:
    """A server worker's end, for manifests of one transport. `member`: its name in groups, e.g. `server-0/1`."""
    if transport == "shared_memory":
        return HostReceiver(SharedMemoryReader(run))
    if transport == "disk":
        return HostReceiver(DiskReader())
    if transport == "cuda_ipc":
        from telescope.weights.cuda_ipc import CudaIpcReceiver

        return CudaIpcReceiver(device)
    if transport in ("nccl", "gloo"):
        from telescope.weights.collect import CollectiveReceiver

        return CollectiveReceiver(transport, member, device=device, init_timeout_s=init_timeout_s)
    raise TransportRefused(f"weights come by {transport!r}, which this installation does not know")
