from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from telescope.config import plugins
from telescope.config.run import RunConfig
from telescope.environments.sandboxes.pool import SandboxSettings
from telescope.settings import Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("settings_table", ROOT / "scripts" / "settings_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_documentation_are_current(script):
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page(text) == text, "run python scripts/settings_table.py"


def test_a_changed_default_would_be_noticed(script):
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page(text.replace("`1e-06`", "`2e-06`")) == script.page(text) != text.replace("`1e-06`", "`2e-06`")


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
