"""The tables of docs/migration*.md are those of the foreign names."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from telescope.config.foreign_names import of_system
from tests.product import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(ROOT / "scripts" / "migration_tables.py")


def test_the_pages_are_current(script: ModuleType):
    assert list(script.stale()) == [], "run python scripts/migration_tables.py"


@pytest.mark.parametrize("system", ["older", "trl", "verl"])
def test_every_name_is_in_its_table_once(script: ModuleType, system: str):
    table = script.table(system)
    for entry in of_system(system):
        assert table.count(f"`{entry.name}`") >= 1, entry
        assert sum(f"`{entry.name}`" in line.split(" | ")[0] for line in table.splitlines()) == 1, entry


def test_a_table_that_is_old_is_noticed_and_written_anew(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "docs").mkdir()
    for name, systems in script.PAGES.items():
        marks = "\n".join(f"{script.BEGIN.format(system=system)}\nold\n{script.END}" for system in systems)
        (tmp_path / "docs" / name).write_text(f"before\n{marks}\nafter\n")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["migration_tables.py", "--check"])
    assert script.main() == 1
    monkeypatch.setattr("sys.argv", ["migration_tables.py"])
    assert script.main() == 0
    assert list(script.stale()) == []
    text = (tmp_path / "docs" / "migration_older.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "| `group_size`, `temperature`, `top_p`, `max_tokens` | `rollout.<the same name>` |" in text
    assert "old\n" not in text
