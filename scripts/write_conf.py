"""Writes the presets of conf/ from the settings classes; `--check` only says which are not current.

A default's source is its Python class. A preset shows every setting of its group with the class's value and comment; what it
changes carries the mark `# preset`, which keeps a value as it stands there. Also by hand are the comment on top, `defaults`,
and the sections of other groups in a preset that has them. Experiments and conf/model_backend/ are by hand altogether.
"""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml
from omegaconf import OmegaConf

from scripts.settings_table import meanings
from telescope.compose.options import CHOSEN_PARTS, PLUGIN_GROUPS, defaults_of, plugin_defaults, run_defaults
from telescope.config import plugins
from telescope.config.run import RunConfig
from telescope.config.sections import EnvironmentEntry
from telescope.config.words import allowed_values, bare_type, typed
from telescope.settings import Settings

CONF = ROOT / "conf"
MARK = "# preset"
RULE = "scripts/write_conf.py"
WIDTH = 110
"""Of a comment or of a text in several lines, with its indentation."""

Place = tuple[str, ...]
Tree = Mapping[str, Any]
Kept = Mapping[Place, Any]


@dataclass(frozen=True)
class Preset:
    """One file, with the settings of a class and its values.

    `Preset(Path("algorithm/cispo.yaml"), Cispo, {"name": "cispo", "clip_low": 1.0, …})`
    """

    file: Path
    settings: type[Settings]
    values: Tree
    kwargs: type[Settings] | None = None
    """The environment's class, whose settings stand below `kwargs`."""

    @property
    def group(self) -> str:
        return self.file.parent.name


def presets(conf: Path = CONF) -> Iterator[Preset]:
    """Every file that is written from a class: one a plug-in, and what there is of the other groups."""
    yield Preset(Path("run.yaml"), RunConfig, run_defaults())
    for group, part in CHOSEN_PARTS.items():
        for file in sorted((conf / group).glob("*.yaml")):
            yield Preset(file.relative_to(conf), part, defaults_of(part))
    for group, kind in PLUGIN_GROUPS.items():
        for name, found in plugins.find(kind).items():
            if isinstance(found, plugins.PluginError):
                raise SystemExit(f"conf/{group}/{name}.yaml can't be written: {found}")
            file, values = Path(group, f"{name}.yaml"), plugin_defaults(group, name, found)
            yield Preset(file, EnvironmentEntry, values, found) if group == "env" else Preset(file, found, values)


def render(preset: Preset, text: str) -> str:
    """The file as it should be, from what is written by hand in `text`; empty for a new one."""
    package = "" if preset.group != "env" else f"# @package environments.{preset.file.stem}"
    comment, body = _divide(text) if text else (_first_comment(preset, package), "")
    whole = "# @package _global_" in comment
    wrapped = {preset.group: preset.values} if whole else preset.values
    by_hand, kept = _read_by_hand(body, wrapped)
    place = (preset.group,) if whole else ()
    written = list(_settings(preset.settings, preset.values, kept, place, preset))
    if whole:
        written = [f"{preset.group}:", *_indent(written)]
    _, again = _read_by_hand("\n".join(written), wrapped)
    if lost := [".".join(marked) for marked in kept if marked not in again]:
        raise SystemExit(f"conf/{preset.file} has a mark at {', '.join(lost)}, which its class does not have")
    return "\n".join([*comment, _rule(preset, whole), "", *by_hand, *written]).rstrip("\n") + "\n"


def _first_comment(preset: Preset, package: str) -> list[str]:
    module = inspect.getmodule(preset.kwargs or preset.settings)
    said = " ".join((inspect.getdoc(module) or "").partition("\n\n")[0].split())
    return [*filter(None, [package]), *_comment(said)]


def _rule(preset: Preset, whole: bool) -> str:
    source = inspect.getsourcefile(preset.kwargs or preset.settings)
    assert source is not None
    place = str(Path(source).relative_to(ROOT)).removesuffix("/__init__.py")
    if whole:
        return f"# `{preset.group}` by {RULE} from {place}; by hand: the rest, and values marked `preset`."
    by_hand = "this comment and `defaults`" if preset.settings is RunConfig else "this comment, and values marked `preset`"
    return f"# By {RULE} from {place}; by hand: {by_hand}."


def _divide(text: str) -> tuple[list[str], str]:
    """The comment on top without the line about this script, and what follows."""
    lines = text.splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return [line for line in lines[:end] if RULE not in line], "\n".join(lines[end:]).lstrip("\n")


def _read_by_hand(body: str, values: Tree) -> tuple[list[str], Kept]:
    """The lines of sections that the class does not have, and the marked values of those that it has, by place."""
    root = yaml.compose(body) if body.strip() else None
    if root is None:
        return [], {}
    assert isinstance(root, yaml.MappingNode)
    own = [key.start_mark.line for key, _ in root.value if key.value in values]
    other = [key.start_mark.line for key, _ in root.value if key.value not in values]
    if own and other and max(other) > min(own):
        raise SystemExit(f"{body.splitlines()[max(other)]!r} is by hand: it must stand above what is written by {RULE}")
    lines = body.splitlines()
    above = lines[: min(own, default=len(lines))]
    while above and (not above[-1].strip() or above[-1].startswith("#")) and own:
        above.pop()  # the first setting's own comment
    content = OmegaConf.to_container(OmegaConf.create(body))
    kept = {place: value for place, value in _find_marked(root, content, lines, ()) if place[0] in values}
    return ([*above, ""] if above else []), kept


def _find_marked(node: yaml.MappingNode, content: Any, lines: Sequence[str], place: Place) -> Iterator[tuple[Place, Any]]:
    for key, value in node.value:
        here = (*place, key.value)
        if MARK in lines[key.start_mark.line]:
            yield here, content[key.value]
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _find_marked(value, content[key.value], lines, here)


def _settings(settings: type[Settings], values: Tree, kept: Kept, place: Place, preset: Preset) -> Iterator[str]:
    """Each setting with its comment above it and an empty line below it."""
    said = meanings(settings)
    if preset.group in PLUGIN_GROUPS and not place:
        kind = PLUGIN_GROUPS[preset.group]
        said = {"name": f"Which {kind.word}: a file name in telescope/{kind.folder}, or in a folder of your own."} | said
    for name, default in values.items():
        here = (*place, name)
        field = settings.model_fields.get(name)
        inner = bare_type(field.annotation) if field is not None else None
        value = kept.get(here, default)
        mark = f"  {MARK} (class: {typed(default)})" if here in kept else ""
        yield from _comment(said.get(name, ""), allowed_values(field.annotation) if field is not None else ())
        if name == "kwargs" and preset.kwargs is not None and value:
            yield f"{name}:"
            yield from _indent(_settings(preset.kwargs, value, kept, here, preset))
        elif isinstance(value, Mapping) and isinstance(inner, type) and issubclass(inner, Settings):
            yield f"{name}:{mark}"
            below = defaults_of(inner) if here in kept else value
            yield from _indent(_settings(inner, below, kept, here, preset))
        else:
            yield from _value(name, value, mark)
            yield ""


def _indent(lines: Iterable[str]) -> Iterator[str]:
    yield from (f"  {line}" if line else "" for line in lines)


def _comment(said: str, takes: Sequence[str] = ()) -> list[str]:
    text = " ".join(said.split())
    lines = textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    return [*lines, *([f"# {' | '.join(takes)}"] if set(takes) - {"null"} else [])]


def _value(name: str, value: Any, mark: str) -> list[str]:
    """`name: value` in one line, or a long text in several; read back, it is the same value."""
    if isinstance(value, str) and (len(value) > WIDTH or "\n" in value):
        literal = "|" if value.endswith("\n") else "|-"
        style, lines = (literal, value.splitlines()) if "\n" in value else (">-", textwrap.wrap(value, WIDTH - 4))
        written = [f"{name}: {style}{mark}", *(f"  {line}" if line else "" for line in lines)]
    else:
        written = [f"{name}: {_scalar(value)}{mark}"]
    if OmegaConf.create("\n".join([*written, ""])) == {name: value}:
        return written
    return [f"{name}: {json.dumps(value, ensure_ascii=False)}{mark}"]  # a text that YAML would read as something else


def _scalar(value: Any) -> str:
    dumped: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return dumped.strip().removesuffix("\n...")


def find_outdated(conf: Path = CONF) -> dict[Path, str]:
    """The files that are not current, each with the text that it should have."""
    found: dict[Path, str] = {}
    for preset in presets(conf):
        file = conf / preset.file
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if (wanted := render(preset, text)) != text:
            found[file] = wanted
    return found


def find_strangers(conf: Path = CONF) -> list[Path]:
    """Presets of an algorithm, a backend or an environment that no Python file stands behind."""
    known = {conf / preset.file for preset in presets(conf)}
    return sorted(file for group in PLUGIN_GROUPS for file in (conf / group).glob("*.yaml") if file not in known)


def main() -> int:
    wanted = find_outdated()
    for file in find_strangers():
        print(f"{file.relative_to(ROOT)} has no Python file of its name: delete it")
    if "--check" in sys.argv[1:]:
        for file in wanted:
            print(f"{file.relative_to(ROOT)} is not current: run python {RULE}")
        return int(bool(wanted or find_strangers()))
    for file, text in wanted.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return int(bool(find_strangers()))


if __name__ == "__main__":
    sys.exit(main())
