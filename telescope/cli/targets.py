"""What commands that train nothing are given, and make of it: the settings of servers without trainers, a checkpoint's weights
as a folder, the key of a URL.

`telescope eval`, `serve` and `chat` share it. A target is a run directory (a step of it), a model (a Hugging Face folder or
name, an embedded one), or the URL of an OpenAI-compatible server. Refuses to start anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from telescope.cli.resume import WrongOverride, put_setting, read_changes
from telescope.config.evals import EvalEntry
from telescope.config.run import RunConfig, as_json
from telescope.config.secrets import parse_reference
from telescope.config.sections import RemoteServer, is_loopback
from telescope.config.validate import validate
from telescope.config.words import ConfigError
from telescope.runlog import checkpoints, opening
from telescope.runlog.files import DamagedFile
from telescope.runlog.layout import RunDirectory

if TYPE_CHECKING:
    from telescope.compose.options import Places

URLS = ("http://", "https://")
EVALS = re.compile(r"\+{0,2}evals\.([A-Za-z0-9_-]+)(\.(\w+(?:\.\w+)*))?=.*", re.DOTALL)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
KEY = "OPENAI_API_KEY"
"""Holds the key where --key-env does not say."""
Tell = Callable[[str], None]


class TargetRefused(ValueError):
    """The text says why it can't be played or served, and what to do."""


def is_override(given: str) -> bool:
    """Whether an argument is a setting, and not a target: a folder may be called lr=0.1."""
    if given.startswith(URLS) or os.path.exists(given):
        return False
    return "=" in given or given.startswith("~")


def refuse_decided(overrides: Sequence[str], decided: Mapping[str, str]) -> None:
    """`decided`: settings that the command decides itself, and why. Raises `WrongOverride`."""
    for override in overrides:
        place = override.lstrip("+~").partition("=")[0]
        if place in decided:
            raise WrongOverride(f"{override}: {decided[place]}; leave it out")


# ---- a run


def read_trained(run: RunDirectory, target: str) -> RunConfig:
    """The settings of a run that has trained. Raises `TargetRefused`."""
    try:
        trained = opening.read(run)
    except (opening.NotARun, DamagedFile) as error:
        raise TargetRefused(str(error)) from error
    if not trained.trains:
        raise TargetRefused(
            f"{target} was made by telescope eval, and has no checkpoints: name the run, the model or the URL itself"
        )
    return trained


def make_settings(trained: RunConfig, step: int) -> dict[str, Any]:
    """Those of the run, for one without trainers."""
    settings = as_json(trained)
    cluster = {**settings["cluster"], "trainer_num_workers": 0, "slurm": None}
    sync = {**settings["weight_sync"], "transport": "auto", "transport_kwargs": {}}
    logging = {**settings["logging"], "use_wandb": False}  # its numbers go to the run's own
    inference = {**settings["inference"], "http": False, "sleep_while_training": "off"}
    entries = {one.name: settings["evals"].get(one.name, {"environment": one.label}) for one in trained.active_evals}
    settings |= {
        "name": f"{trained.name}-eval"[:100],
        "number_of_steps": step,
        "model": {**settings["model"], "lora": None},  # adapters are merged when they are exported, or served by themselves
        "cluster": cluster,
        "weight_sync": sync,
        "logging": logging,
        "inference": inference,
        "checkpoint": {},
        "trainer": {**settings["trainer"], "router_replay": False},
        "evals": entries or {label: {} for label in trained.environments},
    }
    settings["eval"] = {**settings["eval"], "every": None, "num_servers": "auto", "stop_after": None}
    return settings


def change(settings: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`evals.<name>=…` names the evals that are played, and no others are; what else is given changes a setting. Raises
    `WrongOverride`."""
    named, before = dict[str, Any](), settings["evals"]
    for override in overrides:
        found = EVALS.fullmatch(override)
        place, value = read_changes([override.lstrip("+")])[0]
        if found is None:
            if place == "evals":
                raise WrongOverride(f"{override}: name an eval, e.g. evals.math500={{}}")
            put_setting(settings, place, value)
            continue
        name, inner = found[1], found[3]
        entry = named.setdefault(name, dict(before.get(name, {})))
        if inner is None:
            if not isinstance(value, dict):
                raise WrongOverride(
                    f"{override}: an eval has settings, e.g. evals.{name}={{num_samples:4}}, or evals.{name}={{}}"
                )
            entry |= value
        elif inner.startswith("kwargs."):
            entry["kwargs"] = {**entry.get("kwargs", {}), inner.removeprefix("kwargs."): value}
        elif inner in EvalEntry.model_fields:
            entry[inner] = value
        else:
            raise WrongOverride(f"{override}: an eval has no setting {inner}; docs/evals.md has all")
    if named:
        settings["evals"] = named
    return settings


def judge(settings: Mapping[str, Any]) -> RunConfig:
    """Raises `TargetRefused` with all that is wrong."""
    config, problems = validate(settings)
    if config is None:
        raise TargetRefused(str(ConfigError(problems)))
    return config


def export_weights(run: RunDirectory, step: int, to: Path, say: Tell, *, merge: bool) -> None:
    """The checkpoint of a step as a new folder: a model, or of a run with adapters these alone unless `merge`. Raises
    `TargetRefused`."""
    from telescope.backends.base import CheckpointUnfit
    from telescope.cli.export import ExportRefused, Wanted, export_all
    from telescope.config.models import ModelNotFound

    try:
        for line in export_all(run, step, to, Wanted(merge=merge and opening.read(run).model.lora is not None)):
            say(line)
    except (ExportRefused, CheckpointUnfit, checkpoints.CheckpointUnreadable, ModelNotFound, ValueError) as error:
        raise TargetRefused(str(error)) from error
    except OSError as error:
        raise TargetRefused(f"{error.filename or to}: {error.strerror or error}") from error


# ---- a model


def name_model(target: str, places: Places) -> list[str]:
    """The overrides that choose it: a preset with its settings, else `model=any` by its name. Raises `TargetRefused`."""
    if target.count("/") > 1 and not Path(target).exists():
        raise TargetRefused(f"{target} is not there: name a run directory, a model or a URL")
    if target in places.options("model"):
        return [f"model={target}"]
    name = str(Path(target).absolute()) if Path(target).is_dir() else target
    return ["model=any", f'model.name="{name}"']


def compose_untrained(overrides: Sequence[str], config_dir: str | None) -> RunConfig:
    """A configuration of evals alone, which are among the overrides. Raises `TargetRefused` and `UsageError`."""
    from telescope.compose.load import load_points, places_for

    named = [f"+{one.lstrip('+')}" if EVALS.fullmatch(one) else one for one in overrides]
    fixed = ["number_of_steps=0", "cluster.trainer_num_workers=0", "checkpoint.every=0", "inference.http=false"]
    (point,) = load_points([*fixed, *named], places_for(config_dir), os.environ)
    if point.config is None:
        raise TargetRefused(str(ConfigError(point.problems)))
    return point.config


# ---- a URL


def describe_key(remote: RemoteServer, environ: Mapping[str, str]) -> str:
    """Which key goes where, for the one who gave the command; empty where none is set."""
    name, plain = parse_reference(remote.api_key), _is_plain(remote.url)
    if name is not None:
        exposed = " in plain text: who sees the network can read it" if plain else ""
        return f"The key in {name} is sent to {urlsplit(remote.url).netloc}{exposed}."
    if environ.get(KEY) and plain:
        return f"{KEY} is not sent in plain text to another machine: --key-env {KEY} sends it all the same."
    return ""


def choose_key(target: str, key_env: str | None) -> str | None:
    """The variable that holds the key to send. Raises `WrongOverride` for one that is named and not set."""
    if key_env is None:
        return KEY if os.environ.get(KEY) and not _is_plain(target) else None
    return check_key_variable(key_env)


def check_key_variable(key_env: str) -> str:
    """The name itself. Raises `WrongOverride` where it is not that of a variable which is set."""
    if not VARIABLE.fullmatch(key_env):
        raise WrongOverride("--key-env takes the name of an environment variable, and not the key itself")
    if not os.environ.get(key_env):
        raise WrongOverride(f"--key-env {key_env}: that variable is not set; export it, or leave --key-env out")
    return key_env


def _is_plain(url: str) -> bool:
    """Whether what is sent there can be read on the way."""
    address = urlsplit(url)
    return address.scheme == "http" and not is_loopback(address.hostname or "")
