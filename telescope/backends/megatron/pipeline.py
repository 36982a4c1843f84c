"""Rows through the stages of a pipeline: what is computed when, and what passes between neighbouring stages.

A row's activations go to the stage after, and their gradients to the stage before. Owns these exchanges and how long a row is
held; the order is schedule.py's. Refuses to know layers, losses and what a row is: whoever computes it says so.

A receive is begun one task ahead, so that it goes on while the device computes. No send is ever waited for while there is
something to compute: each kind of message has a group of its own, in each direction, so that none waits behind another that the
receiver does not look for yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from telescope.backends.megatron import schedule
from telescope.backends.megatron.parallel import Parallel
from telescope.backends.megatron.schedule import Task

ACTIVATIONS, GRADIENTS, ACTIVATIONS_ROUND, GRADIENTS_ROUND = range(4)
"""Places in `Parallel.pipes`: to the next stage and back, and between the last stage and the first one."""


def pipes_needed(laps: int) -> int:
    """Kinds of messages where each stage has so many stretches."""
    return 2 if laps == 1 else 4


class Passes(Protocol):
    """The rows of one order of tasks, counted from 0, on this stage."""

    def shape(self, row: int) -> tuple[int, ...]:
        """Of what passes between stages."""

    def forward(self, task: Task, entering: Tensor | None) -> Tensor | None:
        """Through a stretch of layers: what leaves it; of a model's last one what is to be run backward, or None. `entering`:
        what has come from the stage before; None: the model begins here."""

    def backward(self, task: Task) -> AbstractContextManager[None]:
        """Around the backward pass of a stretch."""

    def waiting(self, task: Task) -> AbstractContextManager[None]:
        """Around the wait for what another stage sends."""


@dataclass(frozen=True)
class _Forwarded:
    """A stretch that a row has passed, and not yet on its way back. The end of its graph, without the numbers there, which
    nobody needs once they are sent."""

    entering: Tensor | None
    end: Any


@dataclass(frozen=True)
class _Arrival:
    """What has come, once `work` is done."""

    work: Any
    tensor: Tensor


class Pipeline:
    """This rank's place in it."""

    def __init__(self, parallel: Parallel, laps: int, dtype: torch.dtype, device: str) -> None:
        self._parallel, self._laps, self._dtype, self._device = parallel, laps, dtype, device
        self._sent: list[tuple[Any, Tensor]] = []

    @property
    def last(self) -> bool:
        """Whether the model ends on this stage."""
        return self._parallel.stage + 1 == self._parallel.stages

    def forwards(self, rows: int) -> list[Task]:
        """Forward passes alone."""
        return schedule.forwards(rows, self._parallel.stages, self._laps)

    def order(self, rows: int) -> list[Task]:
        """Forward and backward passes of a minibatch."""
        return schedule.one_forward_one_backward(rows, self._parallel.stage, self._parallel.stages, self._laps)

    def run(self, tasks: Sequence[Task], passes: Passes) -> None:
        """All tasks, in order; forward passes alone keep no graph."""
        trains = any(task.backward for task in tasks)
        held: dict[tuple[int, int], _Forwarded] = {}
        coming = self._expected(tasks[0], passes)
        for place, task in enumerate(tasks):
            arrival, coming = coming, self._expected(tasks[place + 1], passes) if place + 1 < len(tasks) else None
            if arrival is not None:
                with passes.waiting(task):
                    arrival.work.wait()
            received = None if arrival is None else arrival.tensor
            if task.backward:
                self._backward(task, passes, held.pop((task.row, task.lap)), received)
            else:
                found = self._forward(task, passes, received, trains)
                if trains:
                    held[task.row, task.lap] = found
            self._forget_sent()
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _forward(self, task: Task, passes: Passes, entering: Tensor | None, trains: bool) -> _Forwarded:
        if trains and entering is not None:
            entering.requires_grad_()
        with torch.set_grad_enabled(trains):
            leaving = passes.forward(task, entering)
        if not self._is_last(task):
            assert leaving is not None
            self._send(leaving.detach(), *self._link(task, ahead=True))
            return _Forwarded(entering, torch.autograd.graph.get_gradient_edge(leaving) if trains else None)
        return _Forwarded(entering, leaving)

    def _backward(self, task: Task, passes: Passes, forwarded: _Forwarded, gradient: Tensor | None) -> None:
        with passes.backward(task):
            torch.autograd.backward((forwarded.end,), (gradient,))
        entering = forwarded.entering
        if entering is not None:
            assert entering.grad is not None
            self._send(entering.grad, *self._link(task, ahead=False))

    # ---- what passes between stages

    def _is_first(self, task: Task) -> bool:
        return self._parallel.stage == 0 and task.lap == 0

    def _is_last(self, task: Task) -> bool:
        return self.last and task.lap + 1 == self._laps

    def _link(self, task: Task, *, ahead: bool) -> tuple[int, int]:
        """(stage, pipe) of what the task exchanges with the stretch after its own, or before it."""
        stage, stages = self._parallel.stage, self._parallel.stages
        other = (stage + (1 if ahead else -1)) % stages
        wraps = stage + 1 == stages if ahead else stage == 0
        if task.backward:
            return other, GRADIENTS_ROUND if wraps else GRADIENTS
        return other, ACTIVATIONS_ROUND if wraps else ACTIVATIONS

    def _expected(self, task: Task, passes: Passes) -> _Arrival | None:
        """Begin to receive what a task needs; None: it needs nothing from others."""
        if self._is_last(task) if task.backward else self._is_first(task):
            return None
        stage, pipe = self._link(task, ahead=task.backward)
        tensor = torch.empty(passes.shape(task.row), dtype=self._dtype, device=self._device)
        return _Arrival(dist.irecv(tensor, group=self._parallel.pipes[pipe], group_src=stage), tensor)

    def _send(self, tensor: Tensor, stage: int, pipe: int) -> None:
        given = tensor.contiguous()
        self._sent.append((dist.isend(given, group=self._parallel.pipes[pipe], group_dst=stage), given))

    def _forget_sent(self) -> None:
        """Let go of what is known to have arrived."""
        under_way = []
        for work, tensor in self._sent:
            if work.is_completed():
                work.wait()  # which is over at once, and says what broke
            else:
                under_way.append((work, tensor))
        self._sent = under_way

    def from_last(self, tensor: Tensor) -> Tensor:
        """The last stage's tensor on all stages, in place; shape and dtype are the same everywhere. A collective."""
        parallel = self._parallel
        dist.broadcast(tensor, group=parallel.pipeline_group, group_src=parallel.stages - 1)
        return tensor

    def told_by_last(self, told: Any) -> Any:
        """Likewise something small that can be pickled."""
        parallel, given = self._parallel, [told]
        device = torch.device(self._device)
        dist.broadcast_object_list(given, group=parallel.pipeline_group, group_src=parallel.stages - 1, device=device)
        return given[0]


def meet_neighbours(parallel: Parallel, laps: int, device: str) -> None:
    """A byte over each link, one link after another: with NCCL both ends of a link wait for each other when it is first used,
    and in the midst of an order of tasks that could be for ever. A collective."""
    links: list[tuple[int, int, int]] = []
    for stage in range(parallel.stages - 1):
        links += [(stage, stage + 1, ACTIVATIONS), (stage + 1, stage, GRADIENTS)]
    if laps > 1:
        links += [(parallel.stages - 1, 0, ACTIVATIONS_ROUND), (0, parallel.stages - 1, GRADIENTS_ROUND)]
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    for source, target, pipe in links:
        if parallel.stage == source:
            dist.send(byte, group=parallel.pipes[pipe], group_dst=target)
        elif parallel.stage == target:
            dist.recv(byte, group=parallel.pipes[pipe], group_src=source)
