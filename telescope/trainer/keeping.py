"""Which train steps are kept to be run again, and when older ones go. One rank's part; the files are `runlog.kept`'s."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from telescope.backends.base import StepResult, TrainShard
from telescope.runlog import kept
from telescope.runlog.layout import RunDirectory

log = logging.getLogger(__name__)


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

    def trained(self, shard: TrainShard, result: StepResult) -> None:
        """Look at a step's outcome, which is the same on all ranks."""
        left_out = int(result.metrics.get("updates_not_finite", 0.0))
        scale = result.metrics.get("loss_scale")
        if left_out and self.latest:
            self._keep_wrong(shard, f"{left_out} of its updates had a gradient that was no finite number", scale)
        elif self.every is not None and shard.step % self.every == 0:
            self._write(shard, f"trainer.keep_batches_every={self.every}", scale)

    def broke(self, shard: TrainShard, error: Exception) -> None:
        """The step ended in an error."""
        if self.latest:
            said = (str(error).strip().splitlines() or [""])[0]
            self._keep_wrong(shard, f"it ended with {type(error).__name__}: {said}", None)

    def _keep_wrong(self, shard: TrainShard, why: str, scale: float | None) -> None:
        if not self._write(shard, why, scale):
            return
        self._wrong.append(shard.step)
        if len(self._wrong) > self.latest:
            kept.forget(self.run, self._wrong.popleft(), self.rank)

    def _write(self, shard: TrainShard, why: str, scale: float | None) -> bool:
        header = kept.Header(
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
            path = kept.write(self.run, header, (shard.ids, shard.mask, shard.logprobs, shard.versions))
        except OSError as error:
            log.error("the batch of step %d can't be kept (%s): training goes on", shard.step, error)
            return False
        if self.rank == 0:
            log.info("the batch of step %d is kept in %s: %s", shard.step, path.parent, why)
        return True
