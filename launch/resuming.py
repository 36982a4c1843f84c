"""How an attempt of a run is made to begin at a checkpoint: which one, and what is put into the run directory for it.

Owns `resume.json` and `lineage.json` of an attempt; the processes read them. Refuses to start anything, and to judge settings
(telescope/config/continuing.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from telescope._launch.slurm import queue
from telescope.config.run import RunConfig
from telescope.runlog import attempts, checkpoints, holder
from telescope.runlog.identity import read_identity, write_identity
from telescope.runlog.layout import RunDirectory
from telescope.runlog.lineage import Lineage, Part, read_rows, write_lineage

ROWS = "rows.json"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems say that lock nothing."""
log = logging.getLogger(__name__)


class CannotResume(ValueError):
    """The text says why, and what to do."""


@dataclass(frozen=True)
class Origin:
    """A complete checkpoint that a run can go on from. `before`: the rows of earlier attempts that count."""

    step: int
    folder: Path
    before: tuple[Part, ...] = ()


def origin(run: RunDirectory, config: RunConfig, step: int | None = None) -> Origin:
    """The checkpoint of `step`, or the latest one. Raises `CannotResume`."""
    try:
        folder = checkpoints.find(checkpoints.root(run, config.checkpoint.dir), step)
        facts = checkpoints.read_whole(folder)
    except checkpoints.CheckpointUnreadable as error:
        raise CannotResume(str(error)) from error
    run_id = read_identity(run).run_id
    if facts.run_id != run_id:
        raise CannotResume(f"{folder} is of another run ({facts.run_id}, this one is {run_id}): mend checkpoint.dir")
    if not facts.training_state:
        raise CannotResume(
            f"{folder} holds weights alone (checkpoint.save_training_state=false): a run can't go on from it; export it, and "
            "begin a new run with the exported model"
        )
    if facts.step >= config.number_of_steps:
        raise CannotResume(
            f"{run.path} has trained its number_of_steps={config.number_of_steps}: give a larger number_of_steps to train on"
        )
    return Origin(facts.step, folder, _rows_before(folder))


def latest_whole(run: RunDirectory, config: RunConfig) -> Origin | None:
    """For attempts that begin by themselves: the latest checkpoint that can be gone on from; those that can't are named in the
    log and passed over. None where there is none."""
    there = checkpoints.steps(checkpoints.root(run, config.checkpoint.dir))
    for step in reversed(there):
        try:
            return origin(run, config, step)
        except CannotResume as error:
            log.warning("The checkpoint of step %d is passed over: %s", step, error)
    return None


def _rows_before(folder: Path) -> tuple[Part, ...]:
    rows = checkpoints.orchestrator_part(folder) / ROWS
    try:
        return read_rows(rows)
    except (OSError, ValueError) as error:  # a DecodeError is a ValueError, and so is text that is no UTF-8
        raise CannotResume(f"{rows} can't be read ({error}): remove the folder {folder} and take an earlier step") from error


@contextlib.contextmanager
def alone(run: RunDirectory) -> Iterator[None]:
    """One at a time makes a directory ready for its next attempt; whoever comes second is refused, and finds it watched when
    this is over. The lock goes with the process. Raises `CannotResume`."""
    descriptor = os.open(run.attempts, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CannotResume(f"{run.path} is being resumed by another process at this moment: one is enough") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


def refuse_living(run: RunDirectory) -> None:
    """Raises `CannotResume` while the run may still be going on."""
    _refuse_queued(run)
    found = holder.read_holder(run)
    if found is None or run.exit_json.exists():
        return
    match holder.life(found):
        case "alive":
            raise CannotResume(f"{run.path} is still watched by process {found.pid}: `telescope runs stop {run.path}` ends it")
        case "elsewhere":
            raise CannotResume(
                f"{run.path} was watched by process {found.pid} on {found.host}, which wrote no end of it: see that it is "
                f"gone, then remove {run.holder_json}"
            )
        case "gone":
            return


def _refuse_queued(run: RunDirectory) -> None:
    """A job that Slurm has yet to start, or will start again, needs no other one."""
    submission = attempts.read_submission(run)
    if submission is None or not submission.job_id:
        return
    try:
        state = queue.states([submission.job_id]).get(submission.job_id, "")
    except queue.SlurmSilent:
        return  # what the run directory says is all there is
    if queue.stage_of(run, state) in ("waiting", "running"):
        raise CannotResume(
            f"{run.path} is Slurm's job {submission.job_id}, which is {state.lower() or 'not over'}: let it go on, or end it "
            f"with `telescope runs stop {run.path}`"
        )


def next_attempt(run: RunDirectory, config_hash: str, name: str) -> int:
    """Put what the last attempt wrote aside, its configuration too, and give the next one its name. Gives its number."""
    attempts.note_first(run)
    number = len(attempts.read_attempts(run)) + 1
    attempts.put_aside(run, number - 1)
    earlier = RunDirectory(run.earlier_attempt(number - 1))
    for path in (run.config_json, run.config_yaml, run.plan_json, run.cmdline):
        if path.exists() and not (earlier.path / path.name).exists():
            shutil.copy2(path, earlier.path / path.name)
    write_identity(run, msgspec.structs.replace(read_identity(run), attempt=name, config_hash=config_hash))
    attempts.note_start(run, number, name)
    return number


def begin_anew(run: RunDirectory, config: RunConfig) -> None:
    """Have an attempt begin at step 1 though there are checkpoints: they are set aside, or the next attempt would take them for
    its latest, and `checkpoint.keep_last` those of this one for the oldest. Raises OSError."""
    root, identity = checkpoints.root(run, config.checkpoint.dir), read_identity(run)
    if checkpoints.of_another_run(root, identity.run_id) is None:  # the orchestrator will refuse it
        checkpoints.sweep(root)
        checkpoints.set_later_aside(root, 0, identity.attempt)


def begin_at(run: RunDirectory, config: RunConfig, source: Origin, number: int) -> None:
    """Have attempt `number`, which has the directory to itself, begin at the checkpoint. Raises OSError."""
    attempt = read_identity(run).attempt
    root = checkpoints.root(run, config.checkpoint.dir)
    checkpoints.sweep(root)
    checkpoints.set_later_aside(root, source.step, attempt)
    write_lineage(run, Lineage(number, source.step, source.before))
    resume = checkpoints.Resume(checkpoints.FORMAT, source.step, str(source.folder.absolute()))
    checkpoints.write_resume(run, resume)
