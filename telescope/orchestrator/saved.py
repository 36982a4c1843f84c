"""The orchestrator's part of a checkpoint: the core's snapshot, the shelf with its arrays, and the counters of the summary.

    orchestrator/state.msgpack   everything but arrays, and the digest of the other file
    orchestrator/shelf.bin       ids, mask, logprobs, versions of one rollout after another, little-endian
    orchestrator/rows.json       how far the run directory's rows had come (runlog/attempts.py)

Owns these bytes; refuses to decide when they are written, and what a file that is damaged means for the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from telescope.flow.snapshot import Snapshot
from telescope.orchestrator.shelf import Scored
from telescope.records import Record, RolloutOrder, Trajectory
from telescope.runlog import attempts
from telescope.runlog.checkpoints import CheckpointUnreadable, orchestrator_part
from telescope.wire.messages import RolloutDone

FORMAT = 1
STATE, SHELF, ROWS = "state.msgpack", "shelf.bin", "rows.json"
COLUMNS = (("ids", "<i4"), ("mask", "u1"), ("logprobs", "<f4"), ("versions", "<i4"))
TOKEN_BYTES = sum(np.dtype(kind).itemsize for _, kind in COLUMNS)


class SavedRollout(Record):
    """One of the shelf. Its arrays are those of its branches (`done.branch_lengths`), in the order of the shelf."""

    order: RolloutOrder
    done: RolloutDone
    length_penalty: float
    normalised: float | None


class Counters(Record):
    """What the summary adds up over a run. `tallied`: rollouts of the shelf that were scored since the last batch closed."""

    tokens: dict[str, int] = msgspec.field(default_factory=dict)
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    out_of_range: dict[str, int] = msgspec.field(default_factory=dict)
    updates_skipped: int = 0
    tallied: tuple[int, ...] = ()


class State(Record):
    format: int
    core: Snapshot
    rollouts: tuple[SavedRollout, ...]
    counters: Counters
    shelf_digest: str


class Part(NamedTuple):
    """All that is to be written, as it is at the checkpoint; nothing in it changes afterwards."""

    core: Snapshot
    rollouts: tuple[Scored, ...]
    counters: Counters
    rows: tuple[attempts.CountedRows, ...]


def write(folder: Path, part: Part) -> int:
    """Write the part below a partial checkpoint. Gives its bytes. Raises OSError."""
    place = orchestrator_part(folder)
    digest, nbytes = hashlib.blake2b(digest_size=16), 0
    with (place / SHELF).open("wb") as file:
        for rollout in part.rollouts:
            for name, kind in COLUMNS:
                for branch in rollout.branches:
                    data = getattr(branch, name).astype(kind, copy=False).tobytes()
                    digest.update(data)
                    nbytes += file.write(data)
    saved = tuple(SavedRollout(one.order, one.done, one.length_penalty, one.normalised) for one in part.rollouts)
    text = msgspec.msgpack.encode(State(FORMAT, part.core, saved, part.counters, digest.hexdigest()))
    nbytes += (place / STATE).write_bytes(text)
    attempts.write_rows(place / ROWS, part.rows)
    return nbytes


def read(folder: Path) -> tuple[State, list[Scored]]:
    """Of a complete checkpoint. Raises `ModelFilesUnreadable`, which names the file and the remedy."""
    place = orchestrator_part(folder)
    try:
        state = msgspec.msgpack.decode((place / STATE).read_bytes(), type=State)
        data = (place / SHELF).read_bytes()
    except OSError as error:
        raise CheckpointUnreadable(
            f"{error.filename} can't be read ({error.strerror}): a checkpoint of weights alone has no such file, and no run "
            "can go on from one; resume from another step"
        ) from error
    except (msgspec.DecodeError, ValueError) as error:
        raise _damaged(place / STATE, str(error)) from error
    if state.format != FORMAT:
        raise _damaged(place / STATE, f"it has format {state.format}, and this Telescope reads {FORMAT}")
    tokens = sum(sum(rollout.done.branch_lengths) for rollout in state.rollouts)
    if hashlib.blake2b(data, digest_size=16).hexdigest() != state.shelf_digest or len(data) != tokens * TOKEN_BYTES:
        raise _damaged(place / SHELF, f"its {len(data)} bytes are not those that were written")
    if missing := state.core.rollout_ids - {rollout.order.rollout_id for rollout in state.rollouts}:
        raise _damaged(place / STATE, f"it lacks rollout {min(missing)}")
    return state, list(_rollouts(state.rollouts, data))


def _rollouts(rollouts: Iterable[SavedRollout], data: bytes) -> Iterable[Scored]:
    offset = 0
    for saved in rollouts:
        lengths = saved.done.branch_lengths
        ends, columns = np.cumsum(lengths)[:-1], []
        for _, kind in COLUMNS:
            array = np.frombuffer(data, kind, sum(lengths), offset)
            offset += array.nbytes
            columns.append(np.split(array, ends))
        branches = tuple(Trajectory(*piece) for piece in zip(*columns, strict=True))
        yield Scored(saved.order, saved.done, branches, saved.length_penalty, saved.normalised)


def _damaged(file: Path, how: str) -> CheckpointUnreadable:
    folder = file.parents[1]
    return CheckpointUnreadable(f"{file} is damaged ({how}): remove the folder {folder} and resume from an earlier step")
