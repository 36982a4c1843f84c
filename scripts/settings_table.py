"""Writes the tables of docs/configuration.md from the settings classes; `--check` only says whether they are current."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from telescope.compose.options import MISSING, PLUGIN_GROUPS, defaults_of
from telescope.config import plugins
from telescope.config.parts import EnvironmentEntry
from telescope.config.run import RunConfig
from telescope.config.slurm import SlurmGroup, SlurmSettings
from telescope.config.words import in_words
from telescope.environments.sandboxes.pool import SandboxSettings
from telescope.settings import Settings

PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- settings: written by scripts/settings_table.py -->", "<!-- settings: end -->"
SIGNS = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}


def tables() -> str:
    """All tables, one a section, in the order of the tree."""
    return "\n\n".join(["", *_sections(), ""])


def page(text: str) -> str:
    """The page with its tables replaced by current ones."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{tables()}{END}{after}"


def _sections() -> Iterator[str]:
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    parts = {name: part for name, part in sections.items() if isinstance(part, type) and issubclass(part, Settings)}
    yield _table("Top level", RunConfig, "", without=(*parts, "environments"))
    for name, part in parts.items():
        if name in PLUGIN_GROUPS:
            yield from _plugin_sections(name, PLUGIN_GROUPS[name], name)
        else:
            yield _table(name, part, f"{name}.")
            if name == "cluster":
                yield _table("cluster.slurm", SlurmSettings, "cluster.slurm.")
                yield _table("cluster.slurm.inference", SlurmGroup, "cluster.slurm.inference.")
    yield _table("environments.&lt;name&gt;", EnvironmentEntry, "environments.<name>.")
    yield from _plugin_sections("env", PLUGIN_GROUPS["env"], "environments.<name>.kwargs")
    yield _table("sandbox, of an environment that has it", SandboxSettings, "sandbox.")
    yield from _plugin_sections("sandbox.provider", plugins.SANDBOXES, "sandbox")


def _plugin_sections(group: str, kind: plugins.Kind[Any], prefix: str) -> Iterator[str]:
    """What a kind's plug-ins share in one table, then what each has of its own."""
    found = {name: cls for name, cls in plugins.find(kind).items() if isinstance(cls, type)}
    shared = [row for row in _rows(next(iter(found.values())), f"{prefix}.") if _everywhere(row, found, prefix)]
    if shared and len(found) > 1:
        yield _lines(f"{group}: every option", shared)
    for name, cls in found.items():
        own = [row for row in _rows(cls, f"{prefix}.") if len(found) == 1 or row not in shared]
        if own:
            yield _lines(f"{group}={name}", own)


def _everywhere(row: str, found: dict[str, type[Settings]], prefix: str) -> bool:
    return all(row in _rows(cls, f"{prefix}.") for cls in found.values())


def _table(title: str, settings: type[Settings], prefix: str, without: tuple[str, ...] = ()) -> str:
    return _lines(title, _rows(settings, prefix, without))


def _lines(title: str, rows: list[str]) -> str:
    return "\n".join([f"### {title}", "", "| setting | default | takes | meaning |", "|---|---|---|---|", *rows])


def _rows(settings: type[Settings], prefix: str, without: tuple[str, ...] = ()) -> list[str]:
    defaults, said = defaults_of(settings, without), meanings(settings)
    return [_row(f"{prefix}{name}", defaults[name], settings.model_fields[name], said.get(name, "")) for name in defaults]


def meanings(settings: type[Settings]) -> dict[str, str]:
    """What is written below each field of the class, or of a class it derives from.

    Read from the source here and not by pydantic (`use_attribute_docstrings`), which would cost every process of a run a tenth
    of a second at its start.
    """
    found: dict[str, str] = {}
    for cls in reversed(settings.__mro__):
        if cls is not Settings and issubclass(cls, Settings):
            found |= _docstrings(cls)
    return found


@cache
def _docstrings(cls: type[Settings]) -> dict[str, str]:
    (defined,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(defined, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in itertools.pairwise(defined.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def _row(path: str, default: Any, field: FieldInfo, said: str) -> str:
    shown = "must be given" if default == MISSING else f"`{json.dumps(default, ensure_ascii=False)}`"
    takes = in_words(field.annotation).replace(" | ", " \\| ")
    bounds = [
        f"{sign} {getattr(bound, name)}"
        for bound in field.metadata
        for sign, name in [SIGNS.get(type(bound), ("", ""))]
        if sign
    ]
    meaning = " ".join(said.split()).replace("|", "\\|")
    return f"| `{path}` | {shown} | {', '.join([takes, *bounds])} | {meaning} |"


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    current = page(text)
    if "--check" in sys.argv[1:]:
        print("current" if text == current else f"{PAGE.name} is not current: run python scripts/settings_table.py")
        return int(text != current)
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
