"""Presets beyond conf/, as Hydra's source of configurations: the user's YAML files, and class defaults from Python.

From Python come `<group>/_<name>`, the defaults of a class for a preset to begin with, and `<group>/<name>` of a plug-in that
has no preset. A preset of `env` makes an environment of its own name: what it begins with goes there too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, ListConfig, OmegaConf

from telescope.compose.options import CHOSEN_PARTS, PLUGIN_GROUPS, Places, part_defaults, plugin_defaults
from telescope.config import plugins


def search_path(places: Places) -> str:
    """The override with which Hydra looks here too, the path written as in a URL, as any character may stand in it."""
    Plugins.instance().register(TelescopePresets)
    folder = (places.user or places.conf).resolve()
    return f"hydra.searchpath=['{TelescopePresets.scheme()}://{quote(str(folder))}']"


class TelescopePresets(FileConfigSource):
    """The user's folder, `telescope:///home/me/mine`, and Python files. Without one it is conf/, where Hydra looks first."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider=provider, path=unquote(path))
        user = Path(self.path)
        self.plugin_path = Places(user, user).plugin_path

    @staticmethod
    def scheme() -> str:
        return "telescope"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        group = config_path.strip("/")
        return group in (*CHOSEN_PARTS, *PLUGIN_GROUPS) or super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        return super().is_config(config_path) or self._from_python(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if super().is_config(config_path):
            found = super().load_config(config_path)
            return _as_environment(found, name) if group == "env" and found.header["package"] is None else found
        package = f"environments.{name.removeprefix('_')}" if group == "env" else group
        node = OmegaConf.create(self._from_python(config_path) or {})
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", node, {"package": package})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        group = config_path.strip("/")
        files = super().list(config_path, results_filter) if super().is_group(config_path) else []
        if group not in PLUGIN_GROUPS or results_filter == ObjectType.GROUP:
            return files
        return sorted({*files, *plugins.find_others(PLUGIN_GROUPS[group], self.plugin_path)})

    def _from_python(self, config_path: str) -> dict[str, Any] | None:
        """The defaults that an option's name stands for; None where it stands for none."""
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if group in CHOSEN_PARTS:
            return part_defaults(group) if name == "_default" else None
        if group not in PLUGIN_GROUPS:
            return None
        kind, name = PLUGIN_GROUPS[group], name.removeprefix("_")
        if name not in plugins.files(kind, self.plugin_path):
            return None
        try:
            return plugin_defaults(group, name, plugins.load(kind, name, self.plugin_path))
        except plugins.NotAPlugin:
            return None
        except plugins.PluginError as error:
            return plugin_defaults(group, name, error)


def _as_environment(found: ConfigResult, name: str) -> ConfigResult:
    """A preset of `env` that says nothing else is the environment of its name, and so is what its `defaults` name."""
    found.header["package"] = f"environments.{name}"
    content = found.config
    if isinstance(content, DictConfig) and isinstance(content.get("defaults"), ListConfig):
        plain = OmegaConf.to_container(content.defaults, resolve=False)
        assert isinstance(plain, list)
        content.defaults = [_placed_here(entry) for entry in plain]
    return found


def _placed_here(entry: Any) -> Any:
    return f"{entry}@_here_" if isinstance(entry, str) and entry != "_self_" and "@" not in entry else entry
