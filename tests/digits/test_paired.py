"""Paired tests of two models, against tables and against counting."""

from __future__ import annotations

import itertools
import math

import pytest

from telescope.maths.paired import compare_paired, exact_sign_test, incomplete_beta, two_sided_t


@pytest.mark.parametrize(
    ("value", "freedom", "p"),
    [
        (12.7062047, 1, 0.05),  # the two-sided 5 % points of Student's t in Abramowitz and Stegun, table 26.10
        (4.3026527, 2, 0.05),
        (2.2281389, 10, 0.05),
        (-2.2281389, 10, 0.05),
        (1.9839715, 100, 0.05),
        (3.1692727, 10, 0.01),
        (1.0, 1, 0.5),
        (0.0, 7, 1.0),
    ],
)
def test_chances_of_students_t_are_those_of_the_table(value: float, freedom: int, p: float):
    assert two_sided_t(value, freedom) == pytest.approx(p, abs=1e-7)


def test_with_one_degree_of_freedom_it_is_cauchys_arc():
    for value in (0.1, 0.7, 1.0, 3.0, 40.0):
        assert two_sided_t(value, 1) == pytest.approx(1 - 2 * math.atan(value) / math.pi, rel=1e-12)


def test_with_many_degrees_of_freedom_it_is_the_normal_one():
    assert two_sided_t(1.959963985, 10**7) == pytest.approx(0.05, abs=1e-6)


def test_incomplete_beta_is_the_binomials_tail():
    tail = sum(math.comb(9, k) * 0.3**k * 0.7 ** (9 - k) for k in range(4, 10))
    assert incomplete_beta(4, 6, 0.3) == pytest.approx(tail, rel=1e-12)
    assert (incomplete_beta(2, 3, 0.0), incomplete_beta(2, 3, 1.0)) == (0.0, 1.0)


def test_mean_difference_error_and_interval():
    found = compare_paired([0.0, 0.5, 1.0], [0.5, 0.5, 2.0])  # differences 0.5, 0, 1
    assert (found.prompts, found.mean) == (3, 0.5)
    assert found.error == pytest.approx(0.5 / math.sqrt(3), rel=1e-12)
    assert found.high == pytest.approx(0.5 + 4.3026527 * 0.5 / math.sqrt(3), rel=1e-6)
    assert found.p == pytest.approx(two_sided_t(math.sqrt(3), 2), rel=1e-12)
    assert found.p == pytest.approx(0.2254033, abs=1e-7)


def test_alike_prompts_have_no_difference_and_one_prompt_has_no_test():
    same = compare_paired([0.25, 1.0], [0.25, 1.0])
    assert (same.mean, same.error, same.p) == (0.0, 0.0, 1.0)
    one = compare_paired([0.25], [0.75])
    assert (one.prompts, one.mean, one.error, one.p) == (1, 0.5, None, None)
    with pytest.raises(ValueError, match="nothing to compare"):
        compare_paired([], [])


@pytest.mark.parametrize(
    ("first", "second"), [([0.0, 0.0], [1.0, 1.0]), ([0.2, 0.3, 1.0], [0.3, 0.4, 1.1])], ids=["exactly", "but for rounding"]
)
def test_prompts_that_all_differ_by_the_same_have_no_spread_to_test(first: list[float], second: list[float]):
    found = compare_paired(first, second)
    assert found.mean == pytest.approx(second[0] - first[0], rel=1e-12)
    assert (found.error, found.low, found.high, found.p) == (0.0, None, None, None)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 5), (5, 0), (3, 10), (5, 5), (2, 3), (1, 7)])
def test_sign_test_counts_all_outcomes_as_far_from_even(first: int, second: int):
    count = first + second
    outcomes = list(itertools.product((0, 1), repeat=count))
    far = sum(abs(2 * sum(one) - count) >= abs(first - second) for one in outcomes)
    assert exact_sign_test(first, second) == pytest.approx(far / len(outcomes), abs=1e-12)


def test_sign_test_of_thousands_of_prompts_is_a_number():
    assert exact_sign_test(3000, 3000) == 1.0
    assert 0.0 <= exact_sign_test(100, 3000) < 1e-300
