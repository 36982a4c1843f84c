"""Weights through a file in shared memory: the trainer writes each version once, servers on the same host map it read-only.

Owns segment files: their names, layout, checks and removal. Refuses to know modules, devices and the wire. A segment is never
written twice: a new version gets a new file, so a server that still reads the old one keeps its bytes. Torch tensors (on the
CPU) and numpy arrays are both taken; torch is not needed.

A segment's name holds a digest of the run's id, a random word and the version: two runs never meet. Its writer keeps a lock,
so that `sweep` can tell a dead run's leftovers from a living run's weights.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
from telescope.weights.buckets import ALIGNMENT, ITEM_BYTES
from telescope.weights.host_memory import (
    FULL,
    Checksum,
    HostPublisher,
    HostReceiver,
    check_bounds,
    checksum,
    describe,
)

if TYPE_CHECKING:
    from telescope.config.sections import WeightSyncSettings

TRANSPORT = "shared_memory"
PREFIX = "telescope-weights-"
VERSIONS_AT_ONCE = 2


class SharedMemory(Transport):
    carries_adapters: ClassVar[bool] = True
    cost: ClassVar[TransportCost] = TransportCost(0.2, 3e9, 0.05)  # not measured with GPUs

    def refusal(self, placement: RunPlacement, sync: WeightSyncSettings, asked: str) -> str:
        if not placement.other_hosts:
            return ""
        return (
            f"weight_sync.transport={asked} is shared memory here, which servers on other hosts do not see: set "
            "weight_sync.transport=disk and weight_sync.dir to a folder that all hosts see, or give servers and ranks GPUs of "
            "their own"
        )

    def publisher(self, source: WeightSource, end: TrainerEnd) -> Publisher:
        writer = SharedMemoryPublisher(end.run) if end.rank == 0 else None
        return HostPublisher(partial(source.weights, end.dtype), writer)

    def receiver(self, end: ServerEnd) -> Receiver:
        return HostReceiver(self.reader(end.run))

    def reader(self, run: str) -> SharedMemoryReader:
        return SharedMemoryReader(run)


def default_folder() -> Path:
    """`/dev/shm` where the system has it, else the folder for temporary files."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def run_prefix(run: str) -> str:
    """Start of the names of all segments of a run."""
    return f"{PREFIX}{hashlib.blake2b(run.encode(), digest_size=8).hexdigest()}-"


def sweep(folder: Path | None = None) -> list[str]:
    """Remove this user's segments whose writer is dead; return their names. A living writer's segments are locked by it. What
    anybody else put there under such a name is passed over."""
    removed = []
    for path in sorted((folder or default_folder()).glob(f"{PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return removed


@dataclass
class _HeldVersion:
    """One written segment. `descriptor` is kept open for the lock on it."""

    path: Path
    descriptor: int

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


class SharedMemoryPublisher:
    """The writing side, one a run (rank 0 of the trainer). Not thread-safe."""

    def __init__(self, run: str, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()
        sweep(self._folder)
        self._stem = f"{run_prefix(run)}{secrets.token_hex(4)}"
        self._held: dict[int, _HeldVersion] = {}

    def publish(self, version: int, tensors: Iterable[tuple[str, Any]]) -> WeightManifest:
        """Write a version and describe it. Of the versions before, only the newest is kept: servers serve that one.

        Raises `NoRoomForWeights` where the folder is too small (the version is then not published and nothing is left of
        it), `ValueError` for a version or a tensor name that was there before, and for a dtype no reader knows.
        """
        if version in self._held:
            raise ValueError(f"version {version} is published already; versions only go up")
        for old in sorted(self._held)[: -(VERSIONS_AT_ONCE - 1)]:
            self.retire(old)
        segment = self._create(version)
        try:
            specs, nbytes, digest = self._write(segment, tensors)
        except BaseException:
            segment.remove()
            raise
        self._held[version] = segment
        return WeightManifest(
            version=version,
            transport=TRANSPORT,
            location=str(segment.path),
            tensors=tuple(specs),
            nbytes=nbytes,
            checksum=digest,
        )

    def retire(self, version: int) -> None:
        """Unlink a version. Its memory is free once no server maps it any more. An unknown version is not an error."""
        segment = self._held.pop(version, None)
        if segment is not None:
            segment.remove()

    def close(self) -> None:
        for version in tuple(self._held):
            self.retire(version)

    def _create(self, version: int) -> _HeldVersion:
        path = self._folder / f"{self._stem}-{version}"
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return _HeldVersion(path, descriptor)
            os.close(descriptor)  # another run's sweep took it in the instant before it was locked

    def _write(self, segment: _HeldVersion, tensors: Iterable[tuple[str, Any]]) -> tuple[list[TensorSpec], int, str]:
        specs: dict[str, TensorSpec] = {}
        offset = 0
        digest = Checksum()
        for name, tensor in tensors:
            if name in specs:
                raise ValueError(f"tensor {name} is given twice; tied tensors are published once")
            dtype, shape, data = describe(tensor)
            if dtype not in ITEM_BYTES:
                raise ValueError(
                    f"tensor {name} has dtype {dtype}, which servers can't read; known are {', '.join(ITEM_BYTES)}"
                )
            padding = bytes(-offset % ALIGNMENT)
            offset += len(padding)
            for piece in (memoryview(padding), data):
                digest.update(piece)
                self._append(segment, piece)
            specs[name] = TensorSpec(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=data.nbytes)
            offset += data.nbytes
        rest = bytes(-offset % ALIGNMENT)
        digest.update(rest)
        self._append(segment, memoryview(rest))
        return list(specs.values()), offset + len(rest), digest.text()

    def _append(self, segment: _HeldVersion, data: memoryview) -> None:
        """Write all of it. Not through a mapping: there a full file system is a SIGBUS, here it is an error with a name."""
        while data.nbytes:
            try:
                data = data[os.write(segment.descriptor, data) :]
            except OSError as error:
                if error.errno not in FULL:
                    raise
                free = os.statvfs(self._folder)
                raise NoRoomForWeights(
                    f"{self._folder} has no room for the weights: {free.f_bavail * free.f_frsize} bytes are free and at least "
                    f"{data.nbytes} more are needed; enlarge it (two versions of the model must fit), free what lies there, or "
                    "set weight_sync.transport=disk"
                ) from error


class SharedMemoryReader:
    """The reading side, one a server of the same host, user and run."""

    def __init__(self, run: str) -> None:
        self._prefix = run_prefix(run)

    def read(self, manifest: WeightManifest) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Check the whole segment, then hand out read-only views of its tensors, which stay valid as long as they are held.

        Raises `WeightsCorrupt` before the first tensor where anything differs from the manifest.
        """
        segment = memoryview(b"") if manifest.nbytes == 0 else self._map(manifest)
        found = checksum(segment)
        if found != manifest.checksum:
            raise WeightsCorrupt(
                f"weights version {manifest.version} at {manifest.location} have checksum {found}, "
                f"published was {manifest.checksum}: the segment was torn or changed after it was written"
            )
        views = []
        for spec in manifest.tensors:
            check_bounds(spec, manifest)
            views.append((spec, segment[spec.offset : spec.offset + spec.nbytes]))
        return iter(views)

    def close(self) -> None:
        """Nothing to do: mappings end with the last view of them."""

    def _map(self, manifest: WeightManifest) -> memoryview:
        path = Path(manifest.location)
        if manifest.transport != TRANSPORT or not path.name.startswith(self._prefix):
            raise WeightsCorrupt(
                f"weights version {manifest.version} lie at {manifest.transport}:{manifest.location}, "
                f"which is not a shared-memory segment of this run ({self._prefix}…)"
            )
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise WeightsCorrupt(
                f"weights version {manifest.version} can't be opened at {path}: {error.strerror}; shared memory reaches only "
                "servers on the trainer's host, and only while the version is not retired"
            ) from error
        try:
            self._check_file(os.fstat(descriptor), manifest)
            return memoryview(mmap.mmap(descriptor, manifest.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)

    def _check_file(self, status: os.stat_result, manifest: WeightManifest) -> None:
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise WeightsCorrupt(f"{manifest.location} is not a private file of this user, so the trainer did not write it")
        if status.st_size != manifest.nbytes:
            raise WeightsCorrupt(
                f"weights version {manifest.version} at {manifest.location} have {status.st_size} bytes, "
                f"published were {manifest.nbytes}"
            )
