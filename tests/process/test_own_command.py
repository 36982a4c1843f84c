"""What is to be typed for the Telescope that runs, in the shell where it was started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from telescope._launch.own_command import name_own_command


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The programs of a virtual environment whose Python this is, below the folder where the command is given."""
    programs = tmp_path / "a venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "telescope"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return programs


def test_where_the_environment_is_not_activated_its_path_is_told(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_own_command() == "'a venv/bin/telescope'"
    monkeypatch.chdir("/usr")
    assert name_own_command() == f"'{environment}/telescope'"
    (environment / "telescope").unlink()
    assert name_own_command() == f"'{environment}/python' -m telescope"


def test_where_it_is_activated_the_word_will_do(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{environment}:/usr/bin:/bin")
    assert name_own_command() == "telescope"
    (environment / "telescope").unlink()
    assert name_own_command() == "python -m telescope"
