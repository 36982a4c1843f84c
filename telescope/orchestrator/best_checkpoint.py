"""Which checkpoint is the best by an eval (`checkpoint.keep_best`), and which ones may yet be. Pure: deletes nothing.

A checkpoint is made at each step that the eval is due at (flow/checkpoint_schedule.py), and its score comes later: until the
eval has ended, its step may be the best one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from telescope.config.eval_measure import EvalMeasure
from telescope.orchestrator.saved_state import SavedBest


class BestCheckpoint:
    """`measure`: by which steps are compared; of equal ones the earlier is the best."""

    def __init__(self, measure: EvalMeasure) -> None:
        self._measure = measure
        self._scores: dict[int, float] = {}
        """By step."""
        self._made: set[int] = set()
        """Steps whose checkpoint is complete, or was and is deleted for a better one."""

    def note_eval(self, row: Mapping[str, Any]) -> None:
        """An eval has ended."""
        score = self._measure.read(row)
        if score is not None:
            self._scores[row["step"]] = score

    def note_checkpoint(self, step: int) -> None:
        """It is complete."""
        self._made.add(step)

    def protect(self, completing: int, under_way: Iterable[tuple[str, int]]) -> frozenset[int]:
        """Steps that are not to be deleted when the checkpoint of `completing` is complete. `under_way`: (name, step) of
        evals."""
        best = self._find(self._made | {completing})
        return frozenset([*([best] if best else []), *(step for name, step in under_way if name == self._measure.eval)])

    @property
    def described(self) -> dict[str, Any] | None:
        """`{"measure": "the reward of countdown", "step": 40, "score": 0.512}`; None where none has a score."""
        best = self._find(self._made)
        return {"measure": self._measure.name, "step": best, "score": self._scores[best]} if best else None

    def save(self) -> SavedBest:
        return SavedBest(self._measure.name, self._measure.lower_is_better, dict(self._scores), tuple(sorted(self._made)))

    def restore(self, saved: SavedBest, step: int) -> None:
        """At the checkpoint of `step`, which was being written then. Scores by another measure say nothing."""
        self._made = {*saved.made, step}
        if (saved.measure, saved.lower_is_better) == (self._measure.name, self._measure.lower_is_better):
            self._scores = dict(saved.scores)

    def _find(self, steps: set[int]) -> int | None:
        sign = -1 if self._measure.lower_is_better else 1
        scored = steps & self._scores.keys()
        return max(scored, key=lambda step: (sign * self._scores[step], -step), default=None)
