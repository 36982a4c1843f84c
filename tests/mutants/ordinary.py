"""A pytest plug-in for the tests that judge a mutant: leaves out those written for mutants, and writes down which one fails.

A test that was written to notice a mutant proves nothing about the others. It is known by what it says alone: it lies in this
folder, or it or its module's docstring speaks of mutants.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

FAILED = "MUTANTS_FAILED"
"""The environment variable with the path of the file that the first failed test's id is written to."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    written = [item for item in items if speaks_of_mutants(item)]
    if written:
        config.hook.pytest_deselected(items=written)
        items[:] = [item for item in items if item not in written]


def speaks_of_mutants(item: pytest.Item) -> bool:
    function, module = getattr(item, "function", None), getattr(item, "module", None)
    source = inspect.getsource(function) if function is not None else ""
    return any("mutant" in said.lower() for said in (item.nodeid, source, getattr(module, "__doc__", None) or ""))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Only a test's own failure counts: a fixture that fails has tested nothing."""
    told = Path(os.environ[FAILED])
    if report.when == "call" and report.failed and not told.exists():
        told.write_text(report.nodeid, encoding="utf-8")
