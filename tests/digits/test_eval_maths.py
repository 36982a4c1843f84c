"""pass@k, pass^k and intervals of evals against counting by hand and against tables."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from telescope.maths.evals import interval, pass_at_k, pass_power_k, share_interval, standard_error, student_t


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_and_pass_power_k_are_what_counting_every_draw_gives(samples: int) -> None:
    for passed in range(samples + 1):
        right = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            draws = list(combinations(right, k))
            assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)
            assert pass_power_k(samples, passed, k) == pytest.approx(sum(map(all, draws)) / len(draws), abs=1e-12)


def test_large_counts_neither_overflow_nor_lose_their_digits() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01, abs=1e-12)
    assert pass_power_k(10_000, 9_999, 100) == pytest.approx(0.99, abs=1e-12)


def test_they_are_unbiased_for_a_model_that_is_right_with_a_known_chance() -> None:
    n, k, chance = 6, 3, 0.3
    weights = [math.comb(n, c) * chance**c * (1 - chance) ** (n - c) for c in range(n + 1)]
    some = sum(weight * pass_at_k(n, c, k) for c, weight in enumerate(weights))
    every = sum(weight * pass_power_k(n, c, k) for c, weight in enumerate(weights))
    assert some == pytest.approx(1 - (1 - chance) ** k, abs=1e-12)
    assert every == pytest.approx(chance**k, abs=1e-12)


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_what_cannot_be_drawn_is_refused(samples: int, passed: int, k: int) -> None:
    for estimate in (pass_at_k, pass_power_k):
        with pytest.raises(ValueError, match=r"is not from 1 to|cannot have passed"):
            estimate(samples, passed, k)


def test_the_error_is_the_one_clustered_by_prompt() -> None:
    """The cluster-robust formula for a mean, with its correction for few clusters, written out over all samples."""
    rewards = np.random.default_rng(3).random((7, 4)) + np.arange(7)[:, None]
    residuals = (rewards - rewards.mean()).sum(axis=1)
    robust = math.sqrt(7 / 6 * (residuals**2).sum()) / rewards.size
    assert standard_error(list(rewards.mean(axis=1))) == pytest.approx(robust, rel=1e-12)
    assert standard_error([0.5]) is None


@pytest.mark.parametrize(
    ("freedom", "table"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (30, 2.0423), (100, 1.9840)],
)
def test_intervals_use_students_t(freedom: int, table: float) -> None:
    assert student_t(0.975, freedom) == pytest.approx(table, abs=0.006)
    low, high = interval(1.0, 0.5, freedom + 1)
    assert high - low == pytest.approx(table, abs=0.006)
    assert (high + low) / 2 == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("right", "prompts", "low", "high"), [(81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]
)
def test_intervals_of_a_share_are_wilsons(right: int, prompts: int, low: float, high: float) -> None:
    """Of Newcombe 1998, table I, method 3."""
    answers = [1.0] * right + [0.0] * (prompts - right)
    error = standard_error(answers)
    assert error is not None
    assert share_interval(right / prompts, error, prompts, 1) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_samples_of_a_prompt_narrow_the_interval_of_a_share_as_far_as_they_differ() -> None:
    def width(error: float) -> float:
        low, high = share_interval(0.5, error, 25, 4)
        return high - low

    assert width(0.05) == width(0.01) < width(0.07) < width(0.1) == width(0.2)  # n from 100 samples down to 25 prompts


def test_one_prompt_has_no_interval() -> None:
    with pytest.raises(ValueError, match="two prompts"):
        interval(1.0, 0.5, 1)
