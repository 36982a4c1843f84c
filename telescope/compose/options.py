"""What may be chosen in each group: our presets in conf/, those of the user's folder, and Python files that are not ours.

Owns where options lie and what a class's defaults are as plain values; presets.py hands them to Hydra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from telescope.config import plugins, secrets
from telescope.config.run import RunConfig
from telescope.config.sections import (
    ClusterSettings,
    EnvironmentEntry,
    InferenceSettings,
    LoggingSettings,
    ModelSettings,
)
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

    def unread(self, group: str) -> list[Path]:
        """The user's files that are meant as presets and that Hydra does not see."""
        return [] if self.user is None else sorted((self.user / group).glob("*.yml"))

    def find_references(self) -> frozenset[str]:
        """The variables to which the user's presets refer, before one of them is composed: doing so imports plug-ins."""
        folders = () if self.user is None else (self.user / group for group in (*GROUPS, *HIDDEN_GROUPS))
        files = (file for folder in folders for file in folder.glob("**/*.yaml") if file.is_file())
        return frozenset(name for file in files for name in secrets.find_references(_read(file)))

    def options(self, group: str) -> list[str]:
        """All names a user may choose in a group. Our own have a preset each; of others' Python files each is an option."""
        kind = PLUGIN_GROUPS.get(group)
        from_python = plugins.find_others(kind, self.plugin_path) if kind is not None else {}
        return sorted({*from_python, *self.presets(group)})

    def offers(self, group: str, name: str) -> bool:
        """Whether this may be chosen: one of the options, or a Python file of ours whose preset was not written yet."""
        kind = PLUGIN_GROUPS.get(group)
        if kind is None or name in self.options(group):
            return name in self.options(group)
        try:
            return name in plugins.files(kind) and bool(plugins.load(kind, name))
        except plugins.NotAPlugin:
            return False
        except plugins.PluginError:
            return True


def _read(file: Path) -> str:
    """What of it is text; that it can't be read is said where it is chosen."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


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


def run_defaults() -> dict[str, Any]:
    """What conf/run.yaml holds: all settings that no group brings."""
    return defaults_of(RunConfig, without=(*PLUGIN_GROUPS, *CHOSEN_PARTS, "environments", *NOT_COMPOSED))


def part_defaults(group: str) -> dict[str, Any]:
    """The option `<group>/_default` of a group that is one class, for presets to begin with."""
    return {**defaults_of(CHOSEN_PARTS[group]), **_NAMED_BY_PRESETS.get(group, {})}


def plugin_defaults(group: str, name: str, found: type[Settings] | plugins.PluginError) -> dict[str, Any]:
    """What choosing a plug-in brings, e.g. `{"name": "cispo", "clip_low": 1.0, …}`; its name alone where it is broken."""
    fields = {} if isinstance(found, plugins.PluginError) else defaults_of(found)
    return {**defaults_of(EnvironmentEntry), "name": name, "kwargs": fields} if group == "env" else {"name": name, **fields}
