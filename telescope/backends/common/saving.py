"""One rank's tensors to files and back with torch.distributed.checkpoint, as safetensors: nothing is pickled.

Owns the copy to host memory, the thread that writes from it, and reading by a world of any size. Each rank writes its own
shards without a word to the others: one whose disk is full fails alone, and nobody waits for it. Refuses to know what the
tensors mean.

Files are written straight from where the tensors lie, several at a time, digests on the way: torch's writer builds each file in
memory before it writes it, one after another, and with threads loses their errors. Its reader reads these.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from telescope.backends.base import CheckpointUnfit, NotSaved, Outcome, Saved, SaveSettings
from telescope.backends.common.local_parts import local
from telescope.backends.common.staging import HostCopies, Named, pairs
from telescope.runlog.digests import FileDigests, note

log = logging.getLogger(__name__)

FILE_BYTES = 1 << 30
"""Tensors of about so many bytes go into one file; several are written at a time."""


class Saver:
    """Of one rank; one save at a time."""

    def __init__(self, rank: int, device: str, settings: SaveSettings) -> None:
        self._rank, self._settings = rank, settings
        self._pinned = device.startswith("cuda")
        self._copies = HostCopies(device)
        self._reserving: threading.Thread | None = None
        self._writing: threading.Thread | None = None

    @property
    def wants_memory(self) -> bool:
        """Whether `reserve` is worth a call: saves of a GPU's tensors will come, and it was not called yet."""
        return self._pinned and self._settings.expected and self._settings.background and self._reserving is None

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Pin the host memory of saves of these tensors, in a thread, so that the first one stalls no longer than others."""
        own = dict(self._own(tensors))
        self._reserving = threading.Thread(target=lambda: self._reserve(own), name="reserve-host-memory", daemon=True)
        self._reserving.start()

    def _reserve(self, own: dict[str, Tensor]) -> None:
        try:
            self._copies.reserve(own)
        except (RuntimeError, MemoryError) as error:  # each save tries again, and says so
            log.warning("host memory for checkpoints can't be had: %s", _first_line(error))

    def save(self, tensors: Named, folder: Path, done: Callable[[Outcome], None]) -> None:
        """Returns when the tensors may change again. `done` is called once, from another thread or from here.

        A save under way is waited for first. Of sharded tensors each rank gives its shard; of others rank 0 writes its own.
        Tensors that are made one after another are copied to host memory one after another, in the foreground too: all of them
        at once may be more than the device has.
        """
        if self._writing is not None and self._writing.is_alive():
            log.info("the checkpoint before is still being written: %s waits for it", folder.parent.name)
        if not self.settle():
            done(
                NotSaved(f"the checkpoint before was not written within {self._settings.timeout_s:g} s (checkpoint.timeout_s)")
            )
            return
        own = self._own(tensors)
        background = self._settings.background
        if isinstance(tensors, Mapping) and not background:
            done(_write_files(dict(own), folder, self._rank))
            return
        if not self._has_memory():
            limit = f"{self._settings.timeout_s:g} s (checkpoint.timeout_s)"
            done(NotSaved(f"host memory for the copy is still being pinned after {limit}"))
            return
        try:
            staged = self._copies.take(own)
        except (RuntimeError, MemoryError) as error:
            done(NotSaved(f"the state can't be copied to host memory: {_first_line(error)}"))
            return
        if not background:
            done(_write_files(staged, folder, self._rank))
            return
        self._writing = threading.Thread(
            target=lambda: done(_write_files(staged, folder, self._rank)), name=f"save-{folder.parent.name}", daemon=True
        )
        self._writing.start()

    def _has_memory(self) -> bool:
        """Wait for the thread that takes it; False where it is still at that: two must not."""
        if self._reserving is None:
            return True
        self._reserving.join(self._settings.timeout_s)
        return not self._reserving.is_alive()

    def _own(self, tensors: Named) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.detach()) for name, tensor in pairs(tensors) if _is_written_by(self._rank, name, tensor))

    def settle(self) -> bool:
        """Wait until nothing is being written; False where that takes longer than a save may."""
        if self._writing is None:
            return True
        self._writing.join(self._settings.timeout_s)
        return not self._writing.is_alive()


def own_key(rank: int, name: str) -> str:
    """Of a tensor that every rank has for itself, e.g. `rank_1.random.torch`."""
    return f"rank_{rank}.{name}"


def _is_written_by(rank: int, name: str, tensor: Tensor) -> bool:
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None or not tensor.to_local().numel():
            return False
        return all(place == 0 or not kind.is_replicate() for place, kind in zip(coordinate, tensor.placements, strict=True))
    return rank == 0 or name.startswith(own_key(rank, ""))


# ---- files ----------------------------------------------------------------------------------------------------------


class _OwnPart(DefaultSavePlanner):
    """Plans this rank's part alone: what the others write is their affair, and the files say themselves what is in them."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan, self.metadata = all_plans, Metadata(state_dict_metadata={})
        return self.global_plan, self.metadata


class _RankWriter(HuggingFaceStorageWriter):
    """Files named by the rank: without a common plan each would call itself the first."""

    def __init__(self, path: Path, rank: int, files: dict[str, int]) -> None:
        super().__init__(str(path), fqn_to_index_mapping=files, save_distributed=True)
        self._folder, self._of, self._files = path, rank, files
        self.digests: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """What this rank holds of each tensor, to its file. Nobody asks afterwards what is where: the files say it."""
        last, files = max(self._files.values()), dict[Path, dict[str, TensorFile]]()
        for item in plan.items:
            held = planner.resolve_data(item)
            if not isinstance(held, Tensor) or item.tensor_data is None:
                raise TypeError(f"{item.index.fqn} is not a tensor")
            name = f"shard-{self._of + 1:05d}-model-{self._files[item.index.fqn]:05d}-of-{last:05d}.safetensors"
            part = TensorFile(held, item.tensor_data.chunk.offsets)
            files.setdefault(self._folder / name, {})[item.index.fqn] = part
        self.digests = write(files)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


def _write_files(tensors: dict[str, Tensor], folder: Path, rank: int) -> Outcome:
    """Write and force to the disk. The edge of a thread: every error becomes the cause of a `NotSaved`."""
    started = time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if tensors:
            _be_quiet()
            writer = _RankWriter(folder, rank, _files(tensors))
            dcp_save(tensors, storage_writer=writer, planner=_OwnPart(), no_dist=True)
            note(folder, f"{rank + 1:05d}", writer.digests)
        nbytes = sum(file.stat().st_size for file in folder.glob(f"shard-{rank + 1:05d}-*"))
        _sync(folder)
    except (Exception, CheckpointException) as error:
        log.debug("the checkpoint %s can't be written", folder, exc_info=True)
        return NotSaved(f"{folder} can't be written: {_first_line(_cause(error))}")
    return Saved(nbytes, time.perf_counter() - started)


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Which file, from 1, each tensor goes to."""
    places, number, filled = {}, 1, 0
    for name, tensor in tensors.items():
        nbytes = local(tensor).nbytes
        if filled and filled + nbytes > FILE_BYTES:
            number, filled = number + 1, 0
        places[name], filled = number, filled + nbytes
    return places


class ShardReader:
    """What a folder holds. Raises `CheckpointUnfit` where it can't be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            if not any(folder.glob("*.safetensors")):
                raise FileNotFoundError("there is no *.safetensors file in it")
            found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        except (Exception, CheckpointException) as error:
            raise CheckpointUnfit(_damaged(folder, error)) from error
        self.shapes = {name: tuple(entry.size) for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the tensors in place, whoever wrote which part of them; of sharded ones this rank's shard."""
        for name, tensor in tensors.items():
            if name not in self.shapes:
                raise CheckpointUnfit(f"{self._folder} has no {name}: it was written with another model or other settings")
            if self.shapes[name] != tuple(tensor.shape):
                raise CheckpointUnfit(
                    f"{self._folder}: {name} has shape {list(self.shapes[name])}, and here it has {list(tensor.shape)}: it was "
                    "written with another model or other settings"
                )
        wanted: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items() if local(tensor).numel()}
        if not wanted:
            return
        _be_quiet()
        try:
            dcp_load(
                wanted,
                storage_reader=HuggingFaceStorageReader(str(self._folder)),
                planner=DefaultLoadPlanner(),
                no_dist=True,
            )
        except (Exception, CheckpointException) as error:
            raise CheckpointUnfit(_damaged(self._folder, error)) from error

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A whole tensor on the CPU."""
        if name not in self.shapes:
            raise CheckpointUnfit(f"{self._folder} has no {name}: it was written with other settings")
        tensor = torch.empty(self.shapes[name], dtype=dtype)
        self.read_into({name: tensor})
        return tensor


def _be_quiet() -> None:
    """torch warns that it takes us for a single process, which is what is meant. Not for a block: filters are the process's."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _damaged(folder: Path, error: BaseException) -> str:
    return (
        f"the checkpoint {folder} can't be read: {_first_line(_cause(error))}; remove its step's folder and resume from an "
        "earlier step"
    )


def _cause(error: BaseException) -> BaseException:
    """torch wraps what happened, in a class that is no `Exception`."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
"""The names of safetensors for those that torch's reader of checkpoints knows."""
PIECE_BYTES = 8 << 20
THREADS = 4


@dataclass(frozen=True)
class TensorFile:
    """A tensor, or what of one lies here: where in the whole it begins, one number a dimension."""

    tensor: Tensor
    offsets: Sequence[int]


def write(files: Mapping[Path, Mapping[str, TensorFile]]) -> dict[str, str]:
    """Write the files and force them to the disk; gives their digests by name. Raises OSError, and `TypeError` for a tensor of
    a type that the format has no name for: files that were under way are then written to their end, others are not begun."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint") as writers:
        digests = [(path.name, writers.submit(_write, path, parts)) for path, parts in files.items()]
        try:
            return {name: digest.result() for name, digest in digests}
        except BaseException:
            writers.shutdown(wait=False, cancel_futures=True)
            raise


def _write(path: Path, parts: Mapping[str, TensorFile]) -> str:
    tally = FileDigests()
    # widest first, so that each begins at a multiple of its width
    ordered = sorted(parts.items(), key=lambda item: (-item[1].tensor.element_size(), item[0]))
    with path.open("wb", buffering=0) as file:
        _put(file.fileno(), memoryview(_header(ordered)), tally)
        for _, part in ordered:
            flat = part.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            _put(file.fileno(), flat.numpy().data, tally)
        os.fsync(file.fileno())
    return str(tally)


def _header(parts: Sequence[tuple[str, TensorFile]]) -> bytes:
    """Its length in 8 bytes, and the JSON, filled up with spaces to a multiple of 8."""
    where = {name: {"saved_offsets": list(part.offsets)} for name, part in parts}
    told: dict[str, object] = {
        "__metadata__": {"DCP_SHARDING_INFO": json.dumps(where), "DCP_VERSION": "1.0", "format": "pt"},
    }  # fmt: skip
    begin = 0
    for name, part in parts:
        tensor = part.tensor
        if tensor.dtype not in TYPES:
            raise TypeError(f"{name} is of {tensor.dtype}, which a checkpoint's files have no name for")
        end = begin + tensor.nbytes
        told[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _put(descriptor: int, held: memoryview, tally: FileDigests) -> None:
    """All of it, in pieces that a processor's cache may still hold when they are written."""
    for begin in range(0, len(held), PIECE_BYTES):
        piece = held[begin : begin + PIECE_BYTES]
        tally.add(piece)
        while piece:
            piece = piece[os.write(descriptor, piece) :]
