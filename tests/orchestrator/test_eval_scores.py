"""The numbers of an eval from its samples: what failed never raises a score, and what is restored goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from telescope.orchestrator.eval_scores import (
    EvalProgress,
    EvalScoring,
    EvalTally,
    SampleScore,
    describe,
    measure,
    name_metrics,
)

RULES = EvalScoring(pass_at_k=(1, 2), pass_above=0.5)


def score(reward: float, tokens: int = 10, *, truncated: bool = False, versions: tuple[int, int] = (3, 3)) -> SampleScore:
    return SampleScore(reward, {"exact": reward}, tokens, truncated, *versions)


def progress(*rewards: float | None, samples: int = 2) -> EvalProgress:
    """None: given up."""
    known = {100 + at: score(reward) for at, reward in enumerate(rewards) if reward is not None}
    return EvalProgress("own", 3, len(rewards) // samples, samples, 100, known)


def test_the_numbers_of_a_small_eval_by_hand():
    row = measure(progress(1.0, 0.0, 1.0, 1.0, 0.0, 0.0), RULES)
    assert row["reward"] == pytest.approx(0.5)
    assert row["pass_at"] == {"1": pytest.approx(0.5), "2": pytest.approx(2 / 3)}
    assert row["pass_all"] == {"1": pytest.approx(0.5), "2": pytest.approx(1 / 3)}
    assert row["reward_error"] == pytest.approx(0.5 / 3**0.5)
    assert row["reward_high"] - 0.5 == pytest.approx(4.3027 * 0.5 / 3**0.5, abs=1e-3)
    assert row["metrics"] == {"exact": pytest.approx(0.5)}


def test_a_failed_sample_counts_as_not_passed_and_with_the_lowest_reward():
    whole, failed = measure(progress(1.0, 1.0, 1.0, 0.0), RULES), measure(progress(1.0, None, 1.0, 0.0), RULES)
    assert (failed["reward"], whole["reward"]) == (0.5, 0.75)
    assert (failed["pass_at"]["1"], whole["pass_at"]["1"]) == (0.5, 0.75)
    assert (failed["pass_all"]["2"], whole["pass_all"]["2"]) == (0.0, 0.5)
    assert failed["reward_scored"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("stated", "lowest"), [(-2.0, -2.0), (None, -1.0)])
def test_the_lowest_reward_is_the_environments_or_that_of_the_eval(stated: float | None, lowest: float):
    rules = EvalScoring((1,), 0.5, stated)
    assert measure(progress(1.0, None, -1.0, 0.0), rules)["reward"] == pytest.approx((1.0 + lowest - 1.0) / 4)


def test_an_eval_of_which_nothing_was_scored_has_no_reward():
    """0 would be a high one where rewards are below it."""
    row = measure(progress(None, None, None, None), RULES)
    assert (row["reward"], row["reward_error"], row["reward_low"], row["reward_scored"]) == (None, None, None, None)
    assert (row["pass_at"]["2"], row["version_first"]) == (0.0, None)
    stated = measure(progress(None, None, None, None), replace(RULES, reward_min=-1.0))
    assert (stated["reward"], stated["reward_error"]) == (-1.0, 0.0)


def test_a_failed_sample_has_no_more_than_the_worst_that_was_seen():
    """Whatever an environment says of its lowest reward."""
    rules = replace(RULES, reward_min=0.0)
    assert measure(progress(-3.0, None, 1.0, 1.0), rules)["reward"] == pytest.approx(-1.0)


BOUNDED = EvalScoring((1,), 0.5, 0.0, reward_max=1.0)


def test_an_interval_goes_no_further_than_rewards_can():
    row = measure(progress(0.1, 0.0, 0.0, samples=1), BOUNDED)
    assert (row["reward_low"], measure(progress(0.1, 0.0, 0.0, samples=1), RULES_OF_ONE)["reward_low"] < 0.0) == (0.0, True)
    assert row["reward_high"] > row["reward"]
    assert measure(progress(0.9, 1.0, 1.0, samples=1), BOUNDED)["reward_high"] == 1.0


def test_two_prompts_that_agree_are_not_certain():
    row = measure(progress(0.0, 0.0, samples=1), BOUNDED)
    assert (row["reward_error"], row["reward_low"]) == (0.0, 0.0)
    assert row["reward_high"] == pytest.approx(3.8415 / (2 + 3.8415), abs=1e-3)  # Wilson's, of 0 in 2
    assert "reward 0.000 (95 %: 0.000 to 0.658), " in describe(
        {**row, "eval": "own", "step": 3, "state": "complete", "prompts": 2, "samples": 1, "failed": 0}
    )
    unknown = measure(progress(0.0, 0.0, samples=1), RULES_OF_ONE)
    assert (unknown["reward_low"], unknown["reward_high"]) == (None, None)


RULES_OF_ONE = EvalScoring((1,), 0.5)


def test_a_pass_is_a_reward_above_the_limit_and_not_at_it():
    assert measure(progress(0.5, 0.5001), RULES)["pass_at"]["1"] == pytest.approx(0.5)


def test_versions_and_cut_off_answers_are_said():
    one = progress(1.0, 0.0)
    one.scores[100] = score(1.0, truncated=True, versions=(2, 4))
    one.scores[101] = score(0.0, versions=(-1, -1))
    row = measure(one, RULES)
    assert (row["version_first"], row["version_last"], row["truncated"]) == (2, 4, 1)
    assert row["reward_error"] is None  # one prompt


def test_rounds_of_one_name_are_told_apart_by_their_ids_and_a_checkpoint_keeps_them():
    tally = EvalTally({"own": RULES})
    tally.begin(EvalProgress("own", 4, 1, 2, 100))
    tally.begin(EvalProgress("own", 5, 1, 2, 102))
    for rollout_id, reward in ((100, 1.0), (103, 1.0), (101, 1.0), (102, 0.0)):
        found = tally.find(rollout_id)
        assert found is not None
        found.scores[rollout_id] = score(reward)
    assert tally.find(104) is None
    saved = tally.save()
    again = EvalTally({"own": RULES})
    again.restore(saved)
    assert tally.described == "eval own of step 4: 2 of 2 samples; eval own of step 5: 2 of 2 samples"
    for each in (tally, again):
        rows = [each.end("own", step, "complete", 0, 0) for step in (4, 5)]
        assert [(row["step"], row["reward"], row["scored"]) for row in rows] == [(4, 1.0, 2), (5, 0.5, 2)]


@pytest.mark.parametrize("state", ["cut off", "changed", "left out"])
def test_an_eval_that_is_not_complete_has_no_score(state: str):
    tally = EvalTally({"own": RULES})
    if state != "left out":
        tally.begin(progress(1.0, None))
    row = tally.end("own", 3, state, 0, 1)
    assert "reward" not in row
    assert describe(row) == f"eval own of step 3: {state}"


def test_metrics_are_called_after_the_eval_and_absent_numbers_are_left_out():
    tally = EvalTally({"own": RULES})
    tally.begin(progress(1.0, None))
    row = tally.end("own", 3, "complete", 1, 0)
    named = name_metrics(row)
    assert named["eval/own/reward"] == pytest.approx(0.5)
    assert named["eval/own/pass@2"] == 1.0
    assert named["eval/own/pass^2"] == 0.0
    assert named["eval/own/metrics/exact"] == 1.0
    assert named["eval/own/failed"] == 1.0
    assert "eval/own/reward_error" not in named
    assert describe(row) == "eval own of step 3: reward 0.500, pass@1 0.500, pass@2 1.000 (1 prompts x 2, 1 failed)"
