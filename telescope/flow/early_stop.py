"""Whether a run ends before its last step, because an eval has not gained for too long. Counts scores; ends nothing itself.

A gain is a score better than every one before it, by however little. The score comes when its eval has ended, so the run ends
with the step that is in training then, or with the next one where none is.
"""

from __future__ import annotations

import msgspec

from telescope.flow.events import EvalScored
from telescope.flow.settings import FlowSettings


class SavedEarlyStop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For a checkpoint. `measure` and `lower`: what the scores are of, and whether a lower one is better."""

    measure: str = ""
    lower: bool = False
    best: float | None = None
    best_step: int = 0
    without_gain: int = 0
    """Evals in a row, since the best one."""
    last_step: int = 0
    """That the run ends with; 0: it goes on to `number_of_steps`."""

    def is_by(self, measure: str, *, lower: bool) -> bool:
        return (self.measure, self.lower) == (measure, lower)


class EarlyStop:
    """`eval.stop_after` of a run; off where that is 0."""

    def __init__(self, settings: FlowSettings) -> None:
        self._limit = settings.stop_after
        self._measure = settings.stop_measure
        self._sign = -1.0 if settings.stop_lower else 1.0
        self._steps = settings.number_of_steps
        self.state = self._begun = SavedEarlyStop(measure=self._measure, lower=settings.stop_lower)

    def restore(self, saved: SavedEarlyStop) -> None:
        """What was decided stands only as long as the limit is reached, and scores by another measure say nothing."""
        if not self._limit or not saved.is_by(self._begun.measure, lower=self._begun.lower):
            return
        ends = 0 < self._limit <= saved.without_gain
        self.state = saved if ends else msgspec.structs.replace(saved, last_step=0)

    @property
    def last_step(self) -> int:
        """The run's last step, as far as is known."""
        return self.state.last_step or self._steps

    @property
    def sentence(self) -> str:
        """Why the run ends with `last_step`; empty where it trains all its steps."""
        state = self.state
        if not state.last_step or state.best is None:
            return ""
        evals = f"{state.without_gain} eval{'s' * (state.without_gain != 1)}"
        return (
            f"{self._measure} has not gained in {evals} since step {state.best_step} ({state.best:.4g}): the run ends with "
            f"step {state.last_step} of {self._steps} (eval.stop_after={self._limit})"
        )

    def note(self, scored: EvalScored, next_step: int) -> None:
        """An eval has its score. `next_step`: in training, or the next one to be."""
        if not self._limit or self.state.last_step:
            return
        best = self.state.best
        if best is None or self._sign * scored.score > self._sign * best:
            self.state = msgspec.structs.replace(self._begun, best=scored.score, best_step=scored.step)
            return
        count = self.state.without_gain + 1
        last = next_step if count >= self._limit and next_step < self._steps else 0
        self.state = msgspec.structs.replace(self.state, without_gain=count, last_step=last)
