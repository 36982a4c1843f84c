"""Numbers that describe a step's rollouts."""

from __future__ import annotations

import math

import pytest

from telescope.maths.summaries import gini, mean, pool_means, summary


def test_the_order_in_which_rollouts_end_changes_no_digit_of_what_is_said_of_them():
    """Added up as they come, 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in their last digit."""
    forth, back = [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]
    assert sum(forth) != sum(back)
    assert summary(forth) == summary(back)
    assert mean(forth) == mean(back) == summary(back)["mean"] == pytest.approx(0.2)
    assert summary(back)["std"] == pytest.approx((0.02 / 3) ** 0.5)
    assert (summary(back)["min"], summary(back)["max"]) == (0.1, 0.3)
    assert summary([]) == {}


def test_no_finite_number_is_too_large_to_be_described():
    largest = 1.7e308
    for values in ([largest, 1.0], [largest, -largest], [largest] * 5, [-largest, 1.0, largest, largest], [5e-324, 1e-300]):
        assert all(map(math.isfinite, summary(values).values()))
        assert mean(values) == summary(values)["mean"]
        assert 0 <= gini(values) < 2
        assert math.isfinite(pool_means(values, range(1, len(values) + 1)))
    assert summary([largest, largest])["mean"] == largest
    assert gini([1.2e308, 1.0]) == pytest.approx(0.5)
    assert pool_means([1.0, 0.0], [3, 1]) == 0.75
    assert [mean([2.0**700, 0.0]), summary([2.0**700, 0.0])["std"]] == [2.0**699] * 2
