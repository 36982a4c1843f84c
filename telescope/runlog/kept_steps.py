"""Train steps kept to be run again: the shard of each rank in a file of its own, `kept/step_00000012/rank_0.npz`.

Owns the files: numpy arrays and a msgpack header as bytes, no pickle. Refuses to know what is wrong with a step and how one is
run again (`telescope replay` does).
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import msgspec
import numpy as np

from telescope.records import Denominators, TrainItem
from telescope.runlog.files import DamagedFile, open_file
from telescope.runlog.layout import RunDirectory

FORMAT = 2
ARRAYS = ("ids", "mask", "logprobs", "versions")
ROUTED = "routed"
"""A fifth, where servers recorded which experts tokens went to."""
_STEP = re.compile(r"step_(\d{8})")
DAMAGE = (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, BadZipFile, zlib.error, msgspec.MsgspecError)
"""What numpy says of a file that is not one of arrays."""
_RANK = re.compile(r"rank_(\d+)\.npz")


class NothingKept(ValueError):
    """The step's batch is not there, not whole, or not readable; the sentence says which."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """All of one rank's part but its arrays."""

    format: int = FORMAT
    step: int
    rank: int
    ranks: int
    config_hash: str
    why: str
    """E.g. `2 updates were left out: their gradients were no finite numbers`."""
    items: tuple[TrainItem, ...]
    denominators: tuple[Denominators, ...]
    loss_scale: float | None = None
    """By which the loss was multiplied (float16); None: by nothing, or not known, as the step came to no end."""

    @property
    def version(self) -> int:
        """Of the weights that the step began with."""
        return self.step - 1


class _HeaderFormat(msgspec.Struct):
    """What every version of the header has; the rest may differ."""

    format: int


class KeptShard(msgspec.Struct, frozen=True):
    """One rank's part: its header and its arrays, those of a TrainStep."""

    header: Header
    ids: np.ndarray  # [T] int32
    mask: np.ndarray  # [T] uint8
    logprobs: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32
    routed: np.ndarray | None = None  # [T, L, K] uint8 or int16


def write(run: RunDirectory, header: Header, arrays: Sequence[np.ndarray]) -> Path:
    """Beside, then renamed: a file is there whole or not at all. Raises OSError."""
    folder = run.kept(header.step)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"rank_{header.rank}.npz"
    partial = folder / f".rank_{header.rank}.partial"
    packed = np.frombuffer(msgspec.msgpack.encode(header), np.uint8)
    try:
        with partial.open("wb") as file:
            named = dict(zip((*ARRAYS, ROUTED)[: max(len(arrays), len(ARRAYS))], arrays, strict=True))
            np.savez(file, allow_pickle=False, header=packed, **named)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    return path


def forget(run: RunDirectory, step: int, rank: int) -> None:
    """Remove one rank's part of a step, and the folder with the last."""
    with contextlib.suppress(OSError):
        (run.kept(step) / f"rank_{rank}.npz").unlink(missing_ok=True)
        run.kept(step).rmdir()


def steps(run: RunDirectory) -> list[int]:
    """Steps of which something is kept."""
    found = (_STEP.fullmatch(folder.name) for folder in run.kept(0).parent.glob("step_*"))
    return sorted(int(match[1]) for match in found if match)


def is_kept_by_another(run: RunDirectory, step: int, rank: int) -> bool:
    """Whether a part of the step is there that is not this rank's."""
    return bool(set(_parts(run, step)) - {rank})


def find(run: RunDirectory, step: int) -> RunDirectory:
    """Where the step is kept: the directory itself, or what the latest of its earlier attempts that kept it has left. Raises
    `NothingKept`."""
    places = [run, *run.earlier_attempts()]
    for place in places:
        if _parts(place, step):
            return place
    known = ", ".join(map(str, sorted({found for place in places for found in steps(place)}))) or "none"
    raise NothingKept(
        f"step {step} of {run.path} was not kept (kept are: {known}). trainer.keep_batches keeps those whose gradient is "
        "no finite number, trainer.keep_batches_every every so many steps"
    )


def _parts(run: RunDirectory, step: int) -> dict[int, Path]:
    """By rank."""
    return {int(match[1]): path for path in run.kept(step).glob("rank_*.npz") if (match := _RANK.fullmatch(path.name))}


def read(run: RunDirectory, step: int) -> list[KeptShard]:
    """Every rank's part, in order of the ranks. Raises `NothingKept`."""
    paths = _parts(find(run, step), step)
    parts = [_read(paths[rank]) for rank in sorted(paths)]
    missing = set(range(parts[0].header.ranks)) - set(paths)
    if missing:
        names = ", ".join(f"rank_{rank}.npz" for rank in sorted(missing))
        folder = paths[min(paths)].parent
        raise NothingKept(f"{folder} lacks {names}: the run ended while the step was being kept, or they were killed before")
    return parts


def _read(path: Path) -> KeptShard:
    try:
        with open_file(path) as opened, np.load(opened, allow_pickle=False) as file:
            encoded = file["header"].tobytes()
            written = msgspec.msgpack.decode(encoded, type=_HeaderFormat).format
            if written != FORMAT:
                raise NothingKept(
                    f"{path} has format {written}, and this Telescope reads {FORMAT}: run the step again with the Telescope "
                    "that kept it"
                )
            header = msgspec.msgpack.decode(encoded, type=Header)
            arrays = [file[name] for name in (*ARRAYS, *([ROUTED] if ROUTED in file.files else []))]
    except NothingKept:
        raise
    except DamagedFile as error:
        raise NothingKept(str(error)) from error
    except DAMAGE as error:
        raise NothingKept(f"{path} is damaged: {error}") from error
    return KeptShard(header, *arrays)
