"""The games of textworld in a Python of their own: 25 packages, compiled ones among them, that nothing else needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from telescope.environments.adapters.textworld import REQUIREMENT
from tests.environments.own_venv import installed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_games_of_textworld_are_played_and_trained_on(tmp_path: Path):
    python = installed(tmp_path / "venv", REQUIREMENT)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/run/textworld_games.py"]
    tests = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert tests.returncode == 0, tests.stdout[-6000:]
    assert "2 passed" in tests.stdout
