"""What keeps a preset or an override from being composed, in sentences that name it. Hydra's own would name something else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigSource

from telescope.compose.options import GROUPS, HIDDEN_GROUPS, Places
from telescope.compose.preset_files import NOT_TEXT
from telescope.config.validate import misplaced_containers
from telescope.config.words import ConfigProblem

_FAILING_PRESET = re.compile(r"In '([^']+)'")


def explain_failure(error: Exception, overrides: Sequence[Override], places: Places) -> list[ConfigProblem]:
    """Why Hydra could not compose these overrides."""
    if isinstance(error, UnicodeDecodeError) and (unreadable := _unreadable_presets(places)):
        return unreadable
    said = _first_paragraph(error)
    failing = _FAILING_PRESET.search(said)
    found = [*_misplaced_in_preset(failing[1], places)] if failing else []
    found += [problem for override in overrides for problem in _misplaced_in_override(override, said)]
    found += [problem for override in overrides for problem in _without_its_object(override, said)]
    return found or [ConfigProblem("", said)]


def _misplaced_in_preset(name: str, places: Places) -> Iterator[ConfigProblem]:
    """A list where a mapping belongs, or the other way round, in the preset `experiment/mine`."""
    for file in (folder / f"{name}.yaml" for folder in places.folders):
        if not file.is_file():
            continue
        group, _, option = name.rpartition("/")
        package = _package(file) or (f"environments.{option}" if group == "env" else group.replace("/", "."))
        place = () if package == "_global_" else tuple(package.removeprefix("_global_.").split("."))
        for problem in misplaced_containers(_nested(place, _settings(file))):
            yield ConfigProblem(problem.path, f"{file}: {problem.sentence}")


def _misplaced_in_override(override: Override, said: str) -> Iterator[ConfigProblem]:
    if override.is_delete():
        return
    place = override.key_or_group
    found = list(misplaced_containers(_nested(tuple(place.split(".")), override.value())))
    yield from found
    if not found and str(override.input_line) in said and said.startswith("Error merging"):
        either = f"{place} has names with values, or these where it has a list"
        yield ConfigProblem(place, f"{override.input_line} has a list where {either}")


def _without_its_object(override: Override, said: str) -> Iterator[ConfigProblem]:
    """An override that takes away or replaces what is not there."""
    key, line = override.get_key_element().lstrip("~+"), override.input_line
    if override.is_delete() and said.startswith("Could not delete from config."):
        if f"'{key}' does not exist" in said:
            yield ConfigProblem(key, f"{line} takes away what is not there: leave it out, or see the names with --cfg job")
        elif there := re.search(f"The value of '{re.escape(key)}' is (.*) and not ", said):
            yield ConfigProblem(key, f"{line} takes {key} away only where it has this value, and it is {there[1]}: type ~{key}")
    elif override.package is not None and f"Could not override '{key}'" in said:
        yield ConfigProblem(key, f"{line} replaces an entry, and no list of defaults has {key}: add one with +{line}")


def _nested(place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """`(("a", "b"), 1)` → `{"a": {"b": 1}}`"""
    for name in reversed(place):
        value = {name: value}
    return dict(value)


def _settings(file: Path) -> dict[str, Any]:
    """What a preset sets, without its `defaults`; empty where it can't be read."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return {str(name): value for name, value in content.items() if name != "defaults"} if isinstance(content, dict) else {}


def _package(file: Path) -> str | None:
    """What its line `# @package` says; None where there is no such line."""
    try:
        return ConfigSource._get_header_dict(file.read_text(encoding="utf-8"))["package"]
    except (OSError, ValueError):  # Hydra says what is wrong with the file, or the line
        return ""


def _unreadable_presets(places: Places) -> list[ConfigProblem]:
    """Those that are not text, of all groups: one may have been chosen by another preset."""
    files = [(group, file) for group in (*GROUPS, *HIDDEN_GROUPS) for found in places.presets(group).values() for file in found]
    return [ConfigProblem(group, _not_text(file)) for group, file in files if not _is_text(file)]


def _is_text(file: Path) -> bool:
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _not_text(file: Path) -> str:
    return f"{file} {NOT_TEXT}"


def _first_paragraph(error: Exception) -> str:
    """Hydra's own sentence, without the search path and the chain of causes below it."""
    text = str(error) or str(error.__cause__ or type(error).__name__)
    return " ".join(line.strip() for line in text.split("\n\n")[0].splitlines() if line.strip())
