"""Which checkpoint an eval keeps: the best one, and those whose score is not known yet."""

from __future__ import annotations

from typing import Any

import pytest

from telescope.config.eval_measure import EvalMeasure
from telescope.orchestrator.best_checkpoint import BestCheckpoint


def row(step: int, reward: float | None, state: str = "complete", name: str = "own", **more: Any) -> dict[str, Any]:
    return {"eval": name, "step": step, "state": state, "reward": reward, "pass_at": {"1": 0.5, "4": 0.75}, **more}


def after(measure: EvalMeasure, *rows: dict[str, Any], made: tuple[int, ...] = (10, 20, 30, 40)) -> BestCheckpoint:
    best = BestCheckpoint(measure)
    for step in made:
        best.note_checkpoint(step)
    for one in rows:
        best.note_eval(one)
    return best


@pytest.mark.parametrize(
    ("text", "measure"),
    [
        ("own:max", EvalMeasure("own")),
        ("own:min", EvalMeasure("own", lower_is_better=True)),
        ("a-b_2/pass@4:max", EvalMeasure("a-b_2", 4)),
    ],
)
def test_how_it_is_written(text: str, measure: EvalMeasure):
    assert EvalMeasure.parse(text) == measure


@pytest.mark.parametrize("text", ["own", "own:best", "own/pass@0:max", "own/pass@:max", ":max", "own/reward:max"])
def test_what_is_not_a_measure_is_refused(text: str):
    with pytest.raises(ValueError, match="must be an eval and which way is better"):
        EvalMeasure.parse(text)


def test_the_best_is_the_one_with_the_best_score_and_a_checkpoint():
    rows = (row(0, 0.9), row(10, 0.2), row(20, 0.5), row(25, 0.8), row(30, 0.5), row(40, 0.1))
    best = after(EvalMeasure("own"), *rows)
    assert best.described == {"measure": "the reward of own", "step": 20, "score": 0.5}, "of equal ones the earlier"
    assert after(EvalMeasure("own", lower_is_better=True), *rows).described["step"] == 40  # type: ignore[index]
    assert after(EvalMeasure("own", 4), *rows).described == {"measure": "pass@4 of own", "step": 10, "score": 0.75}


def test_what_is_not_complete_or_has_no_reward_has_no_score():
    rows = (row(10, 0.9, "cut off"), row(20, None), row(30, 0.9, name="other"))
    assert after(EvalMeasure("own"), *rows).described is None


def test_a_step_whose_eval_still_plays_is_kept_too():
    best = after(EvalMeasure("own"), row(10, 0.2), row(20, 0.1))
    assert best.protect(50, [("own", 40), ("other", 30)]) == {10, 40}
    best.note_eval(row(50, 0.3))
    assert best.protect(50, []) == {50}, "the one that will be complete"


def test_it_goes_on_where_a_checkpoint_was_made():
    before = after(EvalMeasure("own"), row(10, 0.2), row(20, 0.4), made=(10, 20))
    again = BestCheckpoint(EvalMeasure("own"))
    again.restore(before.save(), 30)
    again.note_eval(row(30, 0.3))
    assert again.described == {"measure": "the reward of own", "step": 20, "score": 0.4}
    other = BestCheckpoint(EvalMeasure("own", 4))
    other.restore(before.save(), 30)
    assert other.described is None, "scores by another measure say nothing"
    other.note_eval(row(30, 0.3))
    assert other.described["step"] == 30  # type: ignore[index]
