"""Rows on one stage of a pipeline: how a row goes through the layers that are here, and what the last stage makes of it.

Owns what `pipeline.Passes` asks for, for log-probs alone and for training. The losses are the backend's, and when which row's
turn is, and where it comes from, is pipeline.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from telescope.backends.common.phase_times import PhaseTimer
from telescope.backends.common.rows import DeviceRow
from telescope.backends.megatron.pipeline_order import StagePass
from telescope.backends.megatron.policy import ParallelPolicy, ParallelRow
from telescope.maths import packing
from telescope.maths.support import Support

Sent = Callable[[packing.RowArrays], tuple[DeviceRow, ParallelRow]]
"""To the device: a row for the loss, and as the policy takes it."""


class StagedRows:
    """Rows that this stage computes with `policy`, each on the device from its first stretch to its last one."""

    def __init__(
        self, policy: ParallelPolicy, arranged: Sequence[packing.RowArrays], sent: Sent, chunk: int, support: Support
    ) -> None:  # fmt: skip
        self._policy, self._arranged, self._sent, self._chunk, self._support = policy, arranged, sent, chunk, support
        self._held: dict[int, tuple[DeviceRow, ParallelRow]] = {}

    def shape(self, row: int) -> tuple[int, ...]:
        return self._policy.passing_shape(len(self._arranged[row].ids))

    def _row(self, task: StagePass) -> tuple[DeviceRow, ParallelRow]:
        if task.row not in self._held:
            self._held[task.row] = self._sent(self._arranged[task.row])
        last = task.lap + 1 == len(self._policy.models)
        return self._held.pop(task.row) if last else self._held[task.row]

    def _taken(self, given: ParallelRow, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self._policy.taken(given, hidden, self._chunk, self._support)


class ForwardRows(StagedRows):
    """Log-probs of all rows, without gradient. `taking`: around the work for a row, by its place."""

    def __init__(
        self, policy: ParallelPolicy, arranged: Sequence[packing.RowArrays], sent: Sent, chunk: int, support: Support, *,
        taking: Callable[[int], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        super().__init__(policy, arranged, sent, chunk, support)
        self._taking = taking
        self.logprobs: list[Tensor | None] = [None] * len(arranged)
        """[n] of each row, on the last stage, once all have been forward."""

    def forward(self, task: StagePass, entering: Tensor | None) -> Tensor | None:
        with self._taking(task.row):
            _, given = self._row(task)
            hidden = self._policy.passed(task.lap, given, entering)
            if not self._policy.ends(task.lap):
                return hidden
            self.logprobs[task.row] = self._taken(given, hidden)[0]
            return None

    def backward(self, task: StagePass) -> AbstractContextManager[None]:
        raise NotImplementedError("log-probs alone are not run backward")

    def waiting(self, task: StagePass) -> AbstractContextManager[None]:
        return nullcontext()


class TrainedRows(StagedRows):
    """Forward and backward passes of all rows of minibatch `number`."""

    def __init__(
        self, policy: ParallelPolicy, arranged: Sequence[packing.RowArrays], sent: Sent, chunk: int, support: Support, *,
        number: int, spans: PhaseTimer, loss: Callable[[int, DeviceRow, Tensor, Tensor], Tensor],
        of_lap: Callable[[int, bool], AbstractContextManager[None]], done: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`loss` of a row's place, the row, log-probs and entropies, both [n]: what is to be run backward, on the last stage.
        `of_lap`: around a backward pass through a stretch, by its place and whether it is the minibatch's last. `done` is told
        the place of a row that this stage is done with."""
        super().__init__(policy, arranged, sent, chunk, support)
        self._number, self._spans, self._loss, self._of_lap, self._done = number, spans, loss, of_lap, done

    def forward(self, task: StagePass, entering: Tensor | None) -> Tensor | None:
        self._spans.at(self._number, task.row)
        with self._spans.span("data_to_device"):
            row, given = self._row(task)
        with self._spans.span("forward"):
            hidden = self._policy.passed(task.lap, given, entering)
            if not self._policy.ends(task.lap):
                return hidden
            logprob, entropy = self._taken(given, hidden)
        with self._spans.span("loss_computation"):
            return self._loss(task.row, row, logprob, entropy)

    @contextmanager
    def backward(self, task: StagePass) -> Iterator[None]:
        self._spans.at(self._number, task.row)
        last = task.row + 1 == len(self._arranged)
        with self._spans.span("backward"), self._of_lap(task.lap, last):
            yield
        if task.lap == 0:
            self._done(task.row)

    @contextmanager
    def waiting(self, task: StagePass) -> Iterator[None]:
        self._spans.at(self._number, task.row)
        with self._spans.span("pipeline_wait"):
            yield
