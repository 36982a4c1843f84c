"""Two models on the same prompts: the mean difference, and how likely one as large is where the models are alike.

Prompts are what is counted, as in evals.py. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from telescope.maths.evals import interval, standard_error

_ROUNDING = 1e-12
"""Of the largest reward: differences of so much are none."""
_TINY = 1e-300
_CLOSE = 1e-15
_TERMS = 10_000


@dataclass(frozen=True)
class PairedDifference:
    """Of the second less the first. `error`, `low`, `high` (the 95 % interval) and `p` are None for fewer than two prompts.

    Where all prompts differ by the same, the error is 0 and says nothing of other prompts: there is no interval, and no p
    unless they are alike."""

    prompts: int
    mean: float
    error: float | None
    low: float | None
    high: float | None
    p: float | None
    """Two-sided, of the paired t test; 1 where no prompt differs."""


def compare_paired(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """`first`, `second`: the mean of each prompt's samples, [prompts], in the same order. Raises ValueError for none, or for
    different numbers of them."""
    differences = [two - one for one, two in zip(first, second, strict=True)]
    if not differences:
        raise ValueError("no prompts: there is nothing to compare")
    count, mean = len(differences), math.fsum(differences) / len(differences)
    error = standard_error(differences)
    if error is None:
        return PairedDifference(count, mean, None, None, None, None)
    size = max(map(abs, (*first, *second)))
    if max(differences) - min(differences) <= _ROUNDING * size:
        alike = abs(mean) <= _ROUNDING * size
        return PairedDifference(count, 0.0 if alike else mean, 0.0, None, None, 1.0 if alike else None)
    low, high = interval(mean, error, count)
    return PairedDifference(count, mean, error, low, high, two_sided_t(mean / error, count - 1))


def two_sided_t(value: float, freedom: int) -> float:
    """Chance that Student's t with `freedom` degrees is as far from 0 as `value`: I_x(f/2, 1/2) with x = f / (f + t²)
    (Abramowitz and Stegun 26.7.1, 26.5.27). Raises ValueError for no degree of freedom."""
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom: a test needs two prompts at least")
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + value * value))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (Abramowitz and Stegun 26.5.8), evaluated
    as Lentz does."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):  # beyond it the fraction of the other tail is the one that converges fast
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    value, c, d = 1.0, 1.0, 0.0
    for term in range(_TERMS):
        m = term // 2
        if term == 0:
            share = 1.0
        elif term % 2 == 0:
            share = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            share = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1.0 / _away_from_zero(1.0 + share * d)
        c = _away_from_zero(1.0 + share / c)
        value *= c * d
        if abs(1.0 - c * d) < _CLOSE:
            break
    return front * (value - 1.0)


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def exact_sign_test(first_alone: int, second_alone: int) -> float:
    """Two-sided p of McNemar's test in its exact form: of the prompts that one model passes and the other does not, each is as
    likely to be the one's as the other's (McNemar 1947, Psychometrika 12:153; the binomial's tail, doubled). 1 where there are
    none. Raises ValueError for negative numbers."""
    if min(first_alone, second_alone) < 0:
        raise ValueError(f"{first_alone} and {second_alone} prompts: numbers of prompts are not negative")
    count = first_alone + second_alone
    tail = sum(math.comb(count, passed) for passed in range(min(first_alone, second_alone) + 1))
    return float(min(1.0, 2.0 * (tail / 2**count)))
