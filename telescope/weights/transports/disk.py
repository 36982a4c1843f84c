"""Weights through files of a shared file system: one safetensors file a version, for servers on any host that sees the folder.

Owns the files: their layout, names, checks and removal. A file appears whole or not at all (written beside, flushed to the
disk, renamed), and any tool that reads safetensors reads it. Its tensors follow each other without gaps, as the format wants;
in the flat layout of the manifest they are aligned.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from telescope.records import TensorSpec, WeightManifest
from telescope.weights.base import (
    NoRoomForWeights,
    Publisher,
    Receiver,
    RunPlacement,
    ServerEnd,
    TrainerEnd,
    Transport,
    TransportCost,
    WeightsCorrupt,
    WeightSource,
)
from telescope.weights.buckets import ModelTensor, lay_out
from telescope.weights.host_memory import FULL, Checksum, HostPublisher, HostReceiver, check_bounds, describe

if TYPE_CHECKING:
    from telescope.config.sections import WeightSyncSettings

TRANSPORT = "disk"
VERSIONS_AT_ONCE = 2
NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


FOLDER = "weights"
"""Where in the run directory versions lie when `weight_sync.dir` names no folder."""


class Disk(Transport):
    carries_adapters: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("dir",)
    cost: ClassVar[TransportCost] = TransportCost(0.2, 1e9, 0.05)  # not measured with GPUs

    def refusal(self, placement: RunPlacement, sync: WeightSyncSettings, asked: str) -> str:
        if sync.dir is not None or placement.run_dir_on_all:
            return ""
        return (
            "weights travel as files in the run directory, which not all hosts see: set weight_sync.dir to a folder "
            "that they do, or take another weight_sync.transport"
        )

    def publisher(self, source: WeightSource, end: TrainerEnd) -> Publisher:
        folder = Path(end.sync.dir) / end.run if end.sync.dir else end.directory / FOLDER
        writer = DiskPublisher(folder, source.layout, end.dtype) if end.rank == 0 else None
        return HostPublisher(partial(source.weights, end.dtype), writer)

    def receiver(self, end: ServerEnd) -> Receiver:
        return HostReceiver(DiskReader())

    def reader(self, run: str) -> DiskReader:
        return DiskReader()


class DiskPublisher:
    """The writing side, one a run (rank 0 of the trainer). Not thread-safe."""

    def __init__(self, folder: Path, layout: Callable[[], Sequence[ModelTensor]], dtype: str | None = None) -> None:
        """`layout`: what the tensors will be, since a file begins with it; floating ones come as `dtype` where one is given."""
        self._folder, self._layout, self._dtype = folder, layout, dtype
        self._held: dict[int, Path] = {}

    def publish(self, version: int, tensors: Iterable[tuple[str, Any]]) -> WeightManifest:
        """Write a version and describe it. Raises `NoRoomForWeights`, and `ValueError` where tensors and layout differ."""
        if version in self._held:
            raise ValueError(f"version {version} is published already; versions only go up")
        for old in sorted(self._held)[: -(VERSIONS_AT_ONCE - 1)]:
            self.retire(old)
        specs, nbytes = lay_out(self._layout(), self._dtype)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"version-{version}.safetensors"
        unfinished = path.with_suffix(".unfinished")
        try:
            digest = self._write(unfinished, specs, tensors)
            os.replace(unfinished, path)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise NoRoomForWeights(
                f"{self._folder} has no room for the {nbytes} bytes of weights version {version}: free what lies there (two "
                "versions of the model must fit), or name another folder with weight_sync.dir"
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)
        self._held[version] = path
        return WeightManifest(version, TRANSPORT, str(path), specs, nbytes, digest)

    def retire(self, version: int) -> None:
        """Remove a version. A server that has it open reads on. An unknown version is not an error."""
        path = self._held.pop(version, None)
        if path is not None:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        for version in tuple(self._held):
            self.retire(version)

    def _write(self, path: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Any]]) -> str:
        digest = Checksum()
        with path.open("wb") as file:
            file.write(head(specs))
            expected = iter(specs)
            for name, tensor in tensors:
                spec = next(expected, None)
                dtype, shape, data = describe(tensor)
                if spec is None or (name, dtype, shape) != (spec.name, spec.dtype, spec.shape):
                    raise ValueError(f"tensor {name} ({dtype}{list(shape)}) came where the layout has {spec}")
                digest.update(data)
                file.write(data)
            if (missing := next(expected, None)) is not None:
                raise ValueError(f"tensor {missing.name} of the layout did not come")
            file.flush()
            os.fsync(file.fileno())
        return digest.text()


def head(specs: Sequence[TensorSpec]) -> bytes:
    """A safetensors file up to its first tensor: the header's length (u64) and the header, padded to 64 bytes in all."""
    entries: dict[str, Any] = {}
    end = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return struct.pack("<Q", len(text)) + text


class DiskReader:
    """The reading side, one a server that sees the folder."""

    def read(self, manifest: WeightManifest) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Each tensor's bytes in a buffer of its own. Raises `WeightsCorrupt`; whether the bytes are those of the manifest is
        known at the end only, so whoever loads them before can't take it back."""
        import torch  # for memory that torch can share without a warning

        digest = Checksum()
        start = head(manifest.tensors)
        try:
            with Path(manifest.location).open("rb") as file:
                if file.read(len(start)) != start:
                    raise WeightsCorrupt(f"{manifest.location} does not begin as weights version {manifest.version} do")
                for spec in manifest.tensors:
                    check_bounds(spec, manifest)
                    place = torch.empty(spec.nbytes, dtype=torch.uint8).numpy().data
                    if file.readinto(place) != spec.nbytes:
                        raise WeightsCorrupt(f"{manifest.location} ends within tensor {spec.name}")
                    digest.update(place)
                    yield spec, place
                if file.read(1):
                    raise WeightsCorrupt(f"{manifest.location} has more bytes than weights version {manifest.version}")
        except OSError as error:
            raise WeightsCorrupt(
                f"weights version {manifest.version} can't be read at {manifest.location}: {error.strerror}; servers on other "
                "hosts must see the same folder there (weight_sync.dir), and a version is there only until it is retired"
            ) from error
        if digest.text() != manifest.checksum:
            raise WeightsCorrupt(
                f"weights version {manifest.version} at {manifest.location} have checksum {digest.text()}, published was "
                f"{manifest.checksum}: the file was torn or changed after it was written"
            )

    def close(self) -> None:
        """Nothing is held open."""
