"""Runs that go to Slurm: their directories are written, then one job is submitted, or an array of points that ask for the same.

Owns what is said where Slurm refuses some and has others; refuses to know how sbatch is called (launch/slurm/submit.py).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from telescope._launch.held_signals import HeldSignals, hold_signals
from telescope.cli.half_done import HalfDone
from telescope.cli.start import CONFIG_ERROR, OK, RunOrder, make_directory, say
from telescope.runlog.layout import RunDirectory

if TYPE_CHECKING:
    from telescope.cli.sweep import Sweep
    from telescope.compose.load import Point
    from telescope.config.slurm import SlurmSettings

_log = logging.getLogger("telescope.run")


def submit_all(orders: Sequence[RunOrder], sweep: Sweep | None = None, points: Sequence[Point] = ()) -> int:
    """Write the run directories, then hand them to Slurm: one job, or one array for points that ask for the same. The sweep is
    told each point's job, or why it has none; what Slurm has accepted stays queued where a later group is refused.

    A signal waits until sbatch has answered: what is not queued then is taken back, what is queued is named."""
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
    with hold_signals() as held:
        for number, (settings, group) in enumerate(groups.items()):
            left = list(groups)[number:]
            try:
                jobs |= _submit_group(settings, group, sweep is not None, held)
            except SubmitRefused as error:
                reasons |= dict.fromkeys(left, f"not submitted: {error}")
                say(f"{error}\n{_queued_before(jobs)}")
                break
            if held.number is not None:
                reasons |= dict.fromkeys(left, "not submitted: interrupted")
                say(_queued_before(jobs))
                break
        if sweep is not None:
            for order, point in zip(orders, points, strict=True):
                path, asked = Path(str(order.config.run_dir)), order.config.cluster.slurm
                if path in jobs:
                    sweep.submitted(point.overrides, path, jobs[path], point.swept)
                elif asked is not None:
                    sweep.refused(point.overrides, path, CONFIG_ERROR, reasons[asked], point.swept)
    if held.number is not None:
        return held.exit_code
    return OK if len(jobs) == len(orders) else CONFIG_ERROR


def _queued_before(jobs: Mapping[Path, str]) -> str:
    queued = [job for job in jobs.values() if job]
    if not queued:
        return "Nothing was submitted."
    many = "1 job was" if len(queued) == 1 else f"{len(queued)} jobs were"
    return f"{many} submitted before: {', '.join(queued)} (`scancel {' '.join(queued)}` takes back what is not wanted)."


def _take_back(before: Sequence[HalfDone], made: Sequence[RunDirectory]) -> None:
    """Of those that were made: others are as they were, and may be somebody else's."""
    paths = {run.path for run in made}
    for one in before:
        if one.path in paths:
            one.take_back_or_say(say)


def _submit_group(settings: SlurmSettings, orders: Sequence[RunOrder], sweep: bool, held: HeldSignals) -> dict[Path, str]:
    """The job of each run directory; none where a directory could not be made, of which the user has been told, or where a
    signal came before sbatch was called."""
    from telescope._launch.slurm.submit import SubmitRefused, submit

    config = orders[0].config
    with (
        ExitStack() as until_submitted
    ):  # a second command, which would queue a second job, finds the directories locked or queued
        before = [HalfDone(Path(str(order.config.run_dir))) for order in orders]
        directories: list[RunDirectory] = []
        for order in orders:
            if held.number is None and (directory := make_directory(order, until_submitted)) is not None:
                directories.append(directory)
        if held.number is not None or len(directories) < len(orders):
            _take_back(before, directories)
            return {}
        first = directories[0].path
        folder = (first.parent if sweep else first) / "slurm"
        name = first.name if sweep and len(orders) == 1 else config.name  # the points of an array name themselves
        try:
            submitted = submit(directories, settings, name=name, folder=folder, dry_run=config.cluster.dry_run)
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
