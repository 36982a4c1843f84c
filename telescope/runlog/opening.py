"""How a run directory is opened, in three depths: to look how a run stands, to read what it made, to go on with it.

    look    list, tail, stop, show …    refuses nothing: a file that can't be used is named, and all others tell what they know
    read    export, replay, audit, plan the configuration as it was resolved, and from there the files that are used
    go on   resume                      all that the next attempt takes over, before anything is moved

Every command comes in by one of them. Changes nothing. Refuses to judge checkpoints (launch/prepare_attempt.py does) and which
settings may change (config/resume.py does).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from telescope.config.run import RunConfig, load_run, read_settings
from telescope.runlog.attempts import Attempt, Submission, read_attempts, read_submission
from telescope.runlog.files import DamagedFile, read_bytes, read_json, read_lines
from telescope.runlog.holder import Holder, read_holder
from telescope.runlog.identity import RunIdentity, read_identity
from telescope.runlog.layout import RunDirectory

T = TypeVar("T")


class NotARun(ValueError):
    """There is no run directory at the path; the sentence says what is missing."""


# ---- look -----------------------------------------------------------------------------------------------------------


class EvalReward(msgspec.Struct, frozen=True):
    """The latest complete score of an eval."""

    step: int
    reward: float | None = None


class BestCheckpointFile(msgspec.Struct, frozen=True):
    """The best checkpoint, by `checkpoint.keep_best`. `version_first`, `version_last`: of the weights that its score is of."""

    measure: str
    step: int
    score: float
    version_first: int | None = None
    version_last: int | None = None


class RunStatusFile(msgspec.Struct, frozen=True):
    """What those who look use of status.json."""

    step: int | None = None
    steps: int | None = None
    reward: float | None = None
    eval_rewards: dict[str, EvalReward] = {}
    best_checkpoint: BestCheckpointFile | None = None
    state: str = ""
    missing: tuple[str, ...] = ()
    """Processes that are not ready; the first of them where there are many."""


class ExitFile(msgspec.Struct, frozen=True):
    """What those who look use of exit.json."""

    exit_code: int | None = None
    code: int | None = None
    interrupted: Any = None

    @property
    def ended(self) -> int | None:
        """The run's exit code."""
        return self.code if self.exit_code is None else self.exit_code


@dataclass(frozen=True)
class RunLook:
    """What a run directory says of a run, each part empty where nothing says it."""

    run: RunDirectory
    identity: RunIdentity | None
    status: RunStatusFile
    exit: ExitFile
    summary: Mapping[str, Any]
    submission: Submission | None
    attempts: Sequence[Attempt]
    holder: Holder | None
    reason: str
    """Why it ended: the supervisor's verdict where there is one (it names the process that failed), else the summary's."""
    damaged: tuple[DamagedFile, ...]
    """Files that are there and can't be used."""

    @property
    def job(self) -> str:
        """Of Slurm; empty where the run was not submitted, or in a dry run."""
        if self.submission is not None:
            return self.submission.job_id
        return next((one.job_id for one in reversed(self.attempts)), "")

    @property
    def last_of_job(self) -> Attempt | None:
        """The latest attempt, where it is of the job that the run was submitted as last."""
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and last.job_id == self.job else None

    @property
    def has_ended(self) -> bool:
        return self.exit.ended is not None

    def blames(self, path: Path) -> str:
        """The sentence about a file that can't be used; empty where it can, or is not there."""
        return next((str(one) for one in self.damaged if one.path == path), "")


def read_or_note(read: Callable[[], T], damaged: list[DamagedFile], nothing: T) -> T:
    """What `read` gives; `nothing` where the file is not there, or is damaged, which is noted."""
    try:
        return read()
    except DamagedFile as error:
        damaged.append(error)
    except OSError:
        pass
    return nothing


def look(run: RunDirectory) -> RunLook:
    """Raises nothing, whatever lies there."""
    damaged: list[DamagedFile] = []

    def take(read: Callable[[], T], nothing: T) -> T:
        return read_or_note(read, damaged, nothing)

    nothing: dict[str, Any] = {}
    summary = take(lambda: read_json(run.summary_json, dict[str, Any]), nothing)
    verdict = take(lambda: read_bytes(run.run_failure).decode("utf-8", "replace").strip(), "")
    return RunLook(
        run,
        take(lambda: read_identity(run), None),
        take(lambda: read_json(run.status_json, RunStatusFile), RunStatusFile()),
        take(lambda: read_json(run.exit_json, ExitFile), ExitFile()),
        summary,
        take(lambda: read_submission(run), None),
        take(lambda: read_attempts(run), []),
        take(lambda: read_holder(run), None),
        verdict or str(summary.get("exit_reason", "")),
        tuple(damaged),
    )


def is_run(path: Path) -> bool:
    """Whether a run has begun there: its run.json lies there, in whatever state."""
    return os.path.lexists(path / "run.json")


# ---- read -----------------------------------------------------------------------------------------------------------


def read(run: RunDirectory) -> RunConfig:
    """The configuration of a run, as it was resolved when the run was made. Raises `NotARun` and `DamagedFile`."""
    try:
        return load_run(run.config_json)
    except FileNotFoundError as error:
        raise _not_a_run(run, run.config_json) from error


# ---- go on ----------------------------------------------------------------------------------------------------------

REWRITTEN = ("config.json", "config.yaml", "cmdline.txt", "plan.json", "run.json", "attempts.jsonl", "http.key")
"""What an attempt writes where the last one's lies."""


@dataclass(frozen=True)
class BegunRun:
    """A run that another attempt may go on with. `settings` are plain JSON, as they were written; no plug-in was loaded."""

    run: RunDirectory
    identity: RunIdentity
    settings: Mapping[str, Any]
    look: RunLook


def go_on(run: RunDirectory) -> BegunRun:
    """All that the next attempt takes over, or has to replace. Raises `NotARun` and `DamagedFile`."""
    try:
        settings = read_settings(run.config_json)
    except FileNotFoundError as error:
        raise _not_a_run(run, run.config_json) from error
    try:
        identity = read_identity(run)
    except FileNotFoundError as error:
        raise _not_a_run(run, run.run_json) from error
    found = look(run)
    for path in (run.holder_json, run.slurm_json):
        if said := found.blames(path):
            raise DamagedFile(
                path, f"{said.removeprefix(f'{path} ')}; see that nothing of the run goes on, then remove the file"
            )
    for name in REWRITTEN:
        _refuse_other_kind(run.path / name)
    _refuse_unknown_attempts(run)
    return BegunRun(run, identity, settings, found)


def _refuse_other_kind(path: Path) -> None:
    try:
        read_bytes(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise DamagedFile(path, "is a link to nothing") from None


def _refuse_unknown_attempts(run: RunDirectory) -> None:
    """A new attempt's number follows from those that are known: two of one number would be mixed up."""
    try:
        lines = list(read_lines(run.attempts))
    except FileNotFoundError:
        lines = []
    known = {attempt.number for attempt in read_attempts(run)}
    for number, line in enumerate(lines, start=1):
        if line.endswith(b"\n") and line.strip() and not _is_attempt(line):
            raise DamagedFile(run.attempts, f"is damaged in line {number}: put it back as it was")
    kept = [int(earlier.path.name) for earlier in run.earlier_attempts()]
    if missing := sorted(set(kept) - known):
        raise DamagedFile(
            run.attempts,
            f"does not know attempt {missing[0]}, whose files are in {run.earlier_attempt(missing[0])}: put it back as it was",
        )


def _is_attempt(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=Attempt)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _not_a_run(run: RunDirectory, lacking: Path) -> NotARun:
    if not run.path.exists():
        return NotARun(f"{run.path} is not there: name a run directory")
    return NotARun(f"{run.path} has no {lacking.name}: it is not a run directory")
