"""`telescope runs resume RUN_DIR [overrides]`: another attempt of a run, with the settings that its directory holds. Of several
hosts each gives the command; the head's alone makes the attempt.

Composes nothing: what was resolved once is read back, changed where asked, judged again, and started as any run is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from telescope.cli.start import CONFIG_ERROR, RunOrder, find_obstacles, join_run, make_plan_here, run_one, say
from telescope.cli.submitting import submit_all
from telescope.config.words import nearest
from telescope.runlog import opening
from telescope.runlog.files import DamagedFile
from telescope.runlog.layout import RunDirectory

GROUPS = ("env", "experiment")
"""Groups that no key of the resolved configuration is named like."""
FIXED = ("algorithm", "env", "model")
"""Groups of which no run goes on with another choice, whatever its command line (`config.resume`)."""


class WrongOverride(ValueError):
    """It can't be read, or names no setting."""


def go_on(path: Path, overrides: Sequence[str]) -> int:
    """The run's exit code; 1 where it can't go on. Raises `WrongOverride`."""
    from telescope._launch.automatic_settings import settle
    from telescope._launch.process_plan import PlanError, describe_shared_gpus
    from telescope.config.automatic import CHECKPOINTING, LAYERS, Decision
    from telescope.config.conflicts import warnings
    from telescope.config.models import hub_problem
    from telescope.config.run import as_json, refuse_other_meaning
    from telescope.config.validate import validate
    from telescope.config.words import ConfigError

    run = RunDirectory(path.absolute())
    changes = read_changes(overrides)
    try:
        written = opening.go_on(run).settings
        settings = {**written, "checkpoint": {**written.get("checkpoint", {}), "resume": True}, "run_dir": str(run.path)}
        as_begun, _ = validate(settings)
        if as_begun is not None:  # with the defaults of settings that are younger than the run, which may be set too
            refuse_other_meaning(run.config_json, {**written, "checkpoint": {}, "run_dir": str(run.path)}, as_begun)
            settings = as_json(as_begun)
    except (opening.NotARun, DamagedFile) as error:
        say(f"{error}\nNothing was started.")
        return CONFIG_ERROR
    for place, value in changes:
        if place == "run_dir":
            raise WrongOverride(f"run_dir={value} can't be given: a run goes on in its own directory, {run.path}")
        put_setting(settings, place, value)
    named = [place for place, _ in changes]
    if CHECKPOINTING in named and LAYERS not in named and "checkpointed_layers" in settings.get("backend", {}):
        put_setting(settings, LAYERS, None)  # of another way of checkpointing they say nothing
    config, problems = validate(settings)
    if config is None:
        say(f"{ConfigError(problems)}\nNothing was started.")
        return CONFIG_ERROR
    try:
        standing, plan = make_plan_here(config)
    except PlanError as error:
        say(f"{error}\nNothing was started.")
        return CONFIG_ERROR
    given = config
    settled = Decision(config) if standing.rank else settle(config, plan, {}, nodes=standing.nodes)  # what the user makes auto
    config = settled.config
    if found := find_obstacles(config, plan, hub_problem):
        say("\n".join([*found, "Nothing was started."]))
        return CONFIG_ERROR
    arguments = (f"run_dir={run.path}", "checkpoint.resume=true", *overrides)
    said = (*warnings(config), *filter(None, (describe_shared_gpus(plan) if plan else "", settled.misfit)))
    now = datetime.now().astimezone()
    order = RunOrder(config, plan, standing, said, arguments, now, given=given, chosen=settled.sentence)
    if config.cluster.slurm is not None:
        return submit_all([order])
    return join_run(order) if standing.rank else run_one(order)


def read_changes(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """(place, value) of each. Raises `WrongOverride` for one that can't be read."""
    from telescope.compose.load import UsageError, parse

    try:
        return [(override.key_or_group, override.value()) for override in parse(overrides)]
    except UsageError as error:
        raise WrongOverride(str(error)) from error


def put_setting(settings: dict[str, Any], place: str, value: Any) -> None:
    """Change one setting of a resolved configuration. Raises `WrongOverride` where it has no such single setting."""
    *path, last = place.split(".")
    here: Any = settings
    for name in path:
        here = here.get(name) if isinstance(here, dict) else None
    if place in GROUPS or (isinstance(here, dict) and isinstance(here.get(last), dict)):
        raise WrongOverride(
            f"{place}={value} is not a single setting: name one, e.g. trainer.learning_rate=1e-5. "
            f"{_describe_other_choice(place)}"
        )
    if not isinstance(here, dict) or last not in here:
        guess = nearest(place, tuple(_places(settings)))
        raise WrongOverride(
            f"{place} is not a setting of this run.{f' Did you mean {guess}?' if guess else ''} docs/configuration.md has all"
        )
    here[last] = value


def _describe_other_choice(group: str) -> str:
    if group in FIXED:
        return (
            f"Another {group} would be another run, which can begin from this one's weights: `telescope export latest "
            "--run-dir RUN_DIR --to FOLDER`, then `telescope run … model.name=FOLDER` (docs/resuming.md)"
        )
    return "Another choice of a group needs the whole command line: `telescope run … run_dir=RUN_DIR checkpoint.resume=true`"


def _places(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _places(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
