"""Command line, core, wire and launcher on every Python that the package allows, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PARTS = ("tests/config", "tests/flow", "tests/wire", "tests/process")
INSTALL_S, TEST_S = 1800, 1800


def find(version: str) -> str:
    """An interpreter of this version that really starts: one on PATH, or one of pyenv's."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, installed)):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, timeout=60, check=False).returncode == 0:
            return candidate
    pytest.fail(f"no Python {version} is installed: this lane needs 3.12 and 3.13 beside the Python that runs it")


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + TEST_S)
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_everything_without_torch_on(version: str, tmp_path: Path) -> None:
    subprocess.run([find(version), "-m", "venv", tmp_path / "venv"], check=True, timeout=INSTALL_S)
    python = tmp_path / "venv" / "bin" / "python"
    listed = subprocess.run(
        [python, CHECKOUT / "scripts" / "_requirements.py", "project", "cpu,dev"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    without_torch = [line for line in listed.stdout.splitlines() if not line.startswith("torch==")]
    (tmp_path / "requirements.txt").write_text("\n".join(without_torch))
    subprocess.run([python, "-m", "pip", "install", "-qq", "-r", tmp_path / "requirements.txt"], check=True, timeout=INSTALL_S)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *PARTS]
    tests = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=TEST_S, check=False)
    assert tests.returncode == 0, tests.stdout[-6000:]
