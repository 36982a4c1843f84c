"""Rows through the stages of a pipeline: what is computed when, and what passes between neighbouring stages.

A row's activations go to the stage after, and their gradients to the stage before. Owns these exchanges and how long a row is
held; the order is pipeline_order.py's. Refuses to know layers, losses and what a row is: whoever computes it says so.

A receive is begun about when its message is sent, so that it goes on while the device computes, and so that a task which waits
for the whole device ends. With NCCL it waits on the device for what was launched before it: begun only when it is needed, it
would not go on meanwhile. No send is ever waited for while there is something to compute: each kind of message has a group of
its own, in each direction, so that none waits behind another that the receiver does not look for yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from telescope.backends.megatron import pipeline_order
from telescope.backends.megatron.parallel import Parallel
from telescope.backends.megatron.pipeline_order import StagePass

ACTIVATIONS, GRADIENTS, ACTIVATIONS_ROUND, GRADIENTS_ROUND = range(4)
"""Places in `Parallel.pipes`: to the next stage and back, and between the last stage and the first one."""


def pipes_needed(laps: int) -> int:
    """Kinds of messages where each stage has so many stretches."""
    return 2 if laps == 1 else 4


class Passes(Protocol):
    """The rows of one order of tasks, counted from 0, on this stage."""

    def shape(self, row: int) -> tuple[int, ...]:
        """Of what passes between stages."""

    def forward(self, task: StagePass, entering: Tensor | None) -> Tensor | None:
        """Through a stretch of layers: what leaves it; of a model's last one what is to be run backward, or None. `entering`:
        what has come from the stage before; None: the model begins here."""

    def backward(self, task: StagePass) -> AbstractContextManager[None]:
        """Around the backward pass of a stretch."""

    def waiting(self, task: StagePass) -> AbstractContextManager[None]:
        """Around the wait for what another stage sends."""


@dataclass(frozen=True)
class _Forwarded:
    """A stretch that a row has passed, and not yet on its way back. The end of its graph, without the numbers there, which
    nobody needs once they are sent."""

    entering: Tensor | None
    end: Any


@dataclass(frozen=True)
class _Incoming:
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

    def forwards(self, rows: int) -> list[list[StagePass]]:
        """Forward passes alone, of each stage."""
        return [pipeline_order.forwards(rows, self._parallel.stages, self._laps)] * self._parallel.stages

    def order(self, rows: int) -> list[list[StagePass]]:
        """Forward and backward passes of a minibatch, of each stage."""
        stages = self._parallel.stages
        return [pipeline_order.one_forward_one_backward(rows, stage, stages, self._laps) for stage in range(stages)]

    def run(self, orders: Sequence[Sequence[StagePass]], passes: Passes) -> None:
        """This stage's tasks, in its order; forward passes alone keep no graph."""
        tasks = orders[self._parallel.stage]
        first, *after = pipeline_order.receives(orders, self._parallel.stage, self._laps)
        trains = any(task.backward for task in tasks)
        held: dict[tuple[int, int], _Forwarded] = {}
        arrivals: dict[StagePass, _Incoming] = {}
        self._exchange(None, first, passes, arrivals)
        for task, coming in zip(tasks, after, strict=True):
            arrival = arrivals.pop(task, None)
            if arrival is not None:
                with passes.waiting(task):
                    arrival.work.wait()
            received = None if arrival is None else arrival.tensor
            if task.backward:
                leaving = self._backward(task, passes, held.pop((task.row, task.lap)), received)
            else:
                leaving = self._forward(task, passes, received, held if trains else None)
            del arrival, received
            self._exchange(None if leaving is None else (task, leaving), coming, passes, arrivals)
            del leaving
            self._forget_sent()
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _forward(
        self, task: StagePass, passes: Passes, entering: Tensor | None, held: dict[tuple[int, int], _Forwarded] | None
    ) -> Tensor | None:  # fmt: skip
        """What is to be sent; what is needed on the way back goes into `held`. None: there is no way back."""
        if held is not None and entering is not None:
            entering.requires_grad_()
        with torch.set_grad_enabled(held is not None):
            leaving = passes.forward(task, entering)
        sends = not self._is_last(task)
        if held is not None:
            assert leaving is not None
            end = torch.autograd.graph.get_gradient_edge(leaving) if sends else leaving
            held[task.row, task.lap] = _Forwarded(entering, end)
        if not sends:
            return None
        assert leaving is not None
        return leaving.detach()

    def _backward(self, task: StagePass, passes: Passes, forwarded: _Forwarded, gradient: Tensor | None) -> Tensor | None:
        """What is to be sent."""
        with passes.backward(task):
            torch.autograd.backward((forwarded.end,), (gradient,))
        entering = forwarded.entering
        if entering is None:
            return None
        assert entering.grad is not None
        return entering.grad

    # ---- what passes between stages

    def _is_last(self, task: StagePass) -> bool:
        return self.last and task.lap + 1 == self._laps

    def _link(self, task: StagePass, *, ahead: bool) -> tuple[int, int]:
        """(stage, pipe) of what the task exchanges with the stretch after its own, or before it."""
        stage, stages = self._parallel.stage, self._parallel.stages
        other = (stage + (1 if ahead else -1)) % stages
        wraps = stage + 1 == stages if ahead else stage == 0
        if task.backward:
            return other, GRADIENTS_ROUND if wraps else GRADIENTS
        return other, ACTIVATIONS_ROUND if wraps else ACTIVATIONS

    def _exchange(
        self, leaving: tuple[StagePass, Tensor] | None, coming: Sequence[StagePass], passes: Passes,
        arrivals: dict[StagePass, _Incoming],
    ) -> None:  # fmt: skip
        """Begin to send what a task has made, and to receive what those that are `coming` need. All memory is taken first: to
        find some may take a wait for the whole device, and a send ends once its receiver has come to its own exchange."""
        tensors = [torch.empty(passes.shape(task.row), dtype=self._dtype, device=self._device) for task in coming]
        if leaving is not None:
            task, tensor = leaving[0], leaving[1].contiguous()
            stage, pipe = self._link(task, ahead=not task.backward)
            self._sent.append((dist.isend(tensor, group=self._parallel.pipes[pipe], group_dst=stage), tensor))
        for task, tensor in zip(coming, tensors, strict=True):
            stage, pipe = self._link(task, ahead=task.backward)
            arrivals[task] = _Incoming(dist.irecv(tensor, group=self._parallel.pipes[pipe], group_src=stage), tensor)

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
