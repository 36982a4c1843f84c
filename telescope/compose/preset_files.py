"""What is wrong with a user's preset and with those it begins with, before Hydra composes them: a sentence with the file each.

Owns what a file may hold: its line `# @package`, its list of defaults, its place. Refuses to judge settings: that is for the
configuration as a whole. An invalid YAML is left to Hydra, which names line and column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.plugins.config_source import ConfigSource
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from telescope.compose.options import CHOSEN_PARTS, GROUPS, HIDDEN_GROUPS, NOT_COMPOSED, Places
from telescope.compose.run_help import INSTEAD, OTHER_SETTINGS
from telescope.config.words import ConfigProblem, did_you_mean, typed

GLOBAL = "# @package _global_"
SEVERAL = ("env", "experiment")
"""The groups that take a list of options."""
ENVIRONMENT = re.compile(r"(_global_\.)?environments\.[^.]+")
"""A package that holds an environment."""
_AN_ENTRY = "an entry is the name of a preset, `override /group: option`, or _self_"


@dataclass(frozen=True)
class _DefaultsEntry:
    """One of a list of defaults, e.g. `override /env: [countdown, hard]`."""

    group: str
    options: tuple[str, ...]
    written: str
    override: bool = False
    package: str | None = None
    optional: bool = False
    absolute: bool = False
    alone: bool = False
    """A name without its group."""


def preset_problems(group: str, name: str, places: Places) -> list[ConfigProblem]:
    """What keeps a preset from being composed, or would let a part of it act on nothing. Telescope's own are not looked at."""
    return list(_problems(group, name, places, ()))


def _problems(group: str, name: str, places: Places, above: tuple[Path, ...]) -> Iterator[ConfigProblem]:
    for file in places.presets(group).get(name, ()):
        if file.is_relative_to(places.conf):
            continue
        if file in above:
            names = " → ".join(path.stem for path in (*above[above.index(file) :], file))
            yield ConfigProblem(group, f"{file}: its defaults lead back to itself ({names}): take it out of one of the lists")
            continue
        content = _content(file)
        if isinstance(content, str):
            yield ConfigProblem(group, f"{file} {content}")
            continue
        own = list(_own_problems(group, file, content))
        yield from (ConfigProblem(group, f"{file}{sentence}") for sentence in own)
        if not own:
            for entry in _entries(group, content.get("defaults", [])):
                if isinstance(entry, str):
                    yield ConfigProblem(group, f"{file}: {entry}")
                else:
                    yield from _entry_problems(group, file, entry, places, above)


def _content(file: Path) -> dict[str, Any] | str:
    """What a preset holds, or what is wrong with it as a whole."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return NOT_TEXT
    except OSError as error:
        return f"can't be read: {error.strerror}"
    except yaml.YAMLError:
        return {}
    except RecursionError:
        return "is nested too deep to be read: a preset holds settings, each as name: value"
    if content is None:
        return "is empty: a preset holds settings, such as seed: 1, or a list of defaults"
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "a single value"
        return f"holds {kind}: a preset holds settings, each as name: value"
    if _is_endless(content):
        return "holds an alias (*name) within what it stands for, which has no end: write the value out"
    return content


NOT_TEXT = "is not text in UTF-8: save it as UTF-8"


def _is_endless(value: Any, above: tuple[int, ...] = ()) -> bool:
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return id(value) in above or any(_is_endless(item, (*above, id(value))) for item in inside)


def _own_problems(group: str, file: Path, content: Mapping[str, Any]) -> Iterator[str]:
    try:
        package = ConfigSource._get_header_dict(file.read_text(encoding="utf-8"))["package"]
    except ValueError as error:
        yield f": {error}: a line that begins with # @ names the preset's package, e.g. `{GLOBAL}`"
        return
    try:
        OmegaConf.create(dict(content))
    except OmegaConfBaseException as error:
        why = str(error).partition("\n")[0]
        yield f": {error.full_key or 'a value'} can't be read ({why}): an interpolation reads ${{name}} or ${{oc.env:NAME}}"
        return
    defaults = content.get("defaults", [])
    if not isinstance(defaults, list):
        yield f": defaults={typed(defaults)} must be a list, e.g. defaults: [{_example(group)}, _self_]"
        return
    if group == "experiment" and package in (None, "experiment", "_group_") and _sets_anything(content):
        yield f" must begin with the line `{GLOBAL}`, without which its settings go below `experiment`"
    if group == "env" and package is None and "." in file.stem:
        yield ": the name of an environment has no dot: rename the file"
    if group == "env" and package is not None and ENVIRONMENT.fullmatch(package) and _names_others(content):
        yield ": its defaults go to their own place: write e.g. `countdown@_here_`, or leave the line `# @package` out"
    if group == "env" and package is not None and not ENVIRONMENT.fullmatch(package):
        yield (
            f": `# @package {package}` is not the place of an environment: leave the line out, or write "
            f"`# @package environments.{file.stem}`"
        )
    if group not in ("env", "experiment", "model", *HIDDEN_GROUPS) and package not in (None, group, "_group_", "_global_"):
        yield f": `# @package {package}` puts its settings where nothing is: leave the line out"
    for name in NOT_COMPOSED:
        if name in content:
            yield f": {name} follows from --config-dir: put plug-ins into <config-dir>/plugins"
    hydra = content.get("hydra")
    if "hydra" in content and not (isinstance(hydra, dict) and set(hydra) == {"sweeper"}):
        known = next((INSTEAD[f"hydra.{key}"] for key in hydra if f"hydra.{key}" in INSTEAD), "") if hydra else ""
        yield f": hydra={typed(hydra)}: {known or OTHER_SETTINGS}"


def _names_others(content: Mapping[str, Any]) -> bool:
    """Whether an environment without a name of its own begins with others that keep their package."""
    named = [entry for entry in content.get("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    return "name" not in content and bool(named) and not any("@" in entry for entry in named)


def _sets_anything(content: Mapping[str, Any]) -> bool:
    defaults = content.get("defaults", [])
    named = [key for entry in defaults if isinstance(entry, dict) for key in entry]
    return any(name != "defaults" for name in content) or any(str(key).startswith("override") for key in named)


def _example(group: str) -> str:
    return {"env": "countdown", "experiment": "fake", "algorithm": "grpo"}.get(group, "_default")


def _entries(group: str, defaults: Sequence[Any]) -> Iterator[_DefaultsEntry | str]:
    """The entries of a list of defaults, or a sentence for one that can't be read."""
    for entry in defaults:
        if isinstance(entry, str):
            if entry != "_self_":
                yield _named(group, entry)
        elif isinstance(entry, dict) and len(entry) == 1:
            ((key, value),) = entry.items()
            options = value if isinstance(value, list) else [] if value is None else [value]
            if not isinstance(key, str) or not all(isinstance(option, str) for option in options):
                yield f"defaults holds {typed(entry)}: the names in it must be text, e.g. '{next(iter(options), key)}'"
            else:
                yield _keyed(group, key, options)
        else:
            yield f"defaults holds {typed(entry)}: {_AN_ENTRY}"


def _named(group: str, written: str) -> _DefaultsEntry:
    path, _, package = written.partition("@")
    own, _, option = path.rpartition("/")
    absolute = path.startswith("/")
    found = own.removeprefix("/") if absolute else "/".join(filter(None, (group, own)))
    return _DefaultsEntry(found, (option,), written, package=package or None, absolute=absolute, alone=True)


def _keyed(group: str, key: str, options: Sequence[str]) -> _DefaultsEntry:
    *words, path = key.split()
    path, _, package = path.partition("@")
    absolute = path.startswith("/")
    found = path.removeprefix("/") if absolute else f"{group}/{path}"
    return _DefaultsEntry(found, tuple(options), key, "override" in words, package or None, "optional" in words, absolute)


def _entry_problems(
    group: str, file: Path, entry: _DefaultsEntry, places: Places, above: tuple[Path, ...]
) -> Iterator[ConfigProblem]:
    if sentence := _misplaced(group, file, entry):
        yield ConfigProblem(group, f"{file}: {sentence}")
        return
    if entry.group not in (*GROUPS, *HIDDEN_GROUPS):
        if not (entry.optional or entry.group.startswith("hydra")):
            yield ConfigProblem(group, f"{file}: `{entry.written}`: there is no such group.{did_you_mean(entry.group, GROUPS)}")
        return
    for option in entry.options:
        if "${" in option:
            if not re.fullmatch(rf"(\$\{{({'|'.join(GROUPS)})\}}|[^$])*", option):
                yield ConfigProblem(
                    group, f"{file}: defaults names {option}: ${{…}} can stand for a group's choice alone, e.g. ${{model}}"
                )
            continue
        if option in places.presets(entry.group):
            yield from _problems(entry.group, option, places, (*above, file))
        elif not entry.optional and not _is_offered(entry.group, option, places):
            hint = did_you_mean(option, places.options(entry.group))
            yield ConfigProblem(group, f"{file}: defaults names {entry.group}={option}: there is no such option.{hint}")


def _misplaced(group: str, file: Path, entry: _DefaultsEntry) -> str:
    """Why an entry would not do what it says; empty where it does."""
    top = entry.group.partition("/")[0]
    if top == "hydra" and not entry.group.startswith("hydra/sweeper"):
        return f"`{entry.written}`: {INSTEAD.get(entry.group.replace('/', '.'), OTHER_SETTINGS)}"
    if entry.absolute and entry.alone and not top and entry.options == ("run",):
        return f"`{entry.written}`: conf/run.yaml is what every run begins with: leave it out"
    if not entry.absolute and not entry.alone and (meant := entry.group.rpartition("/")[2]) in GROUPS:
        return f"`{entry.written}` means a group below this one: write `override /{meant}`"
    if entry.override and group != "experiment":
        return f"`{entry.written}`: experiments alone choose options of other groups: move it to experiment/{file.name}"
    if entry.alone or entry.package is not None or entry.group not in GROUPS:
        return ""
    if not entry.override and entry.group != "experiment":
        return f"`{entry.written}` is in the defaults list already: write `override /{entry.group}`"
    if len(entry.options) > 1 and entry.group not in SEVERAL:
        return f"`{entry.written}` has {len(entry.options)} options, and {entry.group} takes one"
    return ""


def _is_offered(group: str, option: str, places: Places) -> bool:
    return places.offers(group, option.removeprefix("_")) or (option == "_default" and group in CHOSEN_PARTS)
