"""Each mutant of the table is noticed by an ordinary test: one test a mutant, some ten seconds each."""

from __future__ import annotations

import pytest

from tests.mutants.judging import catch
from tests.mutants.planting import NoLongerApplies, find, planted
from tests.mutants.table import MUTANTS, Mutant
from tests.product import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)  # twice the limit of one pytest call, and what a copy takes
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_an_ordinary_test_notices(mutant: Mutant):
    print(catch(mutant))


def test_every_mutant_has_one_place_in_the_product():
    lost = []
    for mutant in MUTANTS:
        try:
            place = find(ROOT, mutant)
            planted(place.file.read_text(encoding="utf-8"), place, mutant)
        except NoLongerApplies as error:
            lost.append(f"{mutant.name}: {error}")
    assert not lost, "\n".join(["in tests/mutants/table.py:", *lost])


def test_mutants_have_different_names():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 22
