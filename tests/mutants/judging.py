"""Plants one mutant in a copy of the checkout and asks the nearest tests. The checkout itself is never changed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.ordinary import FAILED
from tests.mutants.planting import NoLongerApplies, find, planted
from tests.mutants.table import Mutant
from tests.product import ROOT

COPIED = ("pyproject.toml", "conf", "launch", "telescope", "tests")
LIMIT_S = 300.0
"""For the nearest tests of one mutant; they need seconds."""


class NotCaught(Exception):
    """No ordinary test notices the mutant, or none that is good without it; the sentence says which."""


def catch(mutant: Mutant, root: Path = ROOT) -> str:
    """The id of the first ordinary test that fails with the mutant, and only with it. `root`: the checkout.

    Raises `NoLongerApplies`, or `NotCaught`.
    """
    for path in mutant.nearest:
        if path.startswith("tests/mutants"):
            raise NotCaught(f"{path} was written for mutants: name an ordinary test file")
        if not (root / path).exists():
            raise NoLongerApplies(f"{path}, whose tests should notice, is not there: name the file that has them now")
    find(root, mutant)  # before the copy, which takes a moment
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder, "checkout")
        copy_checkout(root, copy)
        place = find(copy, mutant)
        text = place.file.read_text(encoding="utf-8")
        _write(place.file, planted(text, place, mutant))
        failed, said = first_failure(copy, mutant.nearest)
        if not failed:
            raise NotCaught(f"no test of {', '.join(mutant.nearest)} fails with it:\n{said}")
        _write(place.file, text)
        again, said = first_failure(copy, (failed,))
        if again:
            raise NotCaught(f"{failed} fails without it too:\n{said}")
    return failed


def copy_checkout(root: Path, copy: Path) -> None:
    """What the product and its tests need."""
    copy.mkdir()
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True)
        elif source.exists():
            shutil.copy2(source, copy / name)


def first_failure(checkout: Path, tests: tuple[str, ...]) -> tuple[str, str]:
    """(id of the first test that fails, or nothing where all are good; the end of what pytest said). Raises `NotCaught` where
    pytest itself breaks off, e.g. because a module can't be imported: then no test has judged anything."""
    told = checkout.parent / "failed"
    told.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow"),
        *("-p", "no:cacheprovider", "-p", "tests.mutants.ordinary", *tests),
    ]
    environment = {**os.environ, "PYTHONPATH": str(checkout), FAILED: str(told)}
    try:
        answer = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotCaught(f"{', '.join(tests)} did not end within {LIMIT_S:g} s") from error
    said = (answer.stdout + answer.stderr)[-2000:]
    failed = told.read_text(encoding="utf-8") if told.exists() else ""
    if answer.returncode not in (0, 1) or (answer.returncode == 1) != bool(failed):
        raise NotCaught(f"{', '.join(tests)} judged nothing, pytest ended with exit code {answer.returncode}:\n{said}")
    return failed, said


def _write(file: Path, text: str) -> None:
    """Two versions of one size within a second would pass for the same as compiled code."""
    file.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
