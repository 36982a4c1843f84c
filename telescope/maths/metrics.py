"""Step metrics of the loss: summed on the device row by row, added over rows and ranks, finished once.

Two kinds travel. `sums` are added: a plain name is a total; `name#count` beside it makes a mean; `name#squares` besides makes a
standard deviation too. `peaks` take the largest; a name that begins with `-` holds a negated minimum. All are float64 scalars,
so that a spread of 1e-3 around 1 survives. Tensor methods only: no torch import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

COUNT, SQUARES = "#count", "#squares"


def mean_sums(name: str, values: Tensor, mask: Tensor, *, spread: bool = False) -> dict[str, Tensor]:
    """Sums for the mean (with `spread`, the standard deviation too) of `values` [T] where `mask` [T]."""
    kept = values.detach().double().where(mask, 0.0)
    sums = {name: kept.sum(), name + COUNT: mask.sum().double()}
    if spread:
        sums[name + SQUARES] = (kept * kept).sum()
    return sums


def extremes(name: str, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Peaks for the smallest and largest of `values` [T] where `mask` [T]; infinite where the mask is empty."""
    known = values.detach().double()
    return {
        f"{name}_max": known.where(mask, -math.inf).amax(),
        f"-{name}_min": (-known).where(mask, -math.inf).amax(),
    }


def merge_sums(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add two rows' sums."""
    return {name: left[name] + right[name] for name in left} if left else dict(right)


def merge_peaks(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The larger of two rows' peaks."""
    return {name: left[name].maximum(right[name]) for name in left} if left else dict(right)


def finish(sums: Mapping[str, float], peaks: Mapping[str, float]) -> dict[str, float]:
    """Metrics from the totals over all rows and ranks. What no token measured is left out.

    `{"ratio": 3.0, "ratio#count": 2.0, "ratio#squares": 5.0}` is `{"ratio_mean": 1.5, "ratio_std": 0.5}`.
    """
    metrics: dict[str, float] = {}
    for name, total in sums.items():
        if "#" in name:
            continue
        count = sums.get(name + COUNT)
        if count is None:
            metrics[name] = total
        elif count > 0:
            metrics |= _mean(name, total / count, sums.get(name + SQUARES), count)
    for name, peak in peaks.items():
        if math.isfinite(peak):
            metrics[name.removeprefix("-")] = -peak if name.startswith("-") else peak
    return metrics


def _mean(name: str, mean: float, squares: float | None, count: float) -> dict[str, float]:
    if squares is None:
        return {name: mean}
    return {f"{name}_mean": mean, f"{name}_std": math.sqrt(max(squares / count - mean * mean, 0.0))}
