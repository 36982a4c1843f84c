"""`python -m telescope.run`: the composition root. Composes, validates, plans, writes the run directory, and hands over.

Everything about a run is decided here once; the other processes read it from the run directory. Heavy imports wait until they
are needed, so that `--help` and a refusal answer at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from telescope.compose.load import Point
    from telescope.config.run import RunConfig
    from telescope.runlog.layout import RunDirectory

OK, CONFIG_ERROR, USAGE, INTERRUPTED = 0, 1, 2, 130
_log = logging.getLogger("telescope.run")


class _Parser(argparse.ArgumentParser):
    """argparse whose complaint is one sentence on stderr."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"telescope.run: {message}; --help says what there is\n")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="telescope.run", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-cd", "--config-dir")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("overrides", nargs="*")
    parsed = parser.parse_intermixed_args(list(arguments))
    if parsed.resolve and not parsed.cfg:
        parser.error("--resolve goes with --cfg job")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """One command line; the exit code is that of docs/configuration.md."""
    asked = _parse(arguments)
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
    """One run a point, one after another. The first exit code that is not 0; an interrupt ends the sweep."""
    started = datetime.now().astimezone()
    failed = OK
    for index, point in enumerate(points):
        assert point.config is not None
        config = named(point.config)
        folder = _sweep_folder(config, started, index) if len(points) > 1 else _run_folder(config, started)
        code = _run_one(config.model_copy(update={"run_dir": str(folder)}), point.warnings, arguments, started)
        failed = failed or code
        if code in (INTERRUPTED, 128 + 15):
            break
    return failed


def named(config: RunConfig) -> RunConfig:
    """With a name made of model and algorithm where none was given, e.g. `tiny-grpo`."""
    if config.name:
        return config
    model = re.sub(r"[^A-Za-z0-9._+-]", "-", Path(config.model.name).name)[:60]
    return config.model_copy(update={"name": f"{model}-{config.algorithm_name}"})


def _run_folder(config: RunConfig, started: datetime) -> Path:
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


def _run_one(config: RunConfig, warnings: Sequence[str], arguments: Sequence[str], started: datetime) -> int:
    from telescope.runlog.layout import RunDirectory, RunDirectoryInUse

    assert config.run_dir is not None
    logging.basicConfig(stream=sys.stderr, level=logging.DEBUG if config.debug else logging.INFO, format="%(message)s")
    try:
        directory = RunDirectory.create(Path(config.run_dir))
    except (RunDirectoryInUse, OSError) as error:
        _say(
            str(error) if isinstance(error, RunDirectoryInUse) else f"run_dir={config.run_dir} can't be made: {error.strerror}"
        )
        return CONFIG_ERROR
    for warning in warnings:
        _log.warning("Warning: %s", warning)
    _write(directory, config, warnings, arguments, started)
    return _hand_over(directory, config)


def _hand_over(directory: RunDirectory, config: RunConfig) -> int:
    """Plan for this machine, then let its supervisor start and watch the processes."""
    from telescope._launch import node, plan

    raise NotImplementedError


def _write(
    directory: RunDirectory, config: RunConfig, warnings: Sequence[str], arguments: Sequence[str], started: datetime
) -> None:
    """What was resolved, readable by its owner alone: config.json is what the processes read, config.yaml is for people."""
    import json
    import uuid

    from telescope.config.run import FORMAT, config_hash, dump_run
    from telescope.runlog.layout import write_atomically

    about = {
        "format": FORMAT,
        "run_id": uuid.uuid4().hex[:16],
        "name": config.name,
        "created": started.astimezone(UTC).isoformat(timespec="seconds"),
        "config_hash": config_hash(config),
        "warnings": list(warnings),
    }
    write_atomically(directory.config_json, dump_run(config), mode=0o600)
    write_atomically(directory.config_yaml, _yaml(config), mode=0o600)
    write_atomically(directory.cmdline, shlex.join(["python", "-m", "telescope.run", *arguments]) + "\n", mode=0o600)
    write_atomically(directory.run_json, json.dumps(about, indent=2) + "\n", mode=0o600)


def _yaml(config: RunConfig | None) -> str:
    import yaml

    from telescope.config.run import as_json, config_hash

    assert config is not None
    text: str = yaml.safe_dump(as_json(config), sort_keys=False, allow_unicode=True)
    return f"# hash {config_hash(config)}\n{text}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
