"""`python -m telescope.run`: the composition root. Composes, validates, plans, writes the run directory, and hands over.

Everything about a run is decided here once; the other processes read it from the run directory. Heavy imports wait until they
are needed, so that `--help` and a refusal answer at once.
"""

from __future__ import annotations

from telescope._launch import terminal

if __name__ == "__main__":
    terminal.prepare()  # before the imports below: they take a moment, in which a Ctrl-C must not be a traceback

import argparse
import logging
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from telescope._launch.plan import Plan
    from telescope._launch.standing import Standing
    from telescope.compose.load import Point
    from telescope.config.run import RunConfig
    from telescope.config.slurm import SlurmSettings
    from telescope.runlog.layout import RunDirectory

OK, CONFIG_ERROR, USAGE = 0, 1, 2
INTERRUPTED = (129, 130, 143)
_log = logging.getLogger("telescope.run")


class _Parser(argparse.ArgumentParser):
    """argparse whose complaint is one sentence on stderr."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"telescope.run: {message}; --help says what there is\n")


@dataclass(frozen=True)
class Order:
    """One run, ready to be written down and started; `config` has its name and run_dir."""

    config: RunConfig
    plan: Plan | None
    """None where the hosts have yet to meet."""
    standing: Standing
    warnings: tuple[str, ...]
    arguments: tuple[str, ...]
    started: datetime


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="telescope.run", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-cd", "--config-dir")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--new-key", metavar="FILE")
    parser.add_argument("overrides", nargs="*")
    parsed = parser.parse_intermixed_args(list(arguments))
    if parsed.resolve and not parsed.cfg:
        parser.error("--resolve goes with --cfg job")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """One command line; the exit code is that of docs/configuration.md."""
    asked = _parse(arguments)
    if asked.new_key:
        return _new_key(Path(asked.new_key))
    from telescope.compose.load import UsageError, load_points, places_for

    try:
        places = places_for(asked.config_dir)
        if asked.help:
            from telescope.compose.help import help_text

            sys.stdout.write(help_text(places))
            return OK
        points = load_points(asked.overrides, places, os.environ, sweep=asked.multirun)
    except UsageError as error:
        _say(f"telescope.run: {error}")
        return USAGE
    if any(point.problems for point in points):
        _say(_refusal(points))
        return CONFIG_ERROR
    if asked.cfg:
        _show(points, resolved=asked.resolve)
        return OK
    return _run_all(points, arguments)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _show(points: Sequence[Point], resolved: bool) -> None:
    from telescope.compose.load import as_yaml

    for point in points:
        text = _yaml(point.config) if resolved and point.config is not None else as_yaml(point)
        sys.stdout.write(text if len(points) == 1 else f"# {' '.join(point.overrides)}\n{text}---\n")


def _refusal(points: Sequence[Point]) -> str:
    from telescope.config.words import ConfigError

    if len(points) == 1:
        return f"{ConfigError(points[0].problems)}\nNothing was started."
    wrong = [point for point in points if point.problems]
    reasons = [f"{' '.join(point.overrides)}\n{ConfigError(point.problems)}" for point in wrong]
    return "\n".join([f"{len(wrong)} of {len(points)} points are invalid; nothing was started.", *reasons])


def _run_all(points: Sequence[Point], arguments: Sequence[str]) -> int:
    """One run a point, one after another, or all in Slurm's queue; every plan that this host can make is made first.

    Returns the first exit code that is not 0. An interrupt ends the sweep.
    """
    from telescope._launch.plan import PlanError, shared_gpus

    started = datetime.now().astimezone()
    try:
        planned = [(named(point.config), *_planned(point.config)) for point in points if point.config is not None]
    except PlanError as error:
        _say(f"{error}\nNothing was started.")
        return CONFIG_ERROR
    orders = []
    for index, ((config, standing, plan), point) in enumerate(zip(planned, points, strict=True)):
        folder = _sweep_folder(config, started, index) if len(points) > 1 else run_folder(config, started)
        if not standing.rank or config.run_dir is not None:
            config = config.model_copy(update={"run_dir": str(folder)})
        warnings = (*point.warnings, *filter(None, (shared_gpus(plan) if plan else "",)))
        orders.append(Order(config, plan, standing, warnings, tuple(arguments), started))
    if any(order.config.cluster.slurm is not None for order in orders):
        return _submit(orders)
    failed = OK
    for order in orders:
        code = _join(order) if order.standing.rank else _run_one(order)
        failed = failed or code
        if code in INTERRUPTED:
            break
    return failed


def _submit(orders: Sequence[Order]) -> int:
    """Write every run directory, then hand all to Slurm: one job, or one array for points that ask for the same."""
    from telescope._launch.slurm.submit import SubmitRefused, refuse

    groups: dict[SlurmSettings | None, list[Order]] = {}
    for order in orders:
        groups.setdefault(order.config.cluster.slurm, []).append(order)
    try:
        for settings, group in groups.items():
            if settings is None:
                raise SubmitRefused("Some points of the sweep go to Slurm and some do not: give all the same cluster.")
            refuse(settings, len(group), dry_run=group[0].config.cluster.dry_run)
    except SubmitRefused as error:
        _say(f"{error}\nNothing was submitted.")
        return CONFIG_ERROR
    codes = [_submit_group(settings, group, len(orders) > 1) for settings, group in groups.items() if settings is not None]
    return max(codes)


def _submit_group(settings: SlurmSettings, orders: Sequence[Order], sweep: bool) -> int:
    from telescope._launch.slurm.submit import SubmitRefused, submit

    directories = [directory for order in orders if (directory := _make_directory(order)) is not None]
    if len(directories) < len(orders):
        return CONFIG_ERROR
    first = directories[0].path
    folder, config = (first.parent if sweep else first) / "slurm", orders[0].config
    try:
        submitted = submit(directories, settings, name=config.name, folder=folder, dry_run=config.cluster.dry_run)
    except SubmitRefused as error:
        _say(str(error))
        return CONFIG_ERROR
    for one in submitted:
        what = f"job {one.job_id}" if one.job_id else f"not submitted, {one.script}"
        sys.stdout.write(f"{what}: run directory {one.directory.path}\n")
    return OK


def _planned(config: RunConfig) -> tuple[Standing, Plan | None]:
    """Where this host stands, and the plan of a run that is on it alone, or on the nodes that Slurm is asked for.

    Raises `PlanError`."""
    from telescope._launch.local import this_host
    from telescope._launch.plan import make_plan
    from telescope._launch.slurm.allocation import nominal
    from telescope._launch.slurm.place import hosts_of
    from telescope._launch.standing import Standing, standing

    if config.cluster.slurm is not None:
        return Standing(), make_plan(config, hosts_of(nominal(config.cluster.slurm)))
    found = standing(config.cluster, config.run_dir, os.environ)
    return found, make_plan(config, (this_host(),)) if found.nodes == 1 else None


def _join(order: Order) -> int:
    """Be one of the nodes that are not the head."""
    from telescope._launch.join import Invitation, join
    from telescope.config.run import config_hash

    config, cluster = order.config, order.config.cluster
    folder = None if config.run_dir is None else Path(config.run_dir)
    invitation = Invitation(order.standing, config_hash(config), folder, cluster.interface, cluster.placement_timeout_s)
    return join(invitation, _say)


def _new_key(path: Path) -> int:
    from telescope._launch.standing import write_key

    try:
        write_key(path)
    except OSError as error:
        _say(f"telescope.run: --new-key {path} can't be written: {error.strerror}")
        return CONFIG_ERROR
    _say(f"Made {path}. Copy it to every host of your runs, readable by you alone, and give cluster.key_file={path}.")
    return OK


def named(config: RunConfig) -> RunConfig:
    """With a name made of model and algorithm where none was given, e.g. `tiny-grpo`."""
    if config.name:
        return config
    model = re.sub(r"[^A-Za-z0-9._+-]", "-", Path(config.model.name).name)[:60]
    return config.model_copy(update={"name": f"{model}-{config.algorithm_name}"})


def run_folder(config: RunConfig, started: datetime) -> Path:
    """The folder asked for, or a new one under runs/ that no other run of this second has."""
    if config.run_dir is not None:
        return Path(config.run_dir).expanduser().absolute()
    stem = f"{started:%Y-%m-%d_%H-%M-%S}_{config.name}"
    names = (stem if count == 1 else f"{stem}_{count}" for count in range(1, 1000))
    return next(path for name in names if not (path := Path("runs", name).absolute()).exists())


def _sweep_folder(config: RunConfig, started: datetime, index: int) -> Path:
    """Below run_dir, which is the whole sweep's folder, or below a new one: `runs/<date>_<time>_sweep/003_tiny-grpo`."""
    base = Path(config.run_dir or f"runs/{started:%Y-%m-%d_%H-%M-%S}_sweep").expanduser().absolute()
    return base / f"{index:03d}_{config.name}"


def _run_one(order: Order) -> int:
    """Make the run directory, write what was resolved, and let this machine's supervisor start and watch the processes."""
    from telescope._launch.node import supervise

    directory = _make_directory(order)
    if directory is None:
        return CONFIG_ERROR
    if order.plan:
        return supervise(directory)
    from telescope._launch.lead import lead

    return lead(directory, order.config, order.standing, _say)


def _make_directory(order: Order) -> RunDirectory | None:
    """The run's directory with all that was resolved; None, and a sentence for the user, where it can't be made."""
    from telescope._launch.plan import write_plan
    from telescope.runlog.layout import RunDirectory, RunDirectoryInUse

    path = Path(str(order.config.run_dir))
    level = logging.DEBUG if order.config.debug else logging.INFO
    logging.basicConfig(stream=sys.stderr, level=level, format="%(message)s", force=True)
    try:
        directory = RunDirectory.create(path)
        write_down(directory, order)
        if order.plan:
            write_plan(order.plan, directory.plan_json)
    except RunDirectoryInUse as error:
        _say(str(error))
        return None
    except OSError as error:
        _say(f"run_dir={path} can't be written: {error.strerror} ({error.filename}); name another with run_dir=…")
        return None
    for warning in order.warnings:
        _log.warning("Warning: %s", warning)
    return directory


def write_down(directory: RunDirectory, order: Order) -> None:
    """Readable by its owner alone: config.json is what the processes read, config.yaml is for people."""
    from telescope.config.run import config_hash, dump_run
    from telescope.runlog.identity import new_identity, write_identity
    from telescope.runlog.layout import write_atomically

    config = order.config
    identity = new_identity(config.name, order.started, config_hash(config), order.warnings)
    command = shlex.join(["python", "-m", "telescope.run", *order.arguments])
    write_atomically(directory.config_json, dump_run(config), mode=0o600)
    write_atomically(directory.config_yaml, _yaml(config), mode=0o600)
    write_atomically(directory.cmdline, f"{command}\n", mode=0o600)
    write_identity(directory, identity)


def _yaml(config: RunConfig) -> str:
    import yaml

    from telescope.config.run import as_json, config_hash

    text: str = yaml.safe_dump(as_json(config), sort_keys=False, allow_unicode=True)
    return f"# hash {config_hash(config)}\n{text}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
