"""Presets that can't be used, in sentences that name the file: Hydra's own complaint would be about something else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from telescope.compose.options import GROUPS, HIDDEN_GROUPS, Places
from telescope.config.words import Problem


def preset_problems(group: str, file: Path) -> Iterator[Problem]:
    """What keeps one preset from being composed. An invalid YAML is left to Hydra, which names line and column."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        yield Problem(group, _not_text(file))
    except OSError as error:
        yield Problem(group, f"{file} can't be read: {error.strerror}")
    except yaml.YAMLError:
        return
    else:
        if content is None:
            yield Problem(group, f"{file} is empty: a preset holds settings, such as seed: 1, or a list of defaults")
        elif not isinstance(content, dict):
            kind = "a list" if isinstance(content, list) else "a single value"
            yield Problem(group, f"{file} holds {kind}: a preset holds settings, each as name: value")


def unreadable_presets(places: Places) -> list[Problem]:
    """Those that are no text, of all groups: one may have been chosen by another preset."""
    files = [(group, file) for group in (*GROUPS, *HIDDEN_GROUPS) for found in places.presets(group).values() for file in found]
    return [Problem(group, _not_text(file)) for group, file in files if not _is_text(file)]


def _is_text(file: Path) -> bool:
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _not_text(file: Path) -> str:
    return f"{file} is not text in UTF-8: save it as UTF-8"
