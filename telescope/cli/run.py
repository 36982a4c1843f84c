"""`telescope run`: the composition root. Composes, validates and plans each point, and has it started (start.py).

Everything about a run is decided here once; the other processes read it from the run directory. Heavy imports wait until they
are needed, so that `--help` and a refusal answer at once.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from telescope._launch.unblocked_output import unblock_output
from telescope.cli.command_line import parse_all
from telescope.cli.start import (
    CONFIG_ERROR,
    OK,
    RunOrder,
    find_absent,
    find_obstacles,
    join_run,
    make_plan_here,
    new_key,
    run_folder,
    run_one,
    say,
    settle,
    with_name,
)
from telescope.cli.submitting import submit_all
from telescope.config.redacted_output import redact_output
from telescope.config.secrets import find_references
from telescope.exit_codes import BY_SIGNAL, STOPS
from telescope.runlog.layout import RunDirectory
from telescope.runlog.opening import look

if TYPE_CHECKING:
    from telescope._launch.progress import Console
    from telescope.cli.sweep import Sweep
    from telescope.compose.load import Point
    from telescope.compose.options import Places
    from telescope.config.run import RunConfig

USAGE = 2


class _OneLineParser(argparse.ArgumentParser):
    """argparse whose complaint is one sentence on stderr."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"telescope.run: {message}; --help says what there is, --hydra-help what of Hydra\n")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _OneLineParser(prog="telescope.run", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job", "hydra", "all"])
    parser.add_argument("-p", "--package")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-i", "--info", nargs="?", const="all", metavar="TOPIC")
    parser.add_argument("-cd", "--config-dir")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--objective")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--new-key", metavar="FILE")
    parser.add_argument("overrides", nargs="*")
    parsed = parse_all(parser, arguments)
    if parsed.resolve and parsed.cfg != "job":
        parser.error("--resolve goes with --cfg job")
    if parsed.cfg and parsed.info:
        parser.error("--info and --cfg print different things: give one of them")
    if parsed.package is not None and not parsed.cfg:
        parser.error("--package goes with --cfg: it names the part that is printed, e.g. trainer")
    if parsed.verbose:
        parsed.overrides.append("logging.verbose=true")
    if parsed.objective and not parsed.multirun:
        parser.error("--objective goes with -m: it names the number of summary.json that the sweep is about")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """One command line; the exit code is that of docs/configuration.md."""
    with redact_output(find_references(list(arguments))):
        return _act(arguments)


def _act(arguments: Sequence[str]) -> int:
    asked = _parse(arguments)
    if asked.new_key:
        return new_key(Path(asked.new_key))
    from telescope.compose.load import UsageError, load_points, places_for
    from telescope.compose.sweeper import has_sweeper

    try:
        places = places_for(asked.config_dir)
        if asked.help or asked.hydra_help or asked.version:
            sys.stdout.write(_about(asked, places))
            return OK
        if asked.multirun and has_sweeper(asked.overrides):
            return _search(asked, places, arguments)
        points = load_points(asked.overrides, places, os.environ, sweep=asked.multirun)
        if any(point.problems for point in points):
            say(_refusal(points))
            return CONFIG_ERROR
        if asked.cfg or asked.info:
            _show(asked, points, places)
            return OK
        sweep = _sweep(asked) if len(points) > 1 else None
    except UsageError as error:
        say(f"telescope.run: {error}")
        return USAGE
    code = _run_all(points, arguments, sweep)
    if sweep is not None and sweep.results:
        say(sweep.table())
    return code


@unblock_output()
def _search(asked: argparse.Namespace, places: Places, arguments: Sequence[str]) -> int:
    """A sweep whose points one of Hydra's sweepers chooses, batch by batch. Raises `UsageError`."""
    from telescope.compose.load import UsageError
    from telescope.compose.sweeper import InvalidPoints, PointFailed, SweepStopped, search

    if asked.cfg or asked.info:
        option = "--cfg" if asked.cfg else "--info"
        raise UsageError(f"{option} shows points that are known; those of hydra/sweeper are chosen while the sweep goes on")
    sweep, code = _sweep(asked), OK

    def launch(points: Sequence[Point]) -> list[float | None]:
        nonlocal code
        if any(point.config is not None and point.config.cluster.slurm is not None for point in points):
            raise UsageError(
                "hydra/sweeper chooses points from results, and Slurm's come when the job ends: leave one of them out"
            )
        done = len(sweep.results)
        code = _run_all(points, arguments, sweep) or code
        results = sweep.results[done:]
        if len(results) < len(points) or code in STOPS:
            raise SweepStopped
        return [None if result.failed else result.value for result in results]

    try:
        search(asked.overrides, places, os.environ, sweep.folder, launch)
    except InvalidPoints as refused:
        say(_refusal(refused.points))
        return CONFIG_ERROR
    except PointFailed as error:
        say(f"{error}; this sweeper ends with it.")
    except SweepStopped:
        say("The sweep ends here.")
    if sweep.results:
        say(sweep.table())
    return code


def _show(asked: argparse.Namespace, points: Sequence[Point], places: Places) -> None:
    """Raises `UsageError` where what is asked for is not there."""
    from telescope.compose.load import UsageError
    from telescope.compose.show import TOPICS, show_configurations, show_info

    if asked.cfg:
        show_configurations(points, places, asked.cfg, asked.package, asked.resolve)
    elif asked.info not in TOPICS:
        raise UsageError(f"--info={asked.info}: give it last, or with one of {', '.join(TOPICS)}")
    elif len(points) > 1:
        raise UsageError(f"--info tells of one configuration, and these are {len(points)}: leave out -m")
    else:
        show_info(points[0], places, asked.info)


def _about(asked: argparse.Namespace, places: Places) -> str:
    """The text of `--help`, `--hydra-help` or `--version`."""
    from importlib.metadata import version

    from telescope.cli.version import describe_version
    from telescope.compose.run_help import help_text, hydra_help_text

    if asked.help:
        return help_text(places)
    if asked.hydra_help:
        return hydra_help_text(places, version("hydra-core"))
    return describe_version()


def _refusal(points: Sequence[Point]) -> str:
    from telescope.config.words import ConfigError

    if len(points) == 1:
        return f"{ConfigError(points[0].problems)}\nNothing was started."
    wrong = [point for point in points if point.problems]
    reasons = [f"{' '.join(point.overrides)}\n{ConfigError(point.problems)}" for point in wrong]
    return "\n".join([f"{len(wrong)} of {len(points)} points are invalid; nothing was started.", *reasons])


@unblock_output()
def _run_all(points: Sequence[Point], arguments: Sequence[str], sweep: Sweep | None = None) -> int:
    """The one run, or those of a sweep one after another or all in Slurm's queue; every plan that this host can make is made
    first. Returns the run's exit code, or a sweep's."""
    try:
        orders = _orders(points, arguments, sweep)
    except _NotStarted as refusal:
        say(f"{refusal}\nNothing was started.")
        return CONFIG_ERROR
    if any(order.config.cluster.slurm is not None for order in orders):
        return submit_all(orders, sweep, points)
    if sweep is not None:
        return _sweep_all(orders, points, sweep)
    (order,) = orders
    return join_run(order) if order.standing.rank else run_one(order)


def _sweep_all(orders: Sequence[RunOrder], points: Sequence[Point], sweep: Sweep) -> int:
    """The points of a sweep on this host, a line on the terminal each; the sweep is told how each ended. Returns the first exit
    code that is not 0. A signal ends the sweep: then that of the run which got it, or the signal's where that run was done."""
    from telescope._launch.progress import Console
    from telescope.cli.sweep import list_swept

    console, failed, before = Console(sys.stderr, sys.stdout), OK, len(sweep.results)
    for warning in dict.fromkeys(warning for order in orders for warning in order.warnings):
        console.say(f"Warning: {warning}")
    for order, point in zip(orders, points, strict=True):
        kept_by_sweep, begun = _leaves_saves_to_sweep(order.config), time.monotonic()
        done = len(sweep.results)
        number = f"point {done} ({done - before + 1} of {len(orders)})" if len(orders) > 1 else f"point {done}"
        with _quiet(order, console, f"{number}  {list_swept(point.swept)}"):
            code = run_one(order, kept_by_sweep=kept_by_sweep)
        failed = failed or code
        result = sweep.ended(point.overrides, Path(str(order.config.run_dir)), code, point.swept)
        console.say(f"{number}  {sweep.describe(result, time.monotonic() - begun)}")
        if kept_by_sweep:
            sweep.keep_best(result)
        if code in BY_SIGNAL:
            return code
        if (number := look(RunDirectory(Path(str(order.config.run_dir)))).exit.interrupted) is not None:
            return code or 128 + number  # it came while the run was ending by itself
    return failed


def _quiet(order: RunOrder, console: Console, point: str) -> AbstractContextManager[None]:
    """What a point prints goes to `FOLDER.log` beside its run directory, unless its logs or its whole summary are asked for.
    The terminal hears all the same that it was told to stop."""
    from telescope._launch.supervisor import STOPPING
    from telescope.cli.point_output import find_log, keep_output

    logging, live = order.config.logging, console.tty and order.config.logging.progress
    if logging.verbose or logging.log_to_console:
        return nullcontext()

    def show(line: str) -> None:
        if line.startswith(STOPPING):
            console.say(line)
        elif live:
            console.live(f"{point} · {line}")

    return keep_output(find_log(Path(str(order.config.run_dir))), show, console.say)


class _NotStarted(Exception):
    """No run of the command line is started; the text says why."""


def _orders(points: Sequence[Point], arguments: Sequence[str], sweep: Sweep | None) -> list[RunOrder]:
    """What is to be started, point by point, each with a run directory of its own. Raises `_NotStarted`."""
    from telescope._launch.process_plan import PlanError, describe_shared_gpus
    from telescope._launch.this_host import find_smallest_card
    from telescope.cli.sweep import name_point
    from telescope.config.models import hub_problem

    started, find_card = datetime.now().astimezone(), functools.cache(find_smallest_card)
    try:
        given = [(with_name(point.config), *make_plan_here(point.config)) for point in points if point.config is not None]
        settled = [settle(config, plan, standing, find_card) for config, standing, plan in given]
    except PlanError as error:
        raise _NotStarted(str(error)) from error
    plans = [(found.config, standing, plan) for found, (_, standing, plan) in zip(settled, given, strict=True)]
    if sweep is not None and (nodes := max(standing.nodes for _, standing, _ in plans)) > 1:
        raise _NotStarted(
            f"A sweep (-m) over {nodes} hosts is not possible: they would have to agree when each point begins and ends. Give "
            "the command once a point on every host, or cluster=slurm, which makes an array of them."
        )
    hub, known = functools.cache(hub_problem), dict[str, list[str]]()
    judged = (
        sentence
        for config, _, plan in plans
        for sentence in (*find_absent(config, plan, known), *find_obstacles(config, plan, hub))
    )
    found = dict.fromkeys(judged)
    if found:
        raise _NotStarted("\n".join(found))
    orders: list[RunOrder] = []
    for (config, standing, plan), point in zip(plans, points, strict=True):
        number = len(orders) + (len(sweep.results) if sweep else 0)
        name = name_point(number, point.swept, str(config.name))
        folder = run_folder(config, started) if sweep is None else sweep.folder / name
        if not standing.rank or config.run_dir is not None:  # else the head's directory gives the node's its name
            config = config.model_copy(update={"run_dir": str(folder)} | _as_point(config, sweep))
        (as_given, _, _), decision = given[len(orders)], settled[len(orders)]
        warnings = (*point.warnings, *filter(None, (describe_shared_gpus(plan) if plan else "", decision.misfit)))
        orders.append(
            RunOrder(config, plan, standing, warnings, tuple(arguments), started, given=as_given, chosen=decision.sentence)
        )  # fmt: skip
    return orders


def _as_point(config: RunConfig, sweep: Sweep | None) -> dict[str, object]:
    """What a sweep changes in its points, unless the user has said otherwise: they are one group in W&B, and save nothing where
    nobody would delete all weights but the best."""
    changed: dict[str, object] = {}
    if sweep is None:
        return changed
    if config.logging.wandb_group is None:
        changed["logging"] = config.logging.model_copy(update={"wandb_group": sweep.name})
    if _leaves_saves_to_sweep(config) and (config.cluster.slurm is not None or not sweep.knows_best):
        changed["checkpoint"] = config.checkpoint.model_copy(update={"at_end": "none"})
    return changed


def _leaves_saves_to_sweep(config: RunConfig) -> bool:
    """Whether the point of a sweep is saved at its end though the user has said nothing of checkpoints."""
    checkpoint = config.checkpoint
    return checkpoint.at_end == "auto" and not checkpoint.every and checkpoint.dir is None and config.end_saves.any


def _sweep(asked: argparse.Namespace) -> Sweep:
    """In the folder that `run_dir=` names, or in a new one: `runs/<date>_<time>_sweep`, with `003_seed-2` below it."""
    from telescope.cli.sweep import OBJECTIVE, RESULTS, Sweep
    from telescope.compose.load import UsageError, parse

    started = datetime.now()
    given = [override.value() for override in parse(asked.overrides) if override.key_or_group == "run_dir"]
    stem = f"runs/{started:%Y-%m-%d_%H-%M-%S}_sweep"
    names = [str(given[-1])] if given and given[-1] else [stem, *(f"{stem}_{count}" for count in range(2, 1000))]
    paths = [Path(name).expanduser().absolute() for name in names]
    folder = next((path for path in paths if not (path / RESULTS).exists()), None)
    if folder is None:
        raise UsageError(f"run_dir={names[0]} holds the results of a sweep already: name another")
    return Sweep(folder, asked.objective or OBJECTIVE)
