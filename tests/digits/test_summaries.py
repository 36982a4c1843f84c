"""Numbers that describe a step's rollouts."""

from __future__ import annotations

import pytest

from telescope.maths.summaries import mean, summary


def test_the_order_in_which_rollouts_end_changes_no_digit_of_what_is_said_of_them():
    """Added up as they come, 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in their last digit."""
    forth, back = [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]
    assert sum(forth) != sum(back)
    assert summary(forth) == summary(back)
    assert mean(forth) == mean(back) == summary(back)["mean"] == pytest.approx(0.2)
    assert summary(back)["std"] == pytest.approx((0.02 / 3) ** 0.5)
    assert (summary(back)["min"], summary(back)["max"]) == (0.1, 0.3)
    assert summary([]) == {}
