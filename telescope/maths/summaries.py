"""Numbers that describe a step's rollouts: mean and spread, percentiles, inequality within groups. Numpy only.

All take plain sequences, return floats, and give an empty result for no values rather than a made-up 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

Values = Sequence[float] | np.ndarray

METRIC_LIMIT = 1e12
"""Larger metrics of a rollout are mistakes: one alone would be all of a mean, and no digit of the others would be left."""
_HUGE, _SCALE = 2.0**400, 2.0**600
"""Beyond `_HUGE` sums of squares may overflow; then all is computed on numbers smaller by `_SCALE`, which no digit hinders."""


def summary(values: Values) -> dict[str, float]:
    """`mean`, `std` (over exactly these values, ddof 0), `min` and `max`; `{}` for no values. The same to the last digit in
    whatever order they come: rollouts end when they end, and a run that goes on must say what it would have said."""
    known = np.array(values, np.float64)
    if not len(known):
        return {}
    known.sort()
    scale = _find_scale(known[0], known[-1])
    average = float(np.add.reduce(known / scale)) / len(known)
    apart = known / scale - average
    return {
        "mean": average * scale,
        "std": math.sqrt(float(np.add.reduce(apart * apart)) / len(known)) * scale,
        "min": float(known[0]),
        "max": float(known[-1]),
    }


def mean(values: Values) -> float:
    """To the last digit whatever their order; of at least one."""
    known = np.array(values, np.float64)
    known.sort()
    scale = _find_scale(known[0], known[-1])
    return float(np.add.reduce(known / scale)) / len(known) * scale


def pool_means(means: Sequence[float], counts: Sequence[int]) -> float:
    """The mean over several parts, each known by its mean and its count; of at least one value."""
    scale = _find_scale(min(means), max(means))
    return math.fsum(one / scale * count for one, count in zip(means, counts, strict=True)) / sum(counts) * scale


def _find_scale(lowest: float, highest: float) -> float:
    """A power of 2 by which all finite numbers are divided, so that neither their sum nor that of their squares overflows; 1
    for all that are not huge."""
    return _SCALE if max(-lowest, highest) > _HUGE else 1.0


def percentiles(values: Values, ranks: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """`p50`, `p90`… by linear interpolation between neighbours; `{}` for no values."""
    known = np.asarray(values, np.float64)
    if not len(known):
        return {}
    return {f"p{rank}": float(value) for rank, value in zip(ranks, np.percentile(known, ranks), strict=True)}


def gini(values: Values) -> float:
    """Gini coefficient: mean |x_i - x_j| over all pairs, over twice the mean. 0: all equal; (n - 1) / n: one has all.

    The mean in the denominator is that of |x|, so that rewards of both signs stay finite; all zero is 0.
    """
    ordered = sorted(values)  # a group is small: numpy would cost ten times as much
    scale = _find_scale(ordered[0], ordered[-1]) if ordered else 1.0
    if scale != 1.0:
        ordered = [value / scale for value in ordered]
    total = math.fsum(map(abs, ordered))
    if total == 0.0 or ordered[0] == ordered[-1]:
        return 0.0
    count = len(ordered)
    weighted = math.fsum((2 * place - count + 1) * value for place, value in enumerate(ordered))
    return float(weighted / (count * total))


def max_median_ratio(values: Values) -> float:
    """The largest over the median, e.g. of completion lengths: how long a group waits for its last member. 0 over 0 is 1."""
    known = np.asarray(values, np.float64)
    median, largest = float(np.median(known)), float(known.max())
    if median == 0.0:
        return 1.0 if largest == 0.0 else float("inf")
    return largest / median


def group_mean(measure: Callable[[np.ndarray], float], values: Values, groups: Sequence[int] | np.ndarray) -> float | None:
    """Mean over groups of `measure` within each, e.g. `group_mean(gini, rewards, groups)`; None for no groups."""
    measured = [measure(members) for members in _members(np.asarray(values, np.float64), np.asarray(groups))]
    return float(np.mean(measured)) if measured else None


def _members(values: np.ndarray, groups: np.ndarray) -> Iterator[np.ndarray]:
    for group in np.unique(groups):
        yield values[groups == group]
