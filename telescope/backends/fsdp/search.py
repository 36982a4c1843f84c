"""Where a gradient that is no finite number comes from: parameters, rows, trajectories. For `telescope replay`.

Owns the search, which runs rows again one by one, and in those that are at fault each trajectory alone. Every rank takes
part in each pass, as these are collectives. Refuses to change a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from telescope.backends.base import TrainShard, World
from telescope.backends.common import shards
from telescope.backends.probe import RowFinding, SampleFinding
from telescope.maths import packing

Pass = Callable[[packing.RowArrays, Tensor | None], tuple[Tensor, Tensor]]
"""Forward and backward of one row, whose gradient adds up: its loss [], and the log-probs of its sampled tokens [n]."""


@dataclass(frozen=True)
class Laid:
    """A row of the minibatch: what stands where, its arrays, and `old` [n] where the step has it."""

    plan: packing.Row
    arrays: packing.RowArrays
    old: Tensor | None


def trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with a gradient, by the model's own names for them."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name.removeprefix("lm."), parameter


def bad_parameters(module: nn.Module, device: str) -> tuple[tuple[str, int], ...]:
    """Those with gradient entries that are no finite numbers, over all ranks, and how many. A collective."""
    names, counts = [], []
    for name, parameter in trained(module):
        gradient = parameter.grad
        held = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        names.append(name)
        counts.append(0 if held is None else int((~held.isfinite()).sum()))
    totals = torch.tensor(counts, device=device)
    dist.all_reduce(totals)
    return tuple((name, count) for name, count in zip(names, totals.tolist(), strict=True) if count)


class Search:
    """Through one minibatch. Its gradients are gone afterwards."""

    def __init__(self, module: nn.Module, world: World, multiple: int, run: Pass) -> None:
        self._module, self._world, self._multiple, self._pass = module, world, multiple, run

    def rows(self, laid: Sequence[Laid]) -> tuple[RowFinding, ...]:
        """Each row alone."""
        found = []
        for place, row in enumerate(laid):
            loss, _, finite = self._alone(row.arrays, row.old)
            trajectories, total = self._summed(float(len(row.plan.items)), loss)
            if not (finite and math.isfinite(total)):
                found.append(RowFinding(place, int(trajectories), total, finite))
        return tuple(found)

    def samples(self, shard: TrainShard, laid: Sequence[Laid]) -> tuple[SampleFinding, ...]:
        """Each trajectory of these rows alone, rank after rank; a rank that has no turn runs a row of padding."""
        trajectories, own = shards.trajectories(shard), [(row, at) for row in laid for at in range(len(row.plan.items))]
        nothing = packing.arrange(packing.filler(multiple=self._multiple), [], [])
        found = []
        for rank, count in enumerate(self._counts(len(own))):
            for turn in range(count):
                arrays, old, item = nothing, None, -1
                if rank == self._world.rank:
                    row, at = own[turn]
                    item = row.plan.items[at]
                    alone = packing.pack([row.plan.lengths[at]], seq_len=row.plan.lengths[at], multiple=self._multiple)[0]
                    arrays = packing.arrange(alone, [trajectories[item]], [shard.items[item]])
                    old = _of(row, at)
                loss, logprobs, finite = self._alone(arrays, old if old is not None else _none_like(arrays, laid))
                if rank == self._world.rank and not (finite and math.isfinite(loss) and bool(logprobs.isfinite().all())):
                    found.append(_sample(rank, item, arrays, loss, logprobs, finite))
        return self._of_all(found)

    def _alone(self, arrays: packing.RowArrays, old: Tensor | None) -> tuple[float, Tensor, bool]:
        """Loss, log-probs and whether the gradient is finite on all ranks."""
        self._module.zero_grad(set_to_none=True)
        loss, logprobs = self._pass(arrays, old)
        return float(loss), logprobs, not bad_parameters(self._module, self._world.device)

    def _summed(self, *values: float) -> list[float]:
        totals = torch.tensor(values, dtype=torch.float64, device=self._world.device)
        dist.all_reduce(totals)
        summed: list[float] = totals.tolist()
        return summed

    def _counts(self, own: int) -> list[int]:
        counts = torch.zeros(self._world.size, dtype=torch.int64, device=self._world.device)
        counts[self._world.rank] = own
        dist.all_reduce(counts)
        known: list[int] = counts.tolist()
        return known

    def _of_all(self, found: list[SampleFinding]) -> tuple[SampleFinding, ...]:
        """Every rank's findings on every rank."""
        columns = 6
        rows = [
            [
                float(one.rank),
                float(one.item),
                one.loss,
                float(one.logprobs),
                math.nan if one.first is None else one.first,
                one.gradient,
            ]
            for one in found
        ]
        gathered = []
        for rank, count in enumerate(self._counts(len(rows))):
            table = torch.zeros(count, columns, dtype=torch.float64, device=self._world.device)
            if rank == self._world.rank and rows:
                table.copy_(torch.tensor(rows, dtype=torch.float64))
            if count:
                dist.broadcast(table, rank)
            gathered += table.tolist()
        return tuple(
            SampleFinding(int(rank), int(item), loss, int(logprobs), None if math.isnan(first) else int(first), bool(gradient))
            for rank, item, loss, logprobs, first, gradient in gathered
        )


def _of(row: Laid, at: int) -> Tensor | None:
    """The part of `old` that belongs to one trajectory of the row."""
    if row.old is None:
        return None
    start, length = row.plan.starts[at], row.plan.lengths[at]
    before = int(row.arrays.mask[:start].sum())
    return row.old[before : before + int(row.arrays.mask[start : start + length].sum())]


def _none_like(arrays: packing.RowArrays, laid: Sequence[Laid]) -> Tensor | None:
    """A rank without a turn gives the loss what the others give it."""
    known = next((row.old for row in laid if row.old is not None), None)
    return None if known is None else known[: int(arrays.mask.sum())]


def _sample(rank: int, item: int, arrays: packing.RowArrays, loss: float, logprobs: Tensor, gradient: bool) -> SampleFinding:
    bad = (~logprobs.isfinite()).cpu().numpy()
    places = np.flatnonzero(arrays.mask)[bad]
    return SampleFinding(rank, item, loss, int(bad.sum()), int(places[0]) if len(places) else None, gradient)
