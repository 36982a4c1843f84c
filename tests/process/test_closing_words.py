"""What a terminal says of a run at its end: the main lines of its summary, reward first."""

from __future__ import annotations

from typing import Any

import pytest

from telescope._launch.closing_words import format_closing

SUMMARY: dict[str, Any] = {
    "steps": 60,
    "reward_policy_first": 0.36491,
    "reward_policy_last": 0.83109,
    "exact_first": 0.34,
    "exact_last": 0.81,
    "policy_first": {"rollouts": 1800, "counts": {"exact": 1200}},
    "policy_last": {"rollouts": 1160, "counts": {"exact": 800}},
    "evals": {
        "countdown": {
            "step": 60, "reward": 0.391, "reward_error": 0.018, "prompts": 512, "samples": 4, "failed": 3,
            "first": {"step": 0, "reward": 0.084},
        }
    },
    "rollouts": {"generated": 20256, "trained": 15360, "discarded": 4880, "cancelled": 24, "failed": 0, "retried": 0},
    "failures": {"grader: TimeoutError": 3},
    "updates_skipped": 0,
    "restarts": {"server-0": 1},
    "reasons": {"discarded: zero_advantage": 600, "discarded: stale": 12, "cancelled: a": 2, "cancelled: b": 1, "failed: c": 1},
    "tokens": {"completion": 120000, "trained": 90000},
    "seconds": {"training": 60.0, "timing_step_active": 44.6, "timing_waiting_for_data": 9.0},
    "attempt": 1,
    "resumed_after_step": None,
    "wall_s": 218.6,
    "exit_reason": "all 60 steps are trained",
}  # fmt: skip


def test_the_main_lines_of_a_run():
    assert format_closing(SUMMARY).splitlines() == [
        "  reward          0.365 → 0.831  (means of 1,800 and 1,160 rollouts)",
        "  exact           0.340 → 0.810  (means of 1,200 and 800 rollouts)",
        "  eval countdown  0.084 → 0.391 ± 0.018 after step 60 (512 prompts x 4, 3 failed)",
        "  steps           60",
        "  rollouts        20,256 generated, 15,360 trained, 4,880 discarded, 16 left over; of groups 600 discarded: "
        "all rewards equal, 12 discarded: stale, 2 cancelled: a and 2 more causes",
        "  failed          3 grader: TimeoutError",
        "  restarts        1 server-0",
        "  tokens          120,000 sampled (2,000/s while training), 90,000 trained",
        "  time            3:39 (the trainer computed 0:45, waited for data 0:09)",
        "  end             all 60 steps are trained",
    ]


SEVERAL: dict[str, Any] = {
    "policy_first": {"environments": {"sums": {"rollouts": 904, "reward": 0.31}}},
    "policy_last": {
        "environments": {
            "sums": {
                "rollouts": 590, "reward": 0.702, "metrics": {"exact": 0.64}, "counts": {"exact": 588},
                "completion_tokens": 34.21, "stop_reason_length_pct": 1.5, "groups": 74, "discarded": 21,
            }
        }
    },
    "environments": {
        "sums": {"attempts": 9310, "failed": 12, "failed_pct": 0.13},
        "letters": {"attempts": 0, "failed": 0, "failed_pct": 0.0},
    },
}  # fmt: skip


def test_each_of_several_environments_has_a_line():
    assert format_closing(SEVERAL).splitlines() == [
        "  env sums     0.310 → 0.702  (means of 904 and 590 rollouts); of the last exact 0.640 (n=588), 34.2 tokens, "
        "1.5 % cut off, 21 of 74 groups discarded; 12 of 9,310 attempts failed",
        "  env letters  – → –; 0 of 0 attempts failed",
    ]


def test_the_time_of_a_resumed_run_says_that_it_is_of_the_last_attempt_and_the_rest_of_all():
    *_, time, _ = format_closing({**SUMMARY, "attempt": 2, "resumed_after_step": 30}).splitlines()
    assert time == "  time            3:39 in attempt 2 alone (in all attempts the trainer computed 0:45, waited for data 0:09)"


def test_what_the_terminal_has_said_of_the_end_is_not_said_again():
    summary = {"restarts": {"server-0": 4}, "exit_reason": "server-0 was lost"}
    assert format_closing(summary).splitlines()[-1] == "  end       server-0 was lost"
    assert format_closing(summary, failed=True) == "  restarts  4 server-0"


def test_a_run_in_which_nothing_was_scored_has_no_reward_and_not_one_of_0():
    said = format_closing({"steps": 2, "reward_policy_first": None, "reward_policy_last": None, "updates_skipped": 1})
    assert said.splitlines() == ["  reward  –", "  steps   2, 1 of their updates skipped"]


def test_an_eval_that_was_played_once_has_no_change():
    facts = {"step": 20, "reward": 0.5}
    row = {**facts, "reward_error": None, "prompts": 4, "samples": 1, "failed": 0, "first": facts}
    assert format_closing({"evals": {"a": row}}) == "  eval a  0.500 after step 20 (4 prompts x 1)"


@pytest.mark.parametrize("name", sorted(SUMMARY))
def test_a_half_known_summary_is_told_as_far_as_it_goes(name: str):
    """Of another version, or edited."""
    for value in (None, "text", 7, [1], {}, {"countdown": None}, {"own": {"reward": 0.5, "reward_error": "text"}}):
        assert isinstance(format_closing({**SUMMARY, name: value}), str)
    assert format_closing({}) == ""


@pytest.mark.parametrize("name", sorted(SEVERAL))
def test_half_known_environments_are_told_as_far_as_they_go(name: str):
    for value in (None, "text", {"sums": 7}, {"environments": {"sums": {"groups": "many", "metrics": None}}}):
        assert isinstance(format_closing({**SEVERAL, name: value}), str)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"reward": 0.5, "reward_error": 0.25, "reward_low": 0.1, "reward_high": 0.9}, "0.500 ± 0.250"),
        ({"reward": 0.0, "reward_error": 0.0, "reward_low": 0.0, "reward_high": 0.6576}, "0.000 (95 %: 0.000 to 0.658)"),
        ({"reward": 1.0, "reward_error": 0.0, "reward_low": 0.3424, "reward_high": 1.0}, "1.000 (95 %: 0.342 to 1.000)"),
        ({"reward": 0.3, "reward_error": 0.0, "reward_low": None, "reward_high": None}, "0.300"),
        ({"reward": None, "reward_error": None}, "–"),
        ({"reward": True, "reward_error": 0.1}, "–"),
        ({"reward": 0.5, "reward_error": [1]}, "0.500"),
        ({"reward": 0.5, "reward_error": True, "reward_low": "text", "reward_high": True}, "0.500"),
    ],
)
def test_an_eval_whose_samples_are_all_alike_is_not_told_as_certain(row: dict[str, Any], told: str):
    row |= {"step": 3, "prompts": 2, "samples": 1, "first": {"step": 3}}
    assert format_closing({"evals": {"own": row}}) == f"  eval own  {told} after step 3 (2 prompts x 1)"
