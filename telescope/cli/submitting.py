"""Runs that go to Slurm: their directories are written, then one job is submitted, or an array of points that ask for the same.

Owns what is said where Slurm refuses some and has others; refuses to know how sbatch is called (launch/slurm/submit.py).
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from telescope.cli.start import CONFIG_ERROR, OK, RunOrder, make_directory, say
from telescope.runlog import opening
from telescope.runlog.files import DamagedFile, read_bytes
from telescope.runlog.layout import RunDirectory, write_atomically

if TYPE_CHECKING:
    from telescope.cli.sweep import Sweep
    from telescope.config.slurm import SlurmSettings

_log = logging.getLogger("telescope.run")


def submit_all(orders: Sequence[RunOrder], sweep: Sweep | None = None, overrides: Sequence[Sequence[str]] = ()) -> int:
    """Write the run directories, then hand them to Slurm: one job, or one array for points that ask for the same. The sweep is
    told each point's job, or why it has none; what Slurm has accepted stays queued where a later group is refused."""
    from telescope._launch.slurm.submit import SubmitRefused, refuse_submission

    groups: dict[SlurmSettings, list[RunOrder]] = {}
    try:
        for order in orders:
            if order.config.cluster.slurm is None:
                raise SubmitRefused("Some points of the sweep go to Slurm and some do not: give all the same cluster.")
            groups.setdefault(order.config.cluster.slurm, []).append(order)
        for settings, group in groups.items():
            refuse_submission(settings, len(group), dry_run=group[0].config.cluster.dry_run)
    except SubmitRefused as error:
        say(f"{error}\nNothing was submitted.")
        return CONFIG_ERROR
    jobs: dict[Path, str] = {}
    reasons = dict.fromkeys(groups, "not submitted: a run directory of its array could not be made")
    for number, (settings, group) in enumerate(groups.items()):
        try:
            jobs |= _submit_group(settings, group, sweep is not None)
        except SubmitRefused as error:
            reasons |= dict.fromkeys(list(groups)[number:], f"not submitted: {error}")
            say(f"{error}\n{_queued_before(jobs)}")
            break
    if sweep is not None:
        for order, given in zip(orders, overrides, strict=True):
            path, asked = Path(str(order.config.run_dir)), order.config.cluster.slurm
            if path in jobs:
                sweep.submitted(given, path, jobs[path])
            elif asked is not None:
                sweep.refused(given, path, CONFIG_ERROR, reasons[asked])
    return OK if len(jobs) == len(orders) else CONFIG_ERROR


def _queued_before(jobs: Mapping[Path, str]) -> str:
    queued = [job for job in jobs.values() if job]
    if not queued:
        return "Nothing was submitted."
    many = "1 job was" if len(queued) == 1 else f"{len(queued)} jobs were"
    return f"{many} submitted before: {', '.join(queued)} (`scancel {' '.join(queued)}` takes back what is not wanted)."


class HalfDone:
    """A run directory before it is made ready for a job: what is put back where Slurm takes none."""

    def __init__(self, path: Path) -> None:
        self._run = RunDirectory(path)
        self.path = self._run.path
        self._was_there = path.exists()
        self._files: dict[Path, bytes] = {}
        if opening.is_run(path):
            run = self._run
            for file in (run.config_json, run.config_yaml, run.cmdline, run.plan_json, run.run_json):
                with contextlib.suppress(OSError, DamagedFile):
                    self._files[file] = read_bytes(file)

    def take_back(self) -> None:
        """A new directory goes, or is empty as it was; one of an earlier attempt has its settings again. Raises OSError."""
        for file, held in self._files.items():
            write_atomically(file, held.decode("utf-8", "surrogateescape"), mode=0o600)
        if self._files:
            return
        if not self._was_there:
            shutil.rmtree(self._run.path)
            return
        for path in self._run.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _take_back(before: Sequence[HalfDone], made: Sequence[RunDirectory]) -> None:
    """Of those that were made: others are as they were, and may be somebody else's."""
    paths = {run.path for run in made}
    for one in before:
        if one.path not in paths:
            continue
        try:
            one.take_back()
        except OSError as error:
            say(f"{one.path} can't be put back as it was: {error.strerror or error} ({error.filename})")


def _submit_group(settings: SlurmSettings, orders: Sequence[RunOrder], sweep: bool) -> dict[Path, str]:
    """The job of each run directory; fewer where a directory could not be made, of which the user has been told."""
    from telescope._launch.slurm.submit import SubmitRefused, submit

    config = orders[0].config
    with (
        ExitStack() as until_submitted
    ):  # a second command, which would queue a second job, finds the directories locked or queued
        before = [HalfDone(Path(str(order.config.run_dir))) for order in orders]
        directories = [directory for order in orders if (directory := make_directory(order, until_submitted)) is not None]
        if len(directories) < len(orders):
            _take_back(before, directories)
            return {}
        first = directories[0].path
        folder = (first.parent if sweep else first) / "slurm"
        try:
            submitted = submit(directories, settings, name=config.name, folder=folder, dry_run=config.cluster.dry_run)
        except SubmitRefused as error:
            if not error.left_queued:
                _take_back(before, directories)
            raise
    for one in submitted:
        what = f"job {one.job_id}" if one.job_id else f"not submitted, {one.script}"
        sys.stdout.write(f"{what}: run directory {one.directory.path}\n")
        if one.unnoted:
            _log.warning("Warning: job %s is queued, but %s. `scancel %s` takes it back.", one.job_id, one.unnoted, one.job_id)
    return {one.directory.path: one.job_id for one in submitted}
