"""What Hydra may choose from: class defaults of every plug-in and part, stored as options, beside the presets in YAML.

Owns the names of options: `<group>/_<name>` from Python, `<group>/<name>` from YAML, or from Python without such a YAML.
Never runs a plug-in: its defaults are read from its fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from telescope.config import plugins
from telescope.config.parts import (
    ClusterSettings,
    EnvironmentEntry,
    InferenceSettings,
    LoggingSettings,
    ModelSettings,
)
from telescope.config.run import RunConfig
from telescope.settings import Settings

MISSING = "???"  # OmegaConf's word for a value that must be given
GROUPS = ("algorithm", "backend", "inference", "env", "cluster", "model", "logging", "experiment")
"""The groups a user chooses from, in the order of the help text."""
HIDDEN_GROUPS = ("model_backend",)
"""Presets chosen by two others together: conf/model_backend/<model>_<backend>.yaml."""
CHOSEN_PARTS: dict[str, type[Settings]] = {
    "cluster": ClusterSettings,
    "inference": InferenceSettings,
    "logging": LoggingSettings,
    "model": ModelSettings,
}
PLUGIN_GROUPS: dict[str, plugins.Kind[Any]] = {
    "algorithm": plugins.ALGORITHMS,
    "backend": plugins.BACKENDS,
    "env": plugins.ENVIRONMENTS,
}
_NAMED_BY_PRESETS = {"model": {"name": MISSING}}
"""Class defaults that a preset has to replace: a value once given can't become missing again."""
NOT_COMPOSED = ("plugin_path",)
"""Settings that the composition itself writes."""


@dataclass(frozen=True)
class Places:
    """Where presets and plug-ins lie: our `conf/` and, with `--config-dir`, the user's folder and its `plugins/`."""

    conf: Path
    user: Path | None = None

    @property
    def plugin_path(self) -> tuple[str, ...]:
        folder = None if self.user is None else self.user / "plugins"
        return (str(folder.resolve()),) if folder is not None and folder.is_dir() else ()

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.conf,) if self.user is None else (self.conf, self.user)

    def presets(self, group: str) -> dict[str, list[Path]]:
        """YAML files of a group by option name, ours first."""
        found: dict[str, list[Path]] = {}
        for folder in self.folders:
            for file in sorted((folder / group).glob("*.yaml")):
                found.setdefault(file.stem, []).append(file)
        return found

    def options(self, group: str) -> list[str]:
        """All names a user may choose in a group."""
        kind = PLUGIN_GROUPS.get(group)
        from_python = plugins.find(kind, self.plugin_path) if kind is not None else {}
        return sorted({*from_python, *self.presets(group)})


@dataclass(frozen=True)
class Option:
    """One entry of Hydra's store, e.g. `Option("algorithm", "_grpo", {"name": "grpo", …}, "algorithm")`."""

    group: str | None
    name: str
    node: dict[str, Any]
    package: str | None = None


@contextmanager
def registered(places: Places) -> Iterator[None]:
    """Hydra's store, which is one for the whole process, holds our options inside the block and not after it."""
    store = ConfigStore.instance()
    options = list(python_options(places))
    for option in options:
        store.store(group=option.group, name=option.name, node=option.node, package=option.package)
    try:
        yield
    finally:
        for option in options:
            names = store.repo if option.group is None else store.repo[option.group]
            del names[f"{option.name}.yaml"]


def defaults_of(settings: type[Settings], without: Sequence[str] = ()) -> dict[str, Any]:
    """The class defaults as plain values; `???` for a setting that must be given, nested settings as nested dicts."""
    return {name: _default(field) for name, field in settings.model_fields.items() if name not in without}


def _default(field: FieldInfo) -> Any:
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, Settings) and field.default_factory is not None:
        return defaults_of(annotation)
    if field.is_required():
        return MISSING
    return to_jsonable_python(field.get_default(call_default_factory=True))


def python_options(places: Places) -> Iterator[Option]:
    """The class defaults of every part and plug-in."""
    chosen = (*PLUGIN_GROUPS, *CHOSEN_PARTS, "environments", *NOT_COMPOSED)
    yield Option(None, "_run", defaults_of(RunConfig, without=chosen))
    for group, part in CHOSEN_PARTS.items():
        yield Option(group, "_default", {**defaults_of(part), **_NAMED_BY_PRESETS.get(group, {})}, group)
    for group, kind in PLUGIN_GROUPS.items():
        presets = places.presets(group)
        for name, found in plugins.find(kind, places.plugin_path).items():
            fields = {} if isinstance(found, plugins.PluginError) else defaults_of(found)
            node = _environment_node(name, fields) if group == "env" else {"name": name, **fields}
            package = f"environments.{name}" if group == "env" else group
            for option in (f"_{name}",) if name in presets else (f"_{name}", name):
                yield Option(group, option, node, package)


def _environment_node(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {**defaults_of(EnvironmentEntry), "name": name, "kwargs": fields}
