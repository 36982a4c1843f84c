"""`python -m telescope check [overrides]`: is this command line a run, or a sweep, that can start here? Starts nothing.

Exit code 0 where every point is valid, its processes find a place and what it needs is there, 1 where one is not, 2 for a
command line that can't be read. What else telescope.run would refuse here has a line of its own: a check is often made on a
login node, for other hosts.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from telescope._launch.automatic_settings import FindCard
from telescope._launch.process_plan import PlanError, describe_shared_gpus
from telescope._launch.slurm.submit import SubmitRefused, refuse_submission
from telescope._launch.this_host import find_smallest_card
from telescope.cli.command_line import parse_all
from telescope.cli.start import find_absent, find_obstacles, make_plan_here, settle
from telescope.compose.load import Point, UsageError, load_points, places_for
from telescope.compose.sweeper import has_sweeper
from telescope.config.models import hub_problem
from telescope.config.run import RunConfig, config_hash
from telescope.config.words import ConfigError, ConfigProblem
from telescope.runlog.layout import RunDirectory, RunDirectoryInUse

OK, CONFIG_ERROR, USAGE = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="telescope check", description=__doc__, allow_abbrev=False)
    parser.add_argument("-cd", "--config-dir", help="a folder with your own presets")
    parser.add_argument("-m", "--multirun", action="store_true", help="overrides may have several values")
    parser.add_argument("overrides", nargs="*", help="as for telescope.run")
    asked = parse_all(parser, arguments)
    if asked.multirun and has_sweeper(asked.overrides):
        sys.stderr.write(
            "telescope check: hydra/sweeper chooses its points while the sweep goes on: check one of them, without -m and "
            "without hydra/sweeper\n"
        )
        return USAGE
    try:
        points = load_points(asked.overrides, places_for(asked.config_dir), os.environ, sweep=asked.multirun)
    except UsageError as error:
        sys.stderr.write(f"telescope check: {error}\n")
        return USAGE
    hub = functools.cache(hub_problem)
    known: dict[str, list[str]] = {}
    find_card = functools.cache(find_smallest_card)
    found = [(point, judged(point, hub, known, find_card)) for point in points]
    for point, (valid, said) in found:
        (sys.stdout if valid else sys.stderr).write(f"{' '.join(point.overrides) or 'the default run'}: {said}\n")
    wrong = sum(not valid for _, (valid, _) in found)
    if len(points) > 1:
        sys.stdout.write(
            f"{wrong} of {len(points)} points are invalid.\n" if wrong else f"All {len(points)} points are valid.\n"
        )
    return CONFIG_ERROR if wrong else OK


def judged(
    point: Point, hub: Callable[[str], ConfigProblem | None], known: dict[str, list[str]], find_card: FindCard
) -> tuple[bool, str]:
    """Whether the point is a run that has its place and what it needs, and what is to be said of it."""
    if point.config is None or point.problems:
        return False, str(ConfigError(point.problems))
    try:
        standing, plan = make_plan_here(point.config)
        settled = settle(point.config, plan, standing, find_card)
    except PlanError as error:
        return False, str(error)
    if absent := find_absent(point.config, plan, known):
        return False, "\n  - ".join(["What it needs is not here, or not in order:", *absent])
    warnings = [*point.warnings, *filter(None, (describe_shared_gpus(plan) if plan else "", settled.misfit))]
    said = [f"  {settled.sentence}"] if settled.sentence else []
    said += [f"  Warning: {warning}" for warning in warnings]
    refused = [*_directory_in_use(point.config), *_unsubmitted(point.config), *find_obstacles(settled.config, plan, hub)]
    said += [f"  On this machine `telescope run` would refuse it: {sentence}" for sentence in refused]
    return True, "\n".join(["valid, hash " + config_hash(settled.config), *said])


def _directory_in_use(config: RunConfig) -> list[str]:
    """Why no new run could have the directory that it names."""
    try:
        if config.run_dir is not None and config.checkpoint.resume is False:
            RunDirectory.refuse_used(Path(config.run_dir).expanduser().absolute())
    except (RunDirectoryInUse, OSError) as error:
        return [str(error)]
    return []


def _unsubmitted(config: RunConfig) -> list[str]:
    """Why no job could be submitted from this machine."""
    try:
        if config.cluster.slurm is not None:
            refuse_submission(config.cluster.slurm, 1, dry_run=config.cluster.dry_run)
    except SubmitRefused as error:
        return [str(error)]
    return []
