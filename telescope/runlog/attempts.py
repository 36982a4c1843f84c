"""The attempts of one run, which a batch system starts, takes down and starts again in the same directory; and which rows of
which attempt count, where the run has gone on from checkpoints.

Owns `slurm.json` (the job), `attempts.jsonl` (one line when an attempt starts, one when it ends) and the putting aside of what
an earlier attempt left. Refuses to decide whether there is another attempt.

An attempt that dies has written rows of steps that the next one trains anew. So each checkpoint says how far the rows had
come (`orchestrator/rows.json`), whoever starts an attempt from it puts that into the run directory (`lineage.json`), and
readers take of each earlier attempt what was written up to there. Refuses to read rows.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from telescope.exit_codes import STOPS
from telescope.records import Record
from telescope.runlog.files import read_bytes, read_json, read_object
from telescope.runlog.identity import read_identity, write_identity
from telescope.runlog.layout import RunDirectory, write_atomically

FORMAT = 1
KEPT = frozenset(
    {
        *("config.json", "config.yaml", "cmdline.txt", "run.json", "plan.json", "slurm.json", "attempts.jsonl"),
        *("attempts", "slurm", "checkpoints", "evals", "http.key"),
    }
)
"""What belongs to the run rather than to one attempt."""


class Submission(Record, frozen=True):
    """How a run was submitted."""

    format: int
    job_id: str
    """What `scancel` and `scontrol` take: `12`, `12_3` of an array; empty after a dry run."""
    script: str
    """The batch file."""
    submitted: str
    """ISO 8601, UTC."""


class Attempt(Record):
    """One start of the run, and its end where that was written down."""

    number: int
    job_id: str
    attempt: str
    """The name that its processes go by, e.g. `12.1`."""
    nodes: tuple[str, ...]
    started: str
    ended: str = ""
    why: str = ""
    """`done`, `walltime`, `preempted`, `requeued` (by somebody else), `node_failed`, `cancelled`, `stopped` (by a signal,
    outside a batch system), `failed`; empty while it runs, or where it was killed."""
    exit_code: int | None = None
    requeued: bool = False
    """Another attempt was asked for."""


def write_submission(run: RunDirectory, job_id: str, script: Path) -> None:
    record = Submission(FORMAT, job_id, str(script), _now())
    write_atomically(run.slurm_json, msgspec.json.format(msgspec.json.encode(record)).decode() + "\n", mode=0o600)


def read_submission(run: RunDirectory) -> Submission | None:
    """None where the run was not submitted. Raises `DamagedFile`."""
    try:
        return read_json(run.slurm_json, Submission)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_attempts(run: RunDirectory) -> list[Attempt]:
    """All attempts so far, the latest last. A line that is torn, or is not an attempt, is left out. Raises `DamagedFile`."""
    try:
        lines = read_bytes(run.attempts).splitlines()
    except FileNotFoundError:
        return []
    found: dict[int, Attempt] = {}
    for line in lines:
        try:
            attempt = msgspec.json.decode(line, type=Attempt)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        found[attempt.number] = attempt
    return [found[number] for number in sorted(found)]


def begin(run: RunDirectory, job_id: str, attempt: str, nodes: tuple[str, ...]) -> Attempt:
    """Make the directory ready for the next attempt, put the last one's files aside, and note the start.

    `run.json` keeps the run's id and gets the attempt's name: its processes meet none of an earlier attempt."""
    number = len(read_attempts(run)) + 1
    if number > 1:
        put_aside(run, number - 1)
    write_identity(run, msgspec.structs.replace(read_identity(run), attempt=attempt))
    started = Attempt(number, job_id, attempt, nodes, _now())
    _append(run, started)
    return started


def note_first(run: RunDirectory) -> None:
    """A run outside a batch system writes no line of its first attempt; the second one does it for it, before it puts
    `exit.json` aside. Without that file the attempt was killed, and has no end."""
    if read_attempts(run):
        return
    first = read_identity(run)
    attempt = Attempt(1, "", first.attempt, (), first.created)
    _append(run, attempt)
    code = read_object(run.exit_json).get("exit_code")
    if isinstance(code, int):
        ended = datetime.fromtimestamp(run.exit_json.stat().st_mtime, UTC).isoformat(timespec="seconds")
        _append(run, msgspec.structs.replace(attempt, ended=ended, why=_why(code), exit_code=code))


def note_start(run: RunDirectory, number: int, name: str) -> Attempt:
    started = Attempt(number, "", name, (socket.gethostname(),), _now())
    _append(run, started)
    return started


def note_end(run: RunDirectory, exit_code: int) -> None:
    """Of the latest attempt, where attempts are written down at all."""
    known = read_attempts(run)
    if known and not known[-1].job_id:
        end(run, known[-1], _why(exit_code), exit_code, requeued=False)


def end(run: RunDirectory, attempt: Attempt, why: str, exit_code: int, requeued: bool) -> None:
    _append(run, msgspec.structs.replace(attempt, ended=_now(), why=why, exit_code=exit_code, requeued=requeued))


def put_aside(run: RunDirectory, number: int) -> None:
    """Move all that attempt `number` wrote to `attempts/<number>/`, logs too. Called again after a crash it goes on."""
    folder = run.earlier_attempt(number)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in sorted(run.path.iterdir()):
        if path.name not in KEPT:
            os.replace(path, _free(folder / path.name))
    run.make_folders()


def _free(path: Path) -> Path:
    """A name that nothing has: a putting aside that was cut short left some there, and perhaps empty folders here."""
    if not path.exists():
        return path
    return next(other for count in range(2, 10_000) if not (other := path.with_name(f"{path.name}.{count}")).exists())


def _append(run: RunDirectory, attempt: Attempt) -> None:
    descriptor = os.open(run.attempts, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # a host went down, or a disk was full, in the last line
        os.write(descriptor, (b"\n" if torn else b"") + msgspec.json.encode(attempt) + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _why(exit_code: int) -> str:
    return "done" if exit_code == 0 else "stopped" if exit_code in STOPS else "failed"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


OWN = "orchestrator"
"""The writer that knows, when a checkpoint is ordered, how far its rows have come."""


class CountedRows(Record):
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


ALL_ROWS = (1 << 63) - 1
"""As `last_row`: all of them."""


class Lineage(Record):
    """What an attempt goes on from."""

    attempt: int
    """Its own number, counted from 1."""
    step: int = 0
    """Of the checkpoint; 0: it began at step 1."""
    before: tuple[CountedRows, ...] = ()
    """Earlier attempts, in order."""

    def up_to(self, last_row: int, step: int) -> tuple[CountedRows, ...]:
        """What counts for whoever goes on from a checkpoint that this attempt makes now."""
        return (*self.before, CountedRows(self.attempt, last_row, step))


def read_lineage(run: RunDirectory) -> Lineage:
    """Of the attempt in the run directory. One that began at step 1 has no file. Raises `DamagedFile`."""
    try:
        return read_json(run.lineage_json, Lineage)
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


def write_rows(path: Path, parts: tuple[CountedRows, ...]) -> None:
    write_atomically(path, msgspec.json.encode(parts).decode() + "\n", mode=0o600)


def read_rows(path: Path) -> tuple[CountedRows, ...]:
    """Raises FileNotFoundError and `DamagedFile`."""
    return read_json(path, tuple[CountedRows, ...])
