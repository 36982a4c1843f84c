"""The documentation as a site: every page has its place, links lead where they lead in the checkout, nothing is fetched."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.product import ROOT, load_script

BUILD_S = 300
FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\">]*|url\([\"']?https?://[^)]*"
)
FIRST = (
    "index.md",
    "first_hour.md",
    "own_data.md",
    "own_environment.md",
    "own_algorithm.md",
    "why_not.md",
    "troubleshooting.md",
)
"""What a newcomer reads, in this order."""


class LooseLoader(yaml.SafeLoader):
    """mkdocs.yml names a function of Python's, which is nothing to us."""


LooseLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def settings() -> dict[str, Any]:
    loaded = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), LooseLoader)
    assert isinstance(loaded, dict)
    return loaded


def pages_of(nav: Any) -> Iterator[str]:
    """Of a navigation, in order."""
    for entry in nav:
        for place in entry.values():
            yield from [place] if isinstance(place, str) else pages_of(place)


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return load_script(ROOT / "scripts" / "site_hooks.py")


def test_every_page_for_users_is_in_the_navigation_once(hooks: ModuleType) -> None:
    listed = list(pages_of(settings()["nav"]))
    assert tuple(listed[: len(FIRST)]) == FIRST
    assert [page for page, count in Counter(listed).items() if count > 1] == []
    users = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("*.md")}
    users |= {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs" / "settings").glob("*.md")}
    assert users - set(listed) == set(), "mkdocs.yml does not list them"
    assert [page for page in listed if not (ROOT / hooks.checkout_path(page)).is_file()] == []


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("README.md", "[a](docs/flow.md#x)", "[a](flow.md#x)"),
        ("README.md", "[a](CHANGELOG.md)", "[a](CHANGELOG.md)"),
        ("docs/flow.md", "[a](../CHANGELOG.md)", "[a](CHANGELOG.md)"),
        ("docs/flow.md", "[a](../README.md)", "[a](index.md)"),
        ("docs/flow.md", "[a](trainer.md) [b](#c) [d](https://e.f)", "[a](trainer.md) [b](#c) [d](https://e.f)"),
        ("docs/settings/run.md", "[a](../flow.md)", "[a](../flow.md)"),
        ("docs/flow.md", "[a](../benchmarks/results/flow.md)", "[a](benchmarks/results/flow.md)"),
        ("CONTRIBUTING.md", "[a](docs/testing.md)", "[a](testing.md)"),
        ("README.md", "[a](docs/decisions/)", "a"),
        ("docs/flow.md", "[a](gone.md)", "[a](gone.md)"),
        ("docs/flow.md", "```\n[a](../CHANGELOG.md)\n```", "```\n[a](../CHANGELOG.md)\n```"),
    ],
)
def test_a_link_of_the_checkout_becomes_the_sites(hooks: ModuleType, page: str, link: str, there: str) -> None:
    """One to nothing stays, so that mkdocs tells of it."""
    assert hooks.rewrite(page, link) == there


def test_what_pages_link_to_comes_along(hooks: ModuleType) -> None:
    reached = hooks.list_reachable()
    assert {"README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "examples/one_process.py"} <= set(reached)
    assert len(reached) == len(set(reached))
    assert all((ROOT / path).is_file() for path in reached)


@pytest.mark.slow
@pytest.mark.timeout(BUILD_S + 60)
def test_it_is_built_without_a_warning_and_fetches_nothing_when_read(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site is not built: mkdocs-material, of the extra docs, is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    made = [*(tmp_path / "site").rglob("*.html"), *(tmp_path / "site").rglob("*.css")]
    assert len(made) > 60
    fetched = {str(path.relative_to(tmp_path)): FETCHED.findall(path.read_text(encoding="utf-8")) for path in made}
    assert {page: found for page, found in fetched.items() if found} == {}
    first = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="first_hour.html"' in first
    assert 'href="docs/' not in first


def test_what_would_be_fetched_is_seen() -> None:
    page = '<link rel="stylesheet" href="https://a.b/c.css"><script src="//d.e/f.js"></script><a href="https://g.h">i</a>'
    assert len(FETCHED.findall(page + '<link href="assets/a.css"><style>@font-face{src:url(https://j.k)}</style>')) == 3
