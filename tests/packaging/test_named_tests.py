"""Tests that the documentation names are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"\btest_\w+(?![\w.]*\.py)\b")


def test_every_test_that_the_docs_name_is_there() -> None:
    defined = {name for file in ROOT.glob("tests/**/*.py") for name in re.findall(r"def (test_\w+)\(", file.read_text())}
    files = {file.stem for file in ROOT.glob("tests/**/*.py")}
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    named = set(NAMED.findall(text)) - files
    assert len(named) > 15
    assert named <= defined, sorted(named - defined)
