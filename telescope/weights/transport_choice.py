"""Which transport a run uses. Owns what `weight_sync.transport=auto` and `weight_sync.dtype=auto` mean, and how a plan places
servers and trainer. Refuses to know what any one transport needs: each says itself whether it fits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from telescope.config import plugins
from telescope.config.secrets import reveal_all
from telescope.weights.base import RunPlacement, SharedGpus, Transport, TransportRefused

if TYPE_CHECKING:
    from telescope.config.run import RunConfig
    from telescope.config.sections import WeightSyncSettings


class PlannedProcess(Protocol):
    """What of a process of a run's plan matters here."""

    @property
    def role(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def gpus(self) -> tuple[str, ...]: ...


class PlannedRun(Protocol):
    """What of a run's plan matters here."""

    @property
    def processes(self) -> Sequence[PlannedProcess]: ...
    @property
    def device(self) -> str: ...


class _WrittenProcess(msgspec.Struct):
    role: str
    host: str
    gpus: tuple[str, ...] = ()


class _WrittenPlan(msgspec.Struct):
    processes: tuple[_WrittenProcess, ...] = ()
    device: str = "cpu"


def placement_of(plan: PlannedRun) -> RunPlacement:
    """How a plan places servers and trainer ranks."""
    writer = next((process.host for process in plan.processes if process.role == "trainer"), None)
    elsewhere = any(process.host != writer for process in plan.processes if process.role == "server")
    return RunPlacement(plan.device == "gpu", _shared_gpus(plan), other_hosts=writer is not None and elsewhere)


def read_placement(plan_json: Path) -> RunPlacement:
    """The same of a plan that is written down; on CPUs of one host where there is none."""
    try:
        return placement_of(msgspec.json.decode(plan_json.read_bytes(), type=_WrittenPlan))
    except FileNotFoundError:
        return placement_of(_WrittenPlan())


def _shared_gpus(plan: PlannedRun) -> SharedGpus:
    used: dict[str, set[tuple[str, str]]] = {"server": set(), "trainer": set()}
    for process in plan.processes:
        used.setdefault(process.role, set()).update((process.host, gpu) for gpu in process.gpus)
    if not used["server"] & used["trainer"]:
        return "apart"
    return "same" if used["server"] == used["trainer"] and len(used["server"]) == 1 else "mixed"


def automatic(placement: RunPlacement, *, adapters: bool = False) -> str:
    """What `auto` means. `adapters`: versions are LoRA adapters, which are small and which a server reads as files. Over
    several hosts with shared GPUs it is shared memory, which refuses them."""
    if adapters:
        return "disk" if placement.other_hosts else "shared_memory"
    if not placement.on_gpu:
        return "gloo" if placement.other_hosts else "shared_memory"
    if placement.gpus == "apart":
        return "nccl"
    return "cuda_ipc" if placement.gpus == "same" and not placement.other_hosts else "shared_memory"


def choose(config: RunConfig, placement: RunPlacement) -> Transport:
    """The transport of a run that is placed so. Raises `TransportRefused`, also where there is no such transport."""
    sync = config.weight_sync
    asked = sync.transport
    name = automatic(placement, adapters=config.model.lora is not None) if asked == "auto" else asked
    chosen = transport_named(name, config.plugin_path, sync.transport_kwargs if name == asked else {})
    if sentence := chosen.refusal(placement, sync, asked):
        raise TransportRefused(sentence)
    return chosen


def transport_named(name: str, plugin_path: Sequence[str] = (), kwargs: Mapping[str, Any] | None = None) -> Transport:
    """With its own settings, references followed. Raises `TransportRefused` for one that is not known here, `SecretMissing`."""
    try:
        return plugins.make(plugins.TRANSPORTS, name, plugin_path, json.dumps(reveal_all(kwargs or {})))
    except plugins.PluginError as error:
        raise TransportRefused(f"weights come by {name!r}, which this installation does not know: {error}") from error


def wire_dtype(settings: WeightSyncSettings, device: str, served: str) -> str | None:
    """What floating weights travel as; None: as the trainer holds them. `served`: `inference.dtype`."""
    if settings.dtype != "auto":
        return None if settings.dtype == "master" else settings.dtype
    if not device.startswith("cuda"):
        return None
    return "bfloat16" if served == "auto" else served
