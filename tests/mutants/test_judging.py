"""What becomes of a mutant, in a checkout of one function and its tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutants import ordinary
from tests.mutants.judging import NotCaught, catch
from tests.mutants.planting import NoLongerApplies
from tests.mutants.table import Mutant

SOURCE = """
class Bound:
    def holds(self, count):
        return count < 3
"""
GOOD = "from telescope.bound import Bound\n\n\ndef test_three_are_too_many():\n    assert not Bound().holds(3)\n"
BLIND = "from telescope.bound import Bound\n\n\ndef test_two_are_fine():\n    assert Bound().holds(2)\n"
WRITTEN = GOOD.replace("test_three_are_too_many", "test_the_mutant_is_noticed")
BROKEN = "def test_that_always_fails():\n    assert 1 == 2\n"

ONE_MORE = Mutant("bound: one more", "Bound.holds", "count < 3", "count <= 3", ("tests/test_bound.py",))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "telescope").mkdir(parents=True)
    (root / "tests" / "mutants").mkdir(parents=True)
    for package in ("telescope", "tests", "tests/mutants"):
        (root / package / "__init__.py").touch()
    (root / "telescope" / "bound.py").write_text(SOURCE)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: slow"]\n')
    shutil.copy(ordinary.__file__, root / "tests" / "mutants")
    return root


def test_a_mutant_that_an_ordinary_test_notices_is_caught_and_the_checkout_is_left_alone(checkout: Path):
    (checkout / "tests" / "test_bound.py").write_text(BLIND + GOOD)
    assert catch(ONE_MORE, checkout) == "tests/test_bound.py::test_three_are_too_many"
    assert (checkout / "telescope" / "bound.py").read_text() == SOURCE


@pytest.mark.parametrize(
    ("tests", "sentence"),
    [
        (BLIND, "no test of tests/test_bound.py fails with it"),
        (BLIND + WRITTEN, "no test of tests/test_bound.py fails with it"),
        ('"""Written for mutants."""\n' + GOOD, "tests/test_bound.py judged nothing"),
        (BROKEN, "test_that_always_fails fails without it too"),
        ("import nothing_of_this_name\n", "tests/test_bound.py judged nothing"),
    ],
    ids=["nobody looks", "only a test written for it", "only a module written for it", "failing anyway", "not importable"],
)
def test_a_mutant_is_not_caught_where(checkout: Path, tests: str, sentence: str):
    (checkout / "tests" / "test_bound.py").write_text(tests)
    with pytest.raises(NotCaught, match=sentence):
        catch(ONE_MORE, checkout)


@pytest.mark.parametrize(
    ("where", "old", "new", "sentence"),
    [
        ("Bound.fits", "count < 3", "count < 4", "no product file defines Bound.fits"),
        ("ound.holds", "count < 3", "count < 4", "no product file defines ound.holds"),
        ("holds", "count < 4", "count < 5", r"holds \(telescope/bound.py\) does not hold 'count < 4'"),
        ("Bound", "count", "self", "holds 'count' 2 times"),
        ("holds", "count < 3", "count <", "is not Python"),
        ("holds", "count < 3", "(count < 3)", "is the same program"),
    ],
)
def test_a_mutant_that_no_longer_applies_says_why(checkout: Path, where: str, old: str, new: str, sentence: str):
    (checkout / "tests" / "test_bound.py").write_text(GOOD)
    with pytest.raises(NoLongerApplies, match=sentence):
        catch(Mutant("any", where, old, new, ("tests/test_bound.py",)), checkout)


def test_a_mutant_asks_only_test_files_that_are_there_and_were_not_written_for_it(checkout: Path):
    with pytest.raises(NoLongerApplies, match=r"tests/test_gone\.py, whose tests should notice, is not there"):
        catch(Mutant("any", "Bound.holds", "<", ">", ("tests/test_gone.py",)), checkout)
    with pytest.raises(NotCaught, match="was written for mutants"):
        catch(Mutant("any", "Bound.holds", "<", ">", ("tests/mutants/test_mutants.py",)), checkout)


def test_a_line_break_counts_as_a_space(checkout: Path):
    (checkout / "telescope" / "bound.py").write_text(
        SOURCE.replace("count < 3", "(\n            count\n            < 3\n        )")
    )
    (checkout / "tests" / "test_bound.py").write_text(GOOD)
    assert catch(ONE_MORE, checkout) == "tests/test_bound.py::test_three_are_too_many"
