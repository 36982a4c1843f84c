"""Hands runs to Slurm through submitit: one job a run, or one array for the points of a sweep. Or writes the batch file alone.

submitit pickles what a job is to call, and whoever can write its folder decides what runs: the folder is 0700, and all that is
pickled is the name of `batch.run` and a path.
"""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from telescope._launch.process_environment import find_python_path
from telescope._launch.slurm import batch_job, hold, queue
from telescope._launch.slurm.batch_file import make_parameters
from telescope.config.slurm import SlurmSettings
from telescope.runlog.attempts import write_submission
from telescope.runlog.layout import RunDirectory, write_atomically

if TYPE_CHECKING:
    from submitit import SlurmExecutor

DRY_RUN_SCRIPT = "submission.sh"


class SubmitRefused(RuntimeError):
    """The runs could not be submitted; the text is a sentence with the remedy. `left_queued`: a job of them is in the queue all
    the same, and could not be taken back."""

    def __init__(self, text: str, *, left_queued: bool = False) -> None:
        super().__init__(text)
        self.left_queued = left_queued


@dataclass(frozen=True)
class SubmittedRun:
    """One run on its way."""

    directory: RunDirectory
    job_id: str
    """Empty after a dry run."""
    script: Path
    unnoted: str = ""
    """Why the job could not be noted in the run directory, where it could not."""


def submit(
    runs: Sequence[RunDirectory], settings: SlurmSettings, *, name: str, folder: Path, dry_run: bool = False
) -> list[SubmittedRun]:
    """Submit `runs`, whose directories are written, and note each one's job there. Several become one array, with at most
    `settings.array_parallelism` of them running at once.

    `folder`: submitit's own, seen by all nodes; made 0700. A job that could not be noted stays queued, and says so. Raises
    `SubmitRefused`; then no job is left queued, or the text names it."""
    refuse_submission(settings, len(runs), dry_run=dry_run)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        executor = _make_executor(settings, name, folder, dry_run)
        submitted = _write_script(executor, runs, folder) if dry_run else _submit_jobs(executor, runs, folder)
    except OSError as error:
        raise SubmitRefused(f"{folder} can't be written: {error.strerror or error}") from error
    return [_note_job(one) for one in submitted]


def _note_job(one: SubmittedRun) -> SubmittedRun:
    """The job itself notes it again when it begins, if it can."""
    try:
        write_submission(one.directory, one.job_id, one.script)
    except OSError as error:
        return replace(one, unnoted=f"{one.directory.slurm_json} can't be written: {error.strerror or error}")
    return one


def refuse_submission(settings: SlurmSettings, points: int, *, dry_run: bool) -> None:
    """What can be known before any directory is made. Raises `SubmitRefused`."""
    if points > 1 and settings.hetjob:
        raise SubmitRefused(
            "Slurm has no arrays of heterogeneous jobs, and a sweep is an array: set cluster.slurm.groups=allocation, or "
            "submit each point by itself"
        )
    if importlib.util.find_spec("submitit") is None:
        raise SubmitRefused("cluster=slurm submits through submitit, which is not installed: pip install -e '.[slurm]'")
    if not dry_run and shutil.which("srun") is None:
        raise SubmitRefused(
            "cluster=slurm needs Slurm's clients, and there is no srun on PATH: start the run on a login node, or set "
            "cluster.dry_run=true to write the batch file alone"
        )


def render_script(settings: SlurmSettings, *, name: str, folder: Path, points: int = 1) -> str:
    """The batch file that `submit` would write for so many points."""
    return _render(_make_executor(settings, name, folder, dry_run=True), points)


def _submit_jobs(executor: SlurmExecutor, runs: Sequence[RunDirectory], folder: Path) -> list[SubmittedRun]:
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    before = _list_accepted(executor)
    try:
        jobs = executor.map_array(batch_job.run, [str(run.path) for run in runs])
    except (FailedJobError, FailedSubmissionError) as error:
        raise SubmitRefused(f"sbatch refused the job: {error}") from error
    except OSError as error:
        raise _cancel_half_submitted(sorted(_list_accepted(executor) - before), error) from error
    script = folder / f"{jobs[0].job_id.partition('_')[0]}_submission.sh"
    return [SubmittedRun(run, job.job_id, script) for run, job in zip(runs, jobs, strict=True)]


def _list_accepted(executor: SlurmExecutor) -> set[str]:
    """Jobs that sbatch has given a number in this process, those included whose files could then not be put in place."""
    return set(executor.job_class.watcher._registered)


def _cancel_half_submitted(jobs: Sequence[str], error: OSError) -> SubmitRefused:
    """A job without its files would wait for them and fail: it is taken back."""
    if not jobs:
        return SubmitRefused(f"sbatch could not be called: {error}")
    accepted = f"Slurm accepted job {', '.join(jobs)}, whose files could then not be written ({error.strerror or error})"
    try:
        queue.cancel(*jobs)
    except queue.SlurmSilent as silent:
        said = f"{accepted}, and which could not be taken back ({silent}): scancel {' '.join(jobs)}"
        return SubmitRefused(said, left_queued=True)
    return SubmitRefused(f"{accepted}: it was cancelled")


def _write_script(executor: SlurmExecutor, runs: Sequence[RunDirectory], folder: Path) -> list[SubmittedRun]:
    script = folder / DRY_RUN_SCRIPT
    write_atomically(script, _render(executor, len(runs)), mode=0o700)
    return [SubmittedRun(run, "", script) for run in runs]


def _render(executor: SlurmExecutor, points: int) -> str:
    if points > 1:
        executor.parameters["map_count"] = points
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "dry-run")
    return text


def _make_executor(settings: SlurmSettings, name: str, folder: Path, dry_run: bool) -> SlurmExecutor:
    from submitit import SlurmExecutor

    class OnPaper(SlurmExecutor):
        """For hosts without Slurm, where a batch file can be written all the same."""

        @classmethod
        def affinity(cls) -> int:
            return 1

    path = find_python_path()
    kind = OnPaper if dry_run else SlurmExecutor
    executor = kind(folder=folder, python=f"exec {shlex.join([sys.executable, '-I', '-S', hold.__file__])}")
    executor.update_parameters(**make_parameters(settings, name, {"PYTHONPATH": path} if path else {}))
    return executor
