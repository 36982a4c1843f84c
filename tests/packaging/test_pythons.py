"""Command line, core, wire and launcher on every Python that the package allows; its wheel is test_release.py's.

Without torch: the virtual environment has what the package itself needs, tokenizers, the environments' packages, submitit, and
pytest's family, and nothing that only other tests need.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PARTS = ("tests/cli", "tests/slurm", "tests/config", "tests/process", "tests/wire", "tests/flow")
WITHOUT = (
    *("--ignore=tests/cli/test_export.py", "--ignore=tests/cli/test_export_smollm2.py", "--ignore=tests/cli/env/test_audit.py"),
    *("--ignore=tests/cli/test_model_from_gguf.py", "--ignore=tests/config/test_hub.py"),
    *("--ignore=tests/config/test_obstacles.py", "--ignore=tests/config/test_absent.py"),
    *("--ignore=tests/cli/test_served_model.py", "--ignore=tests/config/test_flagships.py", "--ignore=tests/cli/test_chat.py"),
    "--deselect=tests/cli/env/test_check.py::test_the_tiny_model_answers_in_this_process",
)
"""They are about models, or about a machine that has torch and vLLM."""
TOOLS = {"hypothesis", "psutil", "pytest", "pytest-asyncio", "pytest-timeout", "tokenizers", "transformers"}
INSTALL_S, TEST_S = 1800, 2400


def find(version: str) -> str:
    """An interpreter of this version that really starts: one on PATH, or one of pyenv's."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, installed)):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, timeout=60, check=False).returncode == 0:
            return candidate
    pytest.fail(f"no Python {version} is installed: this lane needs 3.12 and 3.13 beside the Python that runs it")


def requirements() -> list[str]:
    """Of the package with Slurm's extra and the environments', of its workers, and of the tests."""

    def listed(extra: str) -> list[str]:
        command = [sys.executable, CHECKOUT / "scripts" / "_requirements.py", "project", extra]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()

    needed = listed("slurm,math,reasoning-gym,textarena")  # the presets name environments that check their packages
    tools = [line for line in listed("cpu,dev") if re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] in TOOLS]
    return list(dict.fromkeys([*needed, *tools]))


def outside() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"WANDB_MODE": "disabled"}


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + TEST_S)
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_everything_without_torch_on(version: str, tmp_path: Path) -> None:
    subprocess.run([find(version), "-m", "venv", tmp_path / "venv"], check=True, timeout=INSTALL_S)
    python = tmp_path / "venv" / "bin" / "python"
    (tmp_path / "requirements.txt").write_text("\n".join(requirements()))
    subprocess.run([python, "-m", "pip", "install", "-qq", "-r", tmp_path / "requirements.txt"], check=True, timeout=INSTALL_S)
    command = [python, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *WITHOUT, *PARTS]
    tests = subprocess.run(command, cwd=CHECKOUT, env=outside(), capture_output=True, text=True, timeout=TEST_S, check=False)
    assert tests.returncode == 0, tests.stdout[-6000:] + tests.stderr[-3000:]
