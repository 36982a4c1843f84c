"""A number over a run as one line of text: buckets, blocks, and what its ends say."""

from __future__ import annotations

import math

import pytest

from telescope.cli.show.curves import ASCII_BLOCKS, BUCKETS, bucket, draw, make_curve


def test_values_are_put_into_buckets_whose_sizes_differ_by_one_at_most():
    assert bucket([1, 3, 5], 2) == [1, 4]
    assert bucket([1, 2], 60) == [1, 2]
    assert bucket([], 60) == []
    assert len(bucket(list(range(1000)), 60)) == 60


def test_a_curve_goes_from_the_lowest_block_to_the_highest():
    assert draw([0, 1, 2, 3, 4, 5, 6, 7], 60) == "▁▂▃▄▅▆▇█"
    assert draw([0, 1, 2, 3, 4, 5, 6, 7], 4) == "▁▃▆█"
    assert draw([0, 7], 60, ASCII_BLOCKS) == "_#"
    assert draw([0.3, 0.3, 0.3], 60) == "▄▄▄"
    assert draw([], 60) == ""


def test_first_and_last_are_means_of_five_values_as_in_the_summary():
    curve = make_curve("x", [0, 1, 2, 3, 4, 100, 10, 11, 12, 13, 14])
    assert curve is not None
    assert (curve.first, curve.last, curve.low, curve.high, curve.count) == (2, 12, 0, 100, 11)
    assert curve.error == pytest.approx(1.0)  # the square root of (2.5 + 2.5) / 5


def test_a_value_counts_by_the_rollouts_that_it_is_the_mean_of():
    curve = make_curve("x", [0, 0, 0, 1, 0, 0], [8, 8, 8, 1, 8, 8])
    assert curve is not None
    assert (curve.first, curve.last, curve.high) == (0, pytest.approx(1 / 17), 1)
    alike, doubled = make_curve("x", [1, 2, 4, 8]), make_curve("x", [1, 2, 4, 8], [2, 2, 2, 2])
    assert alike == doubled
    assert make_curve("x", [1.0], [0.0]) is None


def test_no_value_is_at_both_ends_of_a_short_curve():
    curve = make_curve("x", [1, 2, 3])
    assert curve is not None
    assert (curve.first, curve.last, curve.error) == (1, 3, None)


def test_values_that_are_not_finite_are_left_out():
    assert make_curve("x", [math.nan, math.inf]) is None
    curve = make_curve("x", [math.nan, 2.0])
    assert curve is not None
    assert curve.points == (2.0,)


def test_the_best_is_a_mean_of_neighbours_and_not_one_lucky_value():
    curve = make_curve("x", [0, 0, 0, 0, 10, 0, 0, 0, 0, 0])
    assert curve is not None
    assert curve.best == pytest.approx(2.0)
    long = make_curve("x", [0.0] * 590 + [1.0] * 10)
    assert long is not None
    assert (len(long.points), long.best) == (BUCKETS, 1.0)


def test_numbers_whose_squares_would_overflow_are_drawn_too():
    assert draw([-1e308, 1e308, 0], 60) == "▁█▅"
    for values in ([1e200, 0.0, 1.0, 1e200], [1.7e308, 1.7e308, -1.7e308, 0.5]):
        for weights in (None, [1e308, 1.0, 5e-324, 1.0], [1e308] * 4):
            curve = make_curve("x", values, weights)
            assert curve is not None
            assert curve.error is None or math.isfinite(curve.error)
            assert math.isfinite(curve.best)
            assert len(draw(curve.points, 60)) == len(curve.points)
