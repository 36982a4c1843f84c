"""How an attempt of a run is made to begin at a checkpoint: which one, and what is put into the run directory for it.

Owns `resume.json` and `lineage.json` of an attempt; the processes read them. Refuses to start anything, and to judge settings
(telescope/config/resume.py).
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
from telescope.runlog import attempts, checkpoints, eval_rows, holder, opening
from telescope.runlog.attempts import ALL_ROWS, CountedRows, Lineage, read_rows, write_lineage
from telescope.runlog.eval_rows import CHANGED, read_ended, read_in_state
from telescope.runlog.files import DamagedFile
from telescope.runlog.identity import read_identity, write_identity
from telescope.runlog.layout import RunDirectory

ROWS = "rows.json"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems say that lock nothing."""
log = logging.getLogger(__name__)


class CannotResume(ValueError):
    """The text says why, and what to do."""


@dataclass(frozen=True)
class ResumePoint:
    """A complete checkpoint that a run can go on from. `before`: the rows of earlier attempts that count."""

    step: int
    folder: Path
    before: tuple[CountedRows, ...] = ()


def find_resume_point(run: RunDirectory, config: RunConfig, step: int | None = None) -> ResumePoint:
    """The checkpoint of `step`, or the latest one that has the training's state. Raises `CannotResume`."""
    root = checkpoints.root(run, config.checkpoint.dir)
    try:
        folder = checkpoints.find(root, step)
    except checkpoints.CheckpointUnreadable as error:
        raise CannotResume(str(error)) from error
    facts = _read_facts(run, config, folder)
    if not facts.training_state:
        whole = checkpoints.steps_with_state(root)
        if step is not None or not whole or facts.step >= config.number_of_steps:
            earlier = f"; resume from another step ({', '.join(map(str, whole))})" if whole else ""
            raise CannotResume(
                f"{folder} holds weights alone (checkpoint.at_end, checkpoint.save_training_state): a run can't go on from it; "
                f"export it, and begin a new run with the exported model{earlier}"
            )
        log.warning(
            "Warning: the checkpoint of step %d holds weights alone, and the run goes on from that of step %d.",
            *(facts.step, whole[-1]),
        )
        folder = checkpoints.complete_folder(root, whole[-1])
        facts = _read_facts(run, config, folder)
    if has_played_all(run, config, facts.step):
        raise CannotResume(
            f"{run.path} has trained its number_of_steps={config.number_of_steps}: give a larger number_of_steps to train on"
            if facts.step >= config.number_of_steps
            else f"{run.path} has ended with step {facts.step} by eval.stop_after={config.eval.stop_after}: set it to null to "
            "train on, or to more"
        )
    return ResumePoint(facts.step, folder, _read_rows(folder))


def has_played_all(run: RunDirectory, config: RunConfig, step: int) -> bool:
    """Whether nothing is left to do behind the checkpoint of `step`: all is trained, and each eval that it holds is over. Evals
    that the settings have gained since have nothing to be played beside. Raises `CannotResume`."""
    limit = config.eval.stop_after
    if not config.active_evals or step > config.number_of_steps or (limit is None and step < config.number_of_steps):
        return step >= config.number_of_steps
    from telescope.orchestrator import saved_state  # arrays and all: for those who resume alone

    names = {one.name for one in config.active_evals}
    folder = checkpoints.complete_folder(checkpoints.root(run, config.checkpoint.dir), step)
    try:
        if step < config.number_of_steps:
            early = saved_state.read_early_stop(folder)
            measure = config.stop_measure
            if measure is None or not early.is_by(measure.name, lower=measure.lower_is_better):
                return False
            if early.last_step != step or limit is None or early.without_gain < limit:
                return False
        held = {(name, at) for name, at in saved_state.read_evals_under_way(folder) if name in names}
        return not held or held <= read_ended(run)
    except (checkpoints.CheckpointUnreadable, DamagedFile) as error:
        raise CannotResume(str(error)) from error


def find_latest(run: RunDirectory, config: RunConfig) -> ResumePoint | None:
    """For attempts that begin by themselves: the latest complete checkpoint with the training's state, that of the last step
    too. Damaged ones are named in the log and passed over. None where there is none; raises `CannotResume` where there are only
    damaged ones: what was trained is not to be given up for that."""
    root, damage = checkpoints.root(run, config.checkpoint.dir), None
    for step in reversed(checkpoints.steps(root)):
        folder = checkpoints.complete_folder(root, step)
        try:
            facts = _read_facts(run, config, folder)
            if facts.training_state or step >= config.number_of_steps:
                return ResumePoint(step, folder, _read_rows(folder) if facts.training_state else ())
        except CannotResume as error:
            log.warning("The checkpoint of step %d is passed over: %s", step, error)
            damage = damage or error
    if damage is not None:
        raise damage
    return None


def _read_facts(run: RunDirectory, config: RunConfig, folder: Path) -> checkpoints.Complete:
    """Raises `CannotResume`: before the directory is made ready, after which an older Telescope could not read its settings."""
    from telescope.orchestrator.saved_state import refuse_another_format  # arrays and all: for those who resume alone

    try:
        facts = checkpoints.read_whole(folder, config.checkpoint.verify)
        refuse_another_format(folder)
    except checkpoints.CheckpointUnreadable as error:
        raise CannotResume(str(error)) from error
    run_id = read_identity(run).run_id
    if facts.run_id != run_id:
        raise CannotResume(f"{folder} is of another run ({facts.run_id}, this one is {run_id}): mend checkpoint.dir")
    return facts


def _read_rows(folder: Path) -> tuple[CountedRows, ...]:
    rows = checkpoints.orchestrator_part(folder) / ROWS
    try:
        return read_rows(rows)
    except FileNotFoundError as error:
        raise CannotResume(f"{rows} is missing: remove the folder {folder} and take an earlier step") from error
    except DamagedFile as error:
        raise CannotResume(f"{error}: remove the folder {folder} and take an earlier step") from error


@contextlib.contextmanager
def lock_attempts(run: RunDirectory) -> Iterator[None]:
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


def refuse_alive(run: RunDirectory) -> None:
    """Raises `CannotResume` while the run may still be going on."""
    seen = opening.look(run)
    found = seen.holder
    if found is None or seen.has_ended:
        return
    match holder.find_state(found, run):
        case "alive":
            raise CannotResume(f"{run.path} is still watched by process {found.pid}: `telescope runs stop {run.path}` ends it")
        case "elsewhere":
            raise CannotResume(
                f"{run.path} was watched by process {found.pid} on {found.host}, which wrote no end of it: see that it is "
                f"gone, then remove {run.holder_json}"
            )
        case "gone":
            return


def refuse_queued(run: RunDirectory) -> None:
    """Raises `CannotResume` where a job of the run waits or runs, or nobody can say that none does: two attempts would write
    into one directory."""
    seen = opening.look(run)
    if not seen.job:
        return
    job, silent = seen.job, ""
    try:
        state = queue.query_state(job)
    except queue.SlurmSilent as error:
        state, silent = "", str(error)
    stage = queue.find_stage(seen.last_of_job, state)
    if stage in ("waiting", "running"):
        raise CannotResume(f"{run.path} has job {job} in Slurm, which is {state}: `scancel {job}` ends it, if that is meant")
    if stage == "unknown" and silent:
        raise CannotResume(
            f"{run.path} was submitted as job {job}, of which Slurm says nothing ({silent}): see that it is gone, then remove "
            f"{run.slurm_json}"
        )


def begin_attempt(run: RunDirectory, config_hash: str, name: str) -> int:
    """Put what the last attempt wrote aside, its configuration too, and give the next one its name. Gives its number."""
    number = keep_settings(run) + 1
    attempts.put_aside(run, number - 1)
    with contextlib.suppress(FileNotFoundError):  # it is not the job's any more, which has ended (`refuse_queued`)
        os.replace(run.slurm_json, run.earlier_attempt(number - 1) / run.slurm_json.name)
    write_identity(run, msgspec.structs.replace(read_identity(run), attempt=name, config_hash=config_hash))
    attempts.note_start(run, number, name)
    return number


def keep_settings(run: RunDirectory) -> int:
    """Copy the last attempt's configuration to where its files are put aside, before others take its place. Gives its number.
    Raises OSError."""
    attempts.note_first(run)
    number = len(attempts.read_attempts(run))
    earlier = run.earlier_attempt(number)
    earlier.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (run.config_json, run.config_yaml, run.plan_json, run.cmdline):
        if path.exists() and not (earlier / path.name).exists():
            shutil.copy2(path, earlier / path.name)
    return number


def begin_at(run: RunDirectory, config: RunConfig, source: ResumePoint, number: int) -> None:
    """Have attempt `number`, which has the directory to itself, begin at the checkpoint. Raises OSError."""
    _clear(run, config, source.step)
    write_lineage(run, Lineage(number, source.step, source.before))
    resume = checkpoints.Resume(checkpoints.FORMAT, source.step, str(source.folder.absolute()))
    checkpoints.write_resume(run, resume)


def refuse_all_played(run: RunDirectory, config: RunConfig) -> None:
    """Raises `CannotResume` where a run that does not train has nothing left to do."""
    played = {(one.name, config.number_of_steps) for one in config.active_evals}
    try:
        ended, changed = read_ended(run), played & read_in_state(run, CHANGED)
    except DamagedFile as error:
        raise CannotResume(str(error)) from error
    if changed:
        raise CannotResume(
            f"the eval {min(changed)[0]} of {run.path} has other settings or prompts than when it began: remove the folder to "
            "play it anew"
        )
    if played <= ended:
        raise CannotResume(f"{run.path} has played all its evals: there is nothing left to play")


def begin_with_rows(run: RunDirectory, number: int) -> None:
    """Have attempt `number` of a run that does not train go on from all rows of those before. Raises OSError."""
    write_lineage(run, Lineage(number, 0, tuple(CountedRows(earlier, ALL_ROWS) for earlier in range(1, number))))


def begin_anew(run: RunDirectory, config: RunConfig) -> None:
    """Have an attempt begin at step 1: checkpoints of the ones before, of weights alone, go aside. Left where they are they
    would be the latest, and what keeps the latest would delete this attempt's. Raises OSError."""
    _clear(run, config, 0)


def _clear(run: RunDirectory, config: RunConfig, step: int) -> None:
    root = checkpoints.root(run, config.checkpoint.dir)
    checkpoints.sweep(root)
    attempt = read_identity(run).attempt
    checkpoints.set_later_aside(root, step, attempt)
    eval_rows.set_later_aside(run, step, attempt)
