"""Writes the tables of docs/migration*.md from the table of foreign names; `--check` only says whether they are current."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from telescope.config.foreign_names import ForeignName, System, of_system

PAGES: dict[str, tuple[System, ...]] = {
    "migration_older.md": ("older",),
    "migration_trl.md": ("trl",),
    "migration_verl.md": ("verl",),
}
BEGIN, END = "<!-- {system}: by scripts/migration_tables.py -->", "<!-- end -->"
SETTING = re.compile(r"[a-z_]+(?:\.[a-z_0-9<>]+)*")
SAME = "<the same name>"
BEFORE = ("megatron_", "checkpoint_", "weight_broadcast_")
"""What stood before names that have lost it, and many of which share a row."""


def table(system: System) -> str:
    """What is called otherwise and what has no counterpart, one row for names that have moved together."""
    rows = [f"| {names} | {here} |" for here, names in _rows(system).items()]
    return "\n".join(["| there | here |", "|---|---|", *rows])


def _rows(system: System) -> dict[str, str]:
    """The names by what stands for them: those that keep theirs first, then others, then those that have none."""
    found: dict[str, list[str]] = {}
    entries = of_system(system)
    for group in (_moved, _renamed, _without):
        for entry in entries:
            if (cell := group(entry)) is not None:
                found.setdefault(cell, []).append(f"`{entry.name}`")
    return {cell.replace("|", "\\|"): ", ".join(names) for cell, names in found.items()}


def _moved(entry: ForeignName) -> str | None:
    if not entry.here or entry.said or not entry.keeps_its_name:
        return None
    section = entry.here.rpartition(".")[0]
    return f"`{section}.{SAME}`" if section else "the same"


def _renamed(entry: ForeignName) -> str | None:
    if not entry.here or _moved(entry) is not None:
        return None
    section, _, last = entry.here.rpartition(".")
    before = entry.name.removesuffix(last)
    if before in BEFORE and not entry.said:
        return f"`{section}.<the name without {before}>`"
    here = f"`{entry.here}`" if SETTING.fullmatch(entry.here) else entry.here
    return f"{here}: {entry.said}" if entry.said else here


def _without(entry: ForeignName) -> str | None:
    return None if entry.here else entry.said


def pages() -> dict[str, str]:
    """Each page's text with its tables as they should be."""
    found = {}
    for name, systems in PAGES.items():
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        for system in systems:
            begin = BEGIN.format(system=system)
            before, marked, rest = text.partition(begin)
            _, ended, after = rest.partition(END)
            if not marked or not ended:
                raise ValueError(f"docs/{name} has no place for the table of {system}: `{begin}` … `{END}`")
            text = f"{before}{begin}\n\n{table(system)}\n\n{END}{after}"
        found[name] = text
    return found


def stale() -> Iterator[str]:
    for name, text in pages().items():
        if text != (ROOT / "docs" / name).read_text(encoding="utf-8"):
            yield name


def main() -> int:
    old = list(stale())
    if "--check" in sys.argv[1:]:
        print(f"not current: {', '.join(old)}; run python scripts/migration_tables.py" if old else "current")
        return int(bool(old))
    for name, text in pages().items():
        (ROOT / "docs" / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
