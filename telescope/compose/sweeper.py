"""Hydra's sweepers over our own launcher: `-m hydra/sweeper=optuna 'trainer.learning_rate=interval(1e-5,1e-3)'`.

A sweeper decides which points to try, from the results of those before. Each batch of points it asks for is judged as a whole
before one of it starts, and started by whoever handed in `launch`. Without `hydra/sweeper` nothing of this is needed: the
points of a command line are known at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from telescope.compose.load import (
    Point,
    UsageError,
    compose_point,
    composing,
    force_sweep,
    parse,
    pick_swept,
    refuse_hydra_settings,
)
from telescope.compose.options import Places
from telescope.compose.presets import search_path

SWEEPER = "hydra/sweeper"
_PACKAGE, _MODULE = "hydra_plugins", "hydra_plugins.telescope"
"""Hydra takes plug-ins only from modules below this package's name. Ours is one while a sweep goes on, and no file there: other
programs that use Hydra in the same environment would load it too."""

Batch = Callable[[Sequence[Point]], Sequence[float | None]]
"""Run these points, all of which are valid; gives each one's objective, None where it came to none. Raises `SweepStopped`."""


class InvalidPoints(ValueError):
    """Points of a batch are invalid; none of it was started."""

    def __init__(self, points: Sequence[Point]) -> None:
        super().__init__("invalid points")
        self.points = points


class SweepStopped(RuntimeError):
    """The sweep ends here, e.g. after a Ctrl-C."""


class PointFailed(RuntimeError):
    """A point of the sweep came to no result; what a sweeper is told of it."""


def has_sweeper(overrides: Sequence[str]) -> bool:
    return any(override.startswith((f"{SWEEPER}=", f"+{SWEEPER}=")) for override in overrides)


def search(overrides: Sequence[str], places: Places, environ: Mapping[str, str], folder: Path, launch: Batch) -> None:
    """Let the sweeper of the command line choose points until it has enough. `folder` is for what it writes itself.

    Raises `UsageError` for what Hydra refuses, `InvalidPoints` for invalid points, and what `launch` raises.
    """
    task, sweepers = _divide(parse(overrides))
    with composing(places):

        def judge_and_launch(batch: Sequence[Sequence[str]]) -> Sequence[float | None]:
            found = [compose_point(_unforce(overrides), places, environ) for overrides in batch]
            points = [replace(point, swept=pick_swept(point.overrides, task)) for point in found]
            if any(point.problems for point in points):
                raise InvalidPoints(points)
            return launch(points)

        given = [search_path(places), *force_sweep(task, places), *sweepers, "hydra/launcher=telescope", *_quiet(folder)]
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None  # `composing` has made it
        try:
            with _launcher(judge_and_launch):
                hydra.multirun("run", _never_called, given, with_log_configuration=False)
        except HydraException as error:
            raise UsageError(f"hydra/sweeper: {str(error).strip().partition(chr(10))[0]}") from error


def _divide(parsed: Sequence[Override]) -> tuple[list[Override], list[str]]:
    """The run's own overrides, and those that are about the sweeper. Raises `UsageError` for any other of Hydra's."""
    about_sweeper = [one for one in parsed if one.key_or_group == SWEEPER or one.key_or_group.startswith("hydra.sweeper.")]
    task = [override for override in parsed if override not in about_sweeper]
    refuse_hydra_settings(task)
    return task, [str(override.input_line) for override in about_sweeper]


def _unforce(overrides: Sequence[str]) -> list[str]:
    """Without the `++` that Hydra needed."""
    return [override.removeprefix("++") for override in overrides]


def _quiet(folder: Path) -> list[str]:
    escaped = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.sweep.dir='{escaped}'", "hydra.sweep.subdir=hydra", "hydra.output_subdir=null", "hydra.job.chdir=false"]


def _never_called(_: DictConfig) -> Any:
    raise AssertionError("our launcher runs no Hydra jobs")


@contextmanager
def _launcher(launch: Callable[[Sequence[Sequence[str]]], Sequence[float | None]]) -> Iterator[None]:
    """Within, Hydra's `hydra/launcher=telescope` is a launcher that calls `launch`."""

    class TelescopeLauncher(Launcher):
        def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
            self.config = config

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
            values = launch([tuple(overrides) for overrides in job_overrides])
            return [_make_return(overrides, value) for overrides, value in zip(job_overrides, values, strict=True)]

    name = TelescopeLauncher.__name__
    TelescopeLauncher.__module__, TelescopeLauncher.__qualname__ = _MODULE, name
    module = ModuleType(_MODULE)
    setattr(module, name, TelescopeLauncher)
    added = {_MODULE: module} | ({} if find_spec(_PACKAGE) else {_PACKAGE: ModuleType(_PACKAGE)})
    sys.modules.update(added)
    Plugins.instance().register(TelescopeLauncher)
    target = {"_target_": f"{_MODULE}.{name}"}
    store = ConfigStore.instance()
    store.store(group="hydra/launcher", name="telescope", node=target, provider="telescope")
    try:
        yield
    finally:
        del store.repo["hydra"]["launcher"]["telescope.yaml"]
        for found in added:
            del sys.modules[found]


def _make_return(overrides: Sequence[str], value: float | None) -> JobReturn:
    answer = JobReturn(overrides=list(overrides))
    answer.status = JobStatus.FAILED if value is None else JobStatus.COMPLETED
    answer.return_value = PointFailed(f"{' '.join(overrides)} came to no result") if value is None else value
    return answer
