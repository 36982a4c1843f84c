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
    from telescope.compose.options import Places
    from telescope.config.run import RunConfig
    from telescope.runlog.layout import RunDirectory
    from telescope.sweep import Sweep

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
    parser.add_argument("--objective")
    parser.add_argument("--new-key", metavar="FILE")
    parser.add_argument("overrides", nargs="*")
    parsed = parser.parse_intermixed_args(list(arguments))
    if parsed.resolve and not parsed.cfg:
        parser.error("--resolve goes with --cfg job")
    if parsed.objective and not parsed.multirun:
        parser.error("--objective goes with -m: it names the number of summary.json that the sweep is about")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """One command line; the exit code is that of docs/configuration.md."""
    asked = _parse(arguments)
    if asked.new_key:
        return _new_key(Path(asked.new_key))
    from telescope.compose.load import UsageError, load_points, places_for
    from telescope.compose.sweeper import wants_sweeper

    try:
        places = places_for(asked.config_dir)
        if asked.help:
            from telescope.compose.help import help_text

            sys.stdout.write(help_text(places))
            return OK
        if asked.multirun and wants_sweeper(asked.overrides):
            return _search(asked, places, arguments)
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
    sweep = _sweep(asked) if len(points) > 1 else None
    code = _run_all(points, arguments, sweep)
    if sweep is not None and sweep.results:
        _say(sweep.table())
    return code


def _search(asked: argparse.Namespace, places: Places, arguments: Sequence[str]) -> int:
    """A sweep whose points one of Hydra's sweepers chooses, batch by batch. Raises `UsageError`."""
    from telescope.compose.load import UsageError
    from telescope.compose.sweeper import Refused, Stopped, search

    if asked.cfg:
        raise UsageError("--cfg shows points that are known; those of hydra/sweeper are chosen while the sweep goes on")
    sweep, code = _sweep(asked), OK

    def launch(points: Sequence[Point]) -> list[float | None]:
        nonlocal code
        done = len(sweep.results)
        code = _run_all(points, arguments, sweep) or code
        results = sweep.results[done:]
        if len(results) < len(points) or code in INTERRUPTED:
            raise Stopped
        return [None if result.failed else result.value for result in results]

    try:
        search(asked.overrides, places, os.environ, sweep.folder, launch)
    except Refused as refused:
        _say(_refusal(refused.points))
        return CONFIG_ERROR
    except Stopped:
        _say("The sweep ends here.")
    if sweep.results:
        _say(sweep.table())
    return code


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


def _run_all(points: Sequence[Point], arguments: Sequence[str], sweep: Sweep | None = None) -> int:
    """One run a point, one after another; every plan that this host can make is made before the first starts.

    Returns the first exit code that is not 0. An interrupt ends the sweep, which is told how each point ended.
    """
    from telescope._launch.plan import PlanError, shared_gpus
    from telescope.config.models import hub_problem
    from telescope.config.words import ConfigError

    started = datetime.now().astimezone()
    try:
        planned = [(named(point.config), *_planned(point.config)) for point in points if point.config is not None]
    except PlanError as error:
        _say(f"{error}\nNothing was started.")
        return CONFIG_ERROR
    missing = [problem for name in sorted({config.model.name for config, *_ in planned}) if (problem := hub_problem(name))]
    if missing:
        _say(f"{ConfigError(missing)}\nNothing was started.")
        return CONFIG_ERROR
    failed = OK
    for (config, standing, plan), point in zip(planned, points, strict=True):
        folder = run_folder(config, started) if sweep is None else sweep.folder / f"{len(sweep.results):03d}_{config.name}"
        if standing.rank:
            code = _join(config, standing, folder if config.run_dir is not None else None)
        else:
            config = config.model_copy(update={"run_dir": str(folder)} | _grouped(config, sweep))
            warnings = (*point.warnings, *filter(None, (shared_gpus(plan) if plan else "",)))
            code = _run_one(Order(config, plan, standing, warnings, tuple(arguments), started))
        failed = failed or code
        if sweep is not None:
            sweep.ended(point.overrides, folder, code)
        if code in INTERRUPTED:
            break
    return failed


def _grouped(config: RunConfig, sweep: Sweep | None) -> dict[str, object]:
    """The points of a sweep are one group in W&B, unless the user has named another."""
    if sweep is None or config.logging.wandb_group is not None:
        return {}
    return {"logging": config.logging.model_copy(update={"wandb_group": sweep.name})}


def _planned(config: RunConfig) -> tuple[Standing, Plan | None]:
    """Where this host stands, and the plan of a run that is on it alone. Raises `PlanError`."""
    from telescope._launch.local import this_host
    from telescope._launch.plan import make_plan
    from telescope._launch.standing import standing

    found = standing(config.cluster, config.run_dir, os.environ)
    return found, make_plan(config, (this_host(),)) if found.nodes == 1 else None


def _join(config: RunConfig, standing: Standing, folder: Path | None) -> int:
    """Be one of the nodes that are not the head."""
    from telescope._launch.join import Invitation, join
    from telescope.config.run import config_hash

    cluster = config.cluster
    invitation = Invitation(standing, config_hash(config), folder, cluster.interface, cluster.placement_timeout_s)
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


def _sweep(asked: argparse.Namespace) -> Sweep:
    """In the folder that `run_dir=` names, or in a new one: `runs/<date>_<time>_sweep`, with `003_tiny-grpo` below it."""
    from telescope.compose.load import parse
    from telescope.sweep import OBJECTIVE, Sweep

    given = [override.value() for override in parse(asked.overrides) if override.key_or_group == "run_dir"]
    base = str(given[-1]) if given and given[-1] else f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}_sweep"
    return Sweep(Path(base).expanduser().absolute(), asked.objective or OBJECTIVE)


def _run_one(order: Order) -> int:
    """Make the run directory, write what was resolved, and let this machine's supervisor start and watch the processes."""
    from telescope._launch.node import supervise
    from telescope._launch.plan import write_plan
    from telescope.runlog.holder import hold
    from telescope.runlog.layout import RunDirectory, RunDirectoryInUse

    path = Path(str(order.config.run_dir))
    level = logging.DEBUG if order.config.debug else logging.INFO
    logging.basicConfig(stream=sys.stderr, level=level, format="%(message)s", force=True)
    try:
        directory = RunDirectory.create(path)
        write_down(directory, order)
        if order.plan:
            write_plan(order.plan, directory.plan_json)
        hold(directory)
    except RunDirectoryInUse as error:
        _say(str(error))
        return CONFIG_ERROR
    except OSError as error:
        _say(f"run_dir={path} can't be written: {error.strerror} ({error.filename}); name another with run_dir=…")
        return CONFIG_ERROR
    for warning in order.warnings:
        _log.warning("Warning: %s", warning)
    if order.plan:
        return supervise(directory)
    from telescope._launch.lead import lead

    return lead(directory, order.config, order.standing, _say)


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
