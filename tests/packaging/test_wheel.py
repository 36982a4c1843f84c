"""The wheel, built from this checkout and used from another folder, by an interpreter that does not see the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 100


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as an installer does: the source archive first, the wheel from that."""
    folder = tmp_path_factory.mktemp("dist")
    built = call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, CHECKOUT, cwd=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel installed, that borrows the dependencies of ours and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    assert call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder).returncode == 0
    interpreter = folder / "bin" / "python"
    answer = call(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    packages = Path(answer.stdout.strip())
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)  # what an installer does with a wheel that is all purelib
    return interpreter


def test_the_wheel_installs_one_top_level_name_and_all_that_belongs_to_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"telescope"}
    for here, there in ((CHECKOUT / "conf", "telescope/_conf"), (CHECKOUT / "launch", "telescope/_launch")):
        expected = {
            f"{there}/{path.relative_to(here)}"
            for path in here.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert expected
        assert {name for name in names if name.startswith(there + "/")} == expected
    models = {name for name in names if name.startswith("telescope/embedded/") and name.endswith(".safetensors")}
    assert models == {
        f"telescope/embedded/{path.parent.name}/{path.name}"
        for path in (CHECKOUT / "telescope/embedded").glob("*/*.safetensors")
    }
    assert models


def test_it_is_the_wheel_that_answers(python: Path, tmp_path: Path) -> None:
    answer = call(python, "-c", "import telescope; print(telescope.__file__)", cwd=tmp_path)
    assert answer.stdout.strip().startswith(str(python.parent.parent))


def test_help_outside_the_checkout(python: Path, tmp_path: Path) -> None:
    answer = call(python, "-m", "telescope.run", "--help", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "algorithm" in answer.stdout


def test_presets_are_found_outside_the_checkout(python: Path, tmp_path: Path) -> None:
    answer = call(python, "-m", "telescope.run", "--cfg", "job", "algorithm=rloo", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "number_of_steps: 60" in answer.stdout
    assert list(tmp_path.iterdir()) == []  # nothing is written


def test_the_plan_outside_the_checkout(python: Path, tmp_path: Path) -> None:
    answer = call(python, "-m", "telescope", "plan", "cluster.device=cpu", "orchestrator.max_async_rollout=0", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "max_async_rollout=0 is synchronous" in answer.stdout
    assert "  server-0      1 thread\n" in answer.stdout
