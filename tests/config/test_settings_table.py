from __future__ import annotations

from pathlib import Path

import pytest

from telescope.config import plugins
from telescope.config.run import RunConfig
from telescope.environments.sandboxes.pool import SandboxSettings
from telescope.settings import Settings
from tests.product import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return load_script(ROOT / "scripts" / "settings_table.py")


def test_the_pages_of_the_documentation_are_current(script):
    assert script.stale() == [], "run python scripts/settings_table.py"


def test_every_section_has_a_page_and_says_what_it_is_about(script):
    assert [name.removesuffix(".md") for name in script.pages()] == ["README", *script.ABOUT]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("trainer.md", lambda text: text.replace("`1e-06`", "`2e-06`")),
        ("README.md", lambda text: text.replace("[wire]", "[wires]")),
        ("weight_sync.md", lambda text: None),
        ("of_no_section.md", lambda text: "old"),
    ],
)
def test_a_page_that_is_not_current_is_noticed(script, tmp_path, monkeypatch, name, change):
    for file, text in script.pages().items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    assert script.stale() == []
    page = tmp_path / name
    changed = change(page.read_text(encoding="utf-8") if page.exists() else "")
    if changed is None:
        page.unlink()
    else:
        page.write_text(changed, encoding="utf-8")
    assert script.stale() == [name]


def classes() -> list[type[Settings]]:
    sections = [field.annotation for field in RunConfig.model_fields.values()]
    parts = [part for part in sections if isinstance(part, type) and issubclass(part, Settings)]
    kinds = (plugins.ALGORITHMS, plugins.BACKENDS, plugins.ENVIRONMENTS, plugins.SANDBOXES, plugins.TRANSPORTS)
    return [
        RunConfig,
        SandboxSettings,
        *parts,
        *(cls for kind in kinds for cls in plugins.find(kind).values() if isinstance(cls, type)),
    ]


@pytest.mark.parametrize("settings", classes(), ids=lambda settings: settings.__name__)
def test_every_setting_says_what_it_means(script, settings):
    sections = [name for name, field in settings.model_fields.items() if isinstance(field.annotation, type)]
    own = [name for name in settings.model_fields if settings is not RunConfig or name not in (*sections, "environments")]
    said = script.meanings(settings)
    assert [name for name in own if not said.get(name)] == []
