"""In which order a stage of a pipeline computes its rows: one forward, one backward (1F1B), plain or interleaved.

After Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (arXiv:2104.04473), with
any number of rows, fewer than stages too. Owns the order alone. Every stage knows the order of all: what passes between two of
them passes in one order, so nobody has to say what it sends.

megatron-core has schedules of its own. They take rows of one length, or send each one's length ahead of it, which makes host
and device wait for each other; where stretches are interleaved they refuse a last group of fewer rows than stages; and they
call the loss.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StagePass:
    """A pass of row `row` through this stage's stretch `lap`, both from 0."""

    backward: bool
    row: int
    lap: int


def forwards(rows: int, stages: int, laps: int) -> list[StagePass]:
    """Forward passes alone, alike on all stages: a group of as many rows as there are stages goes round `laps` times, then the
    next one."""
    return list(_round(rows, stages, range(laps), backward=False))


def one_forward_one_backward(rows: int, stage: int, stages: int, laps: int) -> list[StagePass]:
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


def receives(orders: Sequence[Sequence[StagePass]], stage: int, laps: int) -> list[list[StagePass]]:
    """When `stage` begins to receive, where each stage keeps its order: first, and after each of its tasks, the tasks whose
    messages come next, in the order in which they are sent.

    A task may wait for the whole device (a cudaFree, a kernel's first use), and so for all messages of this stage that are
    begun. None of them may need what this task is yet to send. So a message is taken at the time when it is sent, were a
    backward pass twice as long as a forward one: after the stage's last task that is over by then. Then whatever a task waits
    for is over before that task is, and no stages wait for each other.
    """
    ends = _ends(orders, laps)
    own = [ends[stage, task] for task in orders[stage]]
    found: list[list[StagePass]] = [[] for _ in range(len(own) + 1)]
    needed = ((task, _source(task, stage, len(orders), laps)) for task in orders[stage])
    sent = [(ends[source], task) for task, source in needed if source is not None]
    for end, task in sorted(sent, key=lambda each: each[0]):
        found[bisect_right(own, end)].append(task)
    return found


def _ends(orders: Sequence[Sequence[StagePass]], laps: int) -> dict[tuple[int, StagePass], int]:
    """When each stage's tasks are over, each begun as soon as can be."""
    found: dict[tuple[int, StagePass], int] = {}
    places, now = [0] * len(orders), [0] * len(orders)
    while len(found) < sum(map(len, orders)):
        known = len(found)
        for stage, order in enumerate(orders):
            for task in order[places[stage] :]:
                source = _source(task, stage, len(orders), laps)
                if source is not None and source not in found:
                    break
                begun = now[stage] if source is None else max(now[stage], found[source])
                now[stage] = found[stage, task] = begun + (2 if task.backward else 1)
                places[stage] += 1
        if len(found) == known:
            raise ValueError("each stage waits for another one: these orders can't be kept")
    return found


def _source(task: StagePass, stage: int, stages: int, laps: int) -> tuple[int, StagePass] | None:
    """The stage and task that send what a task needs; None: it needs nothing from others."""
    place = task.lap * stages + stage + (1 if task.backward else -1)
    if not 0 <= place < stages * laps:
        return None
    return place % stages, StagePass(task.backward, task.row, place // stages)


def _round(rows: int, stages: int, laps: range, *, backward: bool) -> Iterator[StagePass]:
    for first in range(0, rows, stages):
        for lap in laps:
            yield from (StagePass(backward, row, lap) for row in range(first, min(first + stages, rows)))
