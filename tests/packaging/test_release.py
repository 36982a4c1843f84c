"""scripts/release: when a checkout is ready, and that what it builds works when installed, on every Python that is allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from tests.packaging.test_pythons import find, outside
from tests.product import load_script

CHECKOUT = Path(__file__).resolve().parents[2]
BUILD_S, INSTALL_S, RUN_S = 300, 900, 300
NEED_TORCH = ("torch", "peft")
"""Of the extra `cpu`, what a run with fake engine and backend does without: not every Python has a CPU build of torch."""


@pytest.fixture
def release() -> ModuleType:
    return load_script(CHECKOUT / "scripts" / "_release.py")


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false")
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One that is ready."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "telescope-rl"\nversion = "0.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n# 0.2.0 (2027-01-31)\n\n# 0.1.0\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def test_a_checkout_is_ready_whose_files_agree_on_the_version_and_are_committed(release: ModuleType, checkout: Path) -> None:
    assert release.list_obstacles(checkout) == []


def test_each_obstacle_is_told_with_its_remedy(release: ModuleType, checkout: Path) -> None:
    (checkout / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.1.0\n")
    (checkout / "CHANGELOG.md").write_text("# Changes\n\n# 0.2.0 (unreleased)\n")
    git(checkout, "tag", "v0.2.0")
    assert release.list_obstacles(checkout) == [
        "CITATION.cff says version 0.1.0, pyproject.toml 0.2.0: make them equal",
        "CHANGELOG.md calls 0.2.0 unreleased: put the date there",
        "2 files are changed or new and not committed: commit or remove them",
        "the tag v0.2.0 is there already: raise the version in pyproject.toml",
    ]
    (checkout / "CHANGELOG.md").write_text("# Changes\n\n# 0.2\n")
    assert "CHANGELOG.md has no heading `# 0.2.0`: write what changes with it" in release.list_obstacles(checkout)


def test_what_to_type_uploads_what_was_made(release: ModuleType) -> None:
    said = release.tell_how_to_publish([Path("dist/a.tar.gz"), Path("dist/b.whl")], "0.2.0")
    assert said.splitlines()[0] == "Nothing is tagged or uploaded. To publish it:"
    assert "git tag --sign v0.2.0" in said
    assert said.endswith("python -m twine upload dist/a.tar.gz dist/b.whl")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Source archive and wheel, as scripts/release makes them of this checkout."""
    pytest.importorskip("twine", reason="twine is not installed: it is in the extra dev")
    out = tmp_path_factory.mktemp("dist")
    told = subprocess.run(
        [CHECKOUT / "scripts" / "release", "--rehearse", "--out", out],
        env={**os.environ, "TELESCOPE_PYTHON": sys.executable}, capture_output=True, text=True, timeout=BUILD_S, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("PASSED") == 2  # twine's word on each
    (source,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return source, wheel


@pytest.mark.slow
@pytest.mark.timeout(BUILD_S + 60)
def test_both_archives_hold_the_same_package_with_presets_and_models(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[0]) as source, zipfile.ZipFile(archives[1]) as wheel:
        sources = {name.partition("/")[2] for name in source.getnames()}
        package = {name for name in wheel.namelist() if name.startswith("telescope/")}
    assert package == {name for name in sources if name.startswith("telescope/")}
    assert {"telescope/_conf/run.yaml", "telescope/_launch/shim.py", "telescope/embedded/tiny/model.safetensors"} <= package
    assert {"LICENSE", "README.md", "pyproject.toml"} <= sources


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + 3 * RUN_S)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_it_is_installed_and_runs_outside_the_checkout_on(version: str, archives: tuple[Path, Path], tmp_path: Path) -> None:
    """The wheel with what its metadata asks for: real processes, sockets and files. Then the source archive in its place."""
    subprocess.run([find(version), "-m", "venv", tmp_path / "venv"], check=True, timeout=RUN_S)
    pip = [tmp_path / "venv" / "bin" / "python", "-m", "pip", "install", "-qq"]
    extra = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cpu"]
    without_torch = [line for line in extra if Requirement(line).name not in NEED_TORCH]
    subprocess.run([*pip, archives[1], *without_torch], check=True, timeout=INSTALL_S)
    place = tmp_path / "elsewhere"
    place.mkdir()

    def telescope(*arguments: str) -> str:
        done = subprocess.run(
            [tmp_path / "venv" / "bin" / "telescope", *arguments],
            cwd=place, env=outside(), capture_output=True, text=True, timeout=RUN_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    own = archives[1].name.split("-")[1]
    assert telescope("--version").startswith(f"Telescope {own}, Hydra ")
    telescope("run", "experiment=fake", "cluster.device=cpu", "number_of_steps=2", "run_dir=a")
    summary = json.loads((place / "a" / "summary.json").read_text())
    assert (summary["steps"], summary["ok"], summary["versions"]["telescope-rl"]) == (2, True, own)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", archives[0]], check=True, timeout=INSTALL_S)
    assert ": valid, hash " in telescope("check", "experiment=fake", "cluster.device=cpu")
