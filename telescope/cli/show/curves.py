"""A number over a run, short enough for one line of text. Pure: knows neither runs nor terminals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite, sqrt
from statistics import fmean
from typing import TypeVar

import msgspec

T = TypeVar("T")

EDGE = 5
"""Values at each end that `first` and `last` are means of, as in summary.json; fewer where a value would be in both."""
BUCKETS = 60
LARGEST = 1e60
"""Numbers beyond it are shown as it: their squares would overflow, and no metric of a sound run comes near."""
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.:-=+*#"


class NumberCurve(msgspec.Struct, frozen=True, kw_only=True):
    """One number over the steps of a run, or over the versions of its weights."""

    name: str
    count: int
    """Values that it is made of."""
    first: float
    last: float
    """Means of the values at each end (`EDGE`), each with its weight."""
    low: float
    high: float
    """Of single values."""
    error: float | None
    """Standard error of `last - first`, from how much the values at each end differ; None with under 2 values at an end."""
    points: tuple[float, ...]
    """Means of up to `BUCKETS` buckets of equal size."""

    @property
    def change(self) -> float:
        return self.last - self.first

    @property
    def best(self) -> float:
        """The highest mean of as many values in a row as an end has, roughly: of neighbouring buckets."""
        return self._find_best()[0]

    @property
    def best_at(self) -> int:
        """The number of the value in the middle of that place, from 0."""
        _, place, width = self._find_best()
        return min(self.count - 1, int((place + width / 2) * self.count / len(self.points)))

    def _find_best(self) -> tuple[float, int, int]:
        """The mean, the first of its buckets and how many there are."""
        width = max(1, round(len(self.points) * edge_of(self.count) / self.count))
        means = [fmean(self.points[place : place + width]) for place in range(len(self.points) - width + 1)]
        best = max(means)
        return best, means.index(best), width


def bound(value: float) -> float:
    """The number within ±`LARGEST`."""
    return max(-LARGEST, min(LARGEST, value))


def edge_of(count: int) -> int:
    return max(1, min(EDGE, count // 2))


def make_curve(name: str, values: Sequence[float], weights: Sequence[float] | None = None) -> NumberCurve | None:
    """None without a finite value. `weights`: of each value, e.g. the rollouts that it is the mean of; all alike without."""
    given = zip(values, [1.0] * len(values) if weights is None else weights, strict=True)
    known = [(bound(value), bound(weight)) for value, weight in given if isfinite(value) and weight >= 1 / LARGEST]
    if not known:
        return None
    edge = edge_of(len(known))
    first, last = known[:edge], known[-edge:]
    single = [value for value, _ in known]
    return NumberCurve(
        name=name,
        count=len(known),
        first=_mean(first),
        last=_mean(last),
        low=min(single),
        high=max(single),
        error=sqrt(_square_error(first) + _square_error(last)) if edge > 1 else None,
        points=tuple(_mean(part) for part in _cut(known, BUCKETS)),
    )


def _mean(values: Sequence[tuple[float, float]]) -> float:
    """Of (value, weight)."""
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)


def _square_error(values: Sequence[tuple[float, float]]) -> float:
    """The variance of their weighted mean, from how they differ: n / (n - 1) · Σ w² (v - mean)² / (Σ w)². With equal weights it
    is the sample variance by n."""
    mean, total, count = _mean(values), sum(weight for _, weight in values), len(values)
    return count / (count - 1) * sum((weight * (value - mean)) ** 2 for value, weight in values) / total**2


def _cut(values: Sequence[T], most: int) -> list[Sequence[T]]:
    """Into at most `most` parts whose sizes differ by one at most."""
    count = min(len(values), most)
    ends = [place * len(values) // count for place in range(count + 1)] if count else []
    return [values[begin:end] for begin, end in pairwise(ends)]


def bucket(values: Sequence[float], most: int) -> list[float]:
    """Means of at most `most` buckets: [1, 3, 5] in two are [1, 4]."""
    return [fmean(part) for part in _cut(values, most)]


def draw(points: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """A character a bucket, `width` at most, from the lowest value to the highest. Equal values are a line in the middle."""
    shown = bucket([*map(bound, points)], max(1, width))
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        return blocks[len(blocks) // 2 - 1] * len(shown)
    return "".join(blocks[min(len(blocks) - 1, int((value - low) / (high - low) * len(blocks)))] for value in shown)
