"""Metrics of one step: added up on the device row by row, over ranks with two collectives, fetched after each.

Names and their arithmetic are `maths.metrics`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from telescope.algorithms.base import LossOutput
from telescope.maths import metrics

Names = tuple[tuple[str, ...], tuple[str, ...]]
"""Of sums and of peaks."""


class MetricSums:
    """Of one step on one rank. Every rank must add the same names, or be told those of a rank that added some.

    `counts`: whether its sums are added to those of the other ranks; not where another rank adds up the same rows.
    """

    def __init__(self, device: str, *, counts: bool = True) -> None:
        self._device = device
        self._counts = counts
        self._sums: dict[str, Tensor] = {}
        self._peaks: dict[str, Tensor] = {}

    def add(self, output: LossOutput) -> None:
        """One row's share."""
        self._sums = metrics.merge_sums(self._sums, output.sums)
        self._peaks = metrics.merge_peaks(self._peaks, output.peaks)

    @property
    def names(self) -> Names:
        """Of what was added."""
        return tuple(self._sums), tuple(self._peaks)

    def follow(self, names: Names) -> None:
        """Where this rank adds no rows: take part in the sums and peaks of those that do, with nothing."""
        self._sums, self._peaks = (
            {name: torch.full((), value, device=self._device) for name in given}
            for given, value in zip(names, (0.0, -math.inf), strict=True)
        )

    def finish(self, sums: Mapping[str, float], peaks: Mapping[str, float], *, updates: int = 1) -> dict[str, float]:
        """Metrics over all rows and ranks; `sums` and `peaks` are this rank's host-side numbers. A collective.

        A plain total of the loss, as `loss` is, is one of each of the `updates` that had a token to train, and is reported as
        their mean; where none had, it is left out.
        """
        totals = self._reduced(self._sums, sums, dist.ReduceOp.SUM)
        for name in self._sums:
            if "#" not in name and name + metrics.COUNT not in self._sums:
                totals[name + metrics.COUNT] = float(updates)
        largest = self._reduced(self._peaks, peaks, dist.ReduceOp.MAX)
        return metrics.finish(totals, largest)

    def _reduced(
        self, on_device: Mapping[str, Tensor], on_host: Mapping[str, float], how: dist.ReduceOp.RedOpType
    ) -> dict[str, float]:
        host = torch.tensor(list(on_host.values()), dtype=torch.float64, device=self._device)
        values = torch.cat([torch.stack(list(on_device.values())), host])
        if how == dist.ReduceOp.SUM and not self._counts:
            values = torch.zeros_like(values)
        dist.all_reduce(values, op=how)
        return dict(zip([*on_device, *on_host], values.tolist(), strict=True))
