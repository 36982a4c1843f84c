"""In which order a stage of a pipeline computes its rows: one forward, one backward (1F1B), plain or interleaved.

After Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (arXiv:2104.04473), with
any number of rows, fewer than stages too. Owns the order alone. Every stage knows the order of all: what passes between two of
them passes in one order, so nobody has to say what it sends.

megatron-core has schedules of its own. They take rows of one length, or send each one's length ahead of it, which makes host
and device wait for each other; where stretches are interleaved they refuse a last group of fewer rows than stages; and they
call the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A pass of row `row` through this stage's stretch `lap`, both from 0."""

    backward: bool
    row: int
    lap: int


def forwards(rows: int, stages: int, laps: int) -> list[Task]:
    """Forward passes alone, alike on all stages: a group of as many rows as there are stages goes round `laps` times, then the
    next one."""
    return list(_round(rows, stages, range(laps), backward=False))


def one_forward_one_backward(rows: int, stage: int, stages: int, laps: int) -> list[Task]:
    """All passes of a minibatch. Earlier stages have more rows on their way: the last one has its first backward pass at
    once.

    Where rows go round, the order is that of a last group which is filled up, without the rows that fill it: as no row waits
    for another's results, an order that all stages can keep stays one when rows are taken out of it.
    """
    filled = rows if laps == 1 else -(-rows // stages) * stages
    ahead = stages - 1 - stage if laps == 1 else 2 * (stages - 1 - stage) + (laps - 1) * stages
    forward = forwards(filled, stages, laps)
    backward = list(_round(filled, stages, range(laps - 1, -1, -1), backward=True))
    ahead = min(ahead, len(forward))
    steady = [task for pair in zip(forward[ahead:], backward, strict=False) for task in pair]
    every = forward[:ahead] + steady + backward[len(forward) - ahead :]
    return [task for task in every if task.row < rows]


def passes_held(stage: int, stages: int, laps: int) -> int:
    """Of rows through a stretch of this stage, at most, that wait for their way back: of a step of many rows."""
    return stages - stage if laps == 1 else 2 * (stages - stage) - 1 + (laps - 1) * stages


def _round(rows: int, stages: int, laps: range, *, backward: bool) -> Iterator[Task]:
    for first in range(0, rows, stages):
        for lap in laps:
            yield from (Task(backward, row, lap) for row in range(first, min(first + stages, rows)))
