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
    versions = {"version_first": None, "version_last": None}
    assert best.described == {"measure": "the reward of own", "step": 20, "score": 0.5, **versions}, "of equal ones the earlier"
    assert after(EvalMeasure("own", lower_is_better=True), *rows).described["step"] == 40  # type: ignore[index]
    assert after(EvalMeasure("own", 4), *rows).described == {
        "measure": "pass@4 of own",
        "step": 10,
        "score": 0.75,
        **versions,
    }


def test_what_is_not_complete_or_has_no_reward_has_no_score():
    rows = (row(10, 0.9, "cut off"), row(20, None), row(30, 0.9, name="other"))
    assert after(EvalMeasure("own"), *rows).described is None


def test_a_step_whose_eval_still_plays_is_kept_too():
    best = after(EvalMeasure("own"), row(10, 0.2), row(20, 0.1))
    assert best.protect(50, [("own", 40), ("other", 30)]) == {10, 40}
    best.note_eval(row(50, 0.3))
    assert best.protect(50, []) == {50}, "the one that will be complete"


def test_where_servers_are_held_a_score_of_other_weights_is_not_the_checkpoints():
    rows = (row(10, 0.2, version_first=10, version_last=10), row(20, 0.9, version_first=20, version_last=21))
    best, beside = BestCheckpoint(EvalMeasure("own"), exact=True), BestCheckpoint(EvalMeasure("own"))
    for one in (best, beside):
        one.restore((), (10, 20))
    assert [best.note_eval(each) for each in rows] == [
        "",
        "the eval own of step 20 was played by versions 20 to 21: checkpoint.keep_best does not count it for the checkpoint of "
        "step 20",
    ]
    assert best.note_eval(row(20, 0.9, name="other", version_first=21, version_last=21)) == ""
    assert [beside.note_eval(each) for each in rows] == ["", ""]
    assert best.described["step"] == 10  # type: ignore[index]
    versions = {"version_first": 20, "version_last": 21}
    assert beside.described == {"measure": "the reward of own", "step": 20, "score": 0.9, **versions}


@pytest.mark.parametrize("measure", [EvalMeasure("own"), EvalMeasure("own", 4), EvalMeasure("own", lower_is_better=True)])
def test_it_goes_on_by_what_was_written_down_whatever_the_measure_was(measure: EvalMeasure):
    rows = (row(10, 0.2), row(20, 0.4), row(30, 0.3, pass_at={}))
    again = BestCheckpoint(measure)
    again.restore(rows, (10, 20))
    again.note_checkpoint(30)
    step = 20 if measure == EvalMeasure("own") else 10
    assert again.described["step"] == step  # type: ignore[index]
    assert again.protect(40, []) == {step}
