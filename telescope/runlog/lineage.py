"""Which rows of which attempt count, where a run has gone on from checkpoints.

An attempt that dies has written rows of steps that the next one trains anew. So each checkpoint says how far the rows had
come (`orchestrator/rows.json`), whoever starts an attempt from it puts that into the run directory (`lineage.json`), and
readers take of each earlier attempt what was written up to there. Owns these two files; refuses to read rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from telescope.records import Record
from telescope.runlog.attempts import read_attempts
from telescope.runlog.layout import RunDirectory, write_atomically

OWN = "orchestrator"
"""The writer that knows, when a checkpoint is ordered, how far its rows have come."""


class Part(Record):
    """Rows of an earlier attempt that count: of the orchestrator's, those up to `last_row` (its `seq`); of others, whose
    numbers it doesn't know, those of steps up to `step`."""

    attempt: int
    last_row: int
    step: int | None = None
    """Of the checkpoint that says so; None: rows of other writers all count."""

    def counts(self, writer: str, row: Mapping[str, Any]) -> bool:
        if writer == OWN:
            return bool(row["seq"] <= self.last_row)
        return self.step is None or bool(row.get("step", 0) <= self.step)


class Lineage(Record):
    """What an attempt goes on from."""

    attempt: int
    """Its own number, counted from 1."""
    step: int = 0
    """Of the checkpoint; 0: it began at step 1."""
    before: tuple[Part, ...] = ()
    """Earlier attempts, in order."""

    def up_to(self, last_row: int, step: int) -> tuple[Part, ...]:
        """What counts for whoever goes on from a checkpoint that this attempt makes now."""
        return (*self.before, Part(self.attempt, last_row, step))


def read_lineage(run: RunDirectory) -> Lineage:
    """Of the attempt in the run directory. One that began at step 1 has no file."""
    try:
        return msgspec.json.decode(run.lineage_json.read_bytes(), type=Lineage)
    except FileNotFoundError:
        return Lineage(len(read_attempts(run)) or 1)


def attempt_that_trained(run: RunDirectory, step: int) -> str | None:
    """The name of the attempt that trained `step` on the way to what is in `run`: the run's directory, or what an earlier
    attempt left. None where nobody has written names down: the run has had one attempt.

    E.g. attempt 3, which began after step 10 of attempt 1, has trained step 10 in attempt 1 and step 11 itself.
    """
    names = {attempt.number: attempt.attempt for attempt in read_attempts(run.whole)}
    number = int(run.path.name) if run != run.whole else len(names)
    before = read_lineage(run).before if run.lineage_json.exists() else ()
    earlier = (part.attempt for part in before if part.step is not None and part.step >= step)
    return names.get(next(earlier, number))


def write_lineage(run: RunDirectory, lineage: Lineage) -> None:
    write_atomically(run.lineage_json, msgspec.json.encode(lineage).decode() + "\n", mode=0o600)


def write_rows(path: Path, parts: tuple[Part, ...]) -> None:
    write_atomically(path, msgspec.json.encode(parts).decode() + "\n", mode=0o600)


def read_rows(path: Path) -> tuple[Part, ...]:
    """Raises OSError, and `msgspec.DecodeError` where the file is no such file."""
    return msgspec.json.decode(path.read_bytes(), type=tuple[Part, ...])
