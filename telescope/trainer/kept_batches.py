"""Which train steps are kept to be run again, and when older ones go. One rank's part; the files are `runlog.kept`'s.

A step that ends in an error on one rank comes to no end on the others: they wait for it in a collective, and are ended. So
that all of the step is there, each of these writes its part on its way out, from a thread where its main one is stuck.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from telescope.backends.base import StepResult, TrainShard
from telescope.runlog import kept_steps
from telescope.runlog.layout import RunDirectory

log = logging.getLogger(__name__)

LAST_WORD_S = 10.0
"""For a part to be written that a signal has asked for."""


@dataclass
class Keeper:
    """`latest`: so many steps that went wrong; `every`: besides, each step that this divides. A disk that takes nothing ends no
    run: it is said, and the step is not kept."""

    run: RunDirectory
    config_hash: str
    rank: int
    ranks: int
    latest: int
    every: int | None = None
    _wrong: deque[int] = field(default_factory=deque)
    _under_way: TrainShard | None = None
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def begins(self, shard: TrainShard) -> None:
        """The step has been ordered here."""
        self._under_way = shard

    def trained(self, shard: TrainShard, result: StepResult) -> None:
        """Look at a step's outcome, which is the same on all ranks."""
        with self._writing:
            self._under_way = None
        left_out = int(result.metrics.get("updates_not_finite", 0.0))
        scale = result.metrics.get("loss_scale")
        if left_out and self.latest:
            self._keep_wrong(shard, f"{left_out} of its updates had a gradient that was no finite number", scale)
        elif self.every is not None and shard.step % self.every == 0:
            self._write(shard, f"trainer.keep_batches_every={self.every}", scale)

    def broke(self, shard: TrainShard, error: Exception) -> None:
        """The step ended in an error."""
        said = (str(error).strip().splitlines() or [""])[0]
        with self._writing:
            self._under_way = None
            if self.latest:
                self._keep_wrong(shard, f"it ended with {type(error).__name__}: {said}", None)

    def left(self) -> None:
        """This rank ends. A step under way is kept if another rank has kept its part: it was its error that ended the step.
        From any thread."""
        with self._writing:
            shard = self._under_way
            if shard is not None and self.latest and kept_steps.is_kept_by_another(self.run, shard.step, self.rank):
                self._under_way = None  # else the next signal, or the end, may find it so
                self._keep_wrong(shard, "another rank kept its part of it", None)

    def _keep_wrong(self, shard: TrainShard, why: str, scale: float | None) -> None:
        if not self._write(shard, why, scale):
            return
        self._wrong.append(shard.step)
        if len(self._wrong) > self.latest:
            kept_steps.forget(self.run, self._wrong.popleft(), self.rank)

    def _write(self, shard: TrainShard, why: str, scale: float | None) -> bool:
        header = kept_steps.Header(
            step=shard.step,
            rank=self.rank,
            ranks=self.ranks,
            config_hash=self.config_hash,
            why=why,
            items=shard.items,
            denominators=shard.denominators,
            loss_scale=scale,
        )
        try:
            path = kept_steps.write(self.run, header, shard.arrays)
        except OSError as error:
            log.error("the batch of step %d can't be kept (%s): training goes on", shard.step, error)
            return False
        if self.rank == 0:
            log.info("the batch of step %d is kept in %s: %s", shard.step, path.parent, why)
        return True


@contextmanager
def last_word(keeper: Keeper) -> Iterator[None]:
    """Within, a signal to end lets `keeper` write the step under way at once, whatever the main thread waits for: inside a
    library no handler of Python runs. To be entered by the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_on_signals, args=(reader, keeper), name="last-word", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join(LAST_WORD_S)
        if not thread.is_alive():
            os.close(reader)


def _on_signals(reader: int, keeper: Keeper) -> None:
    while os.read(reader, 64):
        keeper.left()
