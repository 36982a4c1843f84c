"""Which checkpoint is the best by an eval (`checkpoint.keep_best`), and which ones may yet be. Pure: deletes nothing.

A checkpoint is made at each step that the eval is due at (flow/checkpoint_schedule.py), and its score comes later: until the
eval has ended, its step may be the best one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from telescope.config.eval_measure import EvalMeasure


class StepScore(NamedTuple):
    """Of a step's eval. Versions are those that sampled its tokens; None where no sample was scored."""

    value: float
    version_first: int | None
    version_last: int | None

    def is_of(self, version: int) -> bool:
        return {self.version_first, self.version_last} <= {version, None}


class BestCheckpoint:
    """`measure`: by which steps are compared; of equal ones the earlier is the best. `exact`: a score that other weights than
    its step's had a part in does not count, as can be asked where servers are held for evals."""

    def __init__(self, measure: EvalMeasure, *, exact: bool = False) -> None:
        self._measure = measure
        self._exact = exact
        self._scores: dict[int, StepScore] = {}
        """By step."""
        self._made: set[int] = set()
        """Steps whose checkpoint is complete, or was and is deleted for a better one."""

    def note_eval(self, row: Mapping[str, Any]) -> str:
        """An eval has ended. A sentence where its score does not count."""
        value, step = self._measure.read(row), row["step"]
        if value is None:
            return ""
        score = StepScore(value, row.get("version_first"), row.get("version_last"))
        if self._exact and not score.is_of(step):
            return (
                f"the eval {self._measure.eval} of step {step} was played by versions {score.version_first} to "
                f"{score.version_last}: checkpoint.keep_best does not count it for the checkpoint of step {step}"
            )
        self._scores[step] = score
        return ""

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
        """`{"measure": "the reward of countdown", "step": 40, "score": 0.512, "version_first": 40, "version_last": 40}`; None
        where none has a score."""
        best = self._find(self._made)
        if best is None:
            return None
        score = self._scores[best]
        versions = {"version_first": score.version_first, "version_last": score.version_last}
        return {"measure": self._measure.name, "step": best, "score": score.value, **versions}

    def restore(self, rows: Iterable[Mapping[str, Any]], made: Iterable[int]) -> None:
        """In a run that goes on: by what was written down, whatever the measure was then. `rows`: of the stream `evals`, those
        that count; `made`: steps whose checkpoint is there."""
        for row in rows:
            self.note_eval(row)
        self._made.update(made)

    def _find(self, steps: set[int]) -> int | None:
        sign = -1 if self._measure.lower_is_better else 1
        scored = steps & self._scores.keys()
        return max(scored, key=lambda step: (sign * self._scores[step].value, -step), default=None)
