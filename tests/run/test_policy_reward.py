"""The headline of a run: what its rows say, whoever adds them up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.recompute_rewards import find_differences, find_other_values, recompute
from tests.run.conftest import Start


@pytest.mark.parametrize(
    "settings",
    [
        ("number_of_steps=12",),
        ("number_of_steps=1",),
        ("number_of_steps=14", "orchestrator.max_async_rollout=0"),
        ("number_of_steps=12", "orchestrator.discard_group_zero_advantage=false"),
    ],
    ids=["asynchronous", "one step", "in turns", "nothing dropped"],
)
def test_the_summary_is_what_the_rows_say(start: Start, settings: tuple[str, ...]):
    run = start("experiment=fake", *settings)
    assert run.wait() == 0, run.said()
    assert find_differences(run.directory) == []
    summary = run.summary()
    assert summary["reward_policy_last"] is not None
    assert summary["policy_last"]["rollouts"] == recompute(run.directory)["rollouts_last"] > 0


def test_every_scored_rollout_is_in_one_version(start: Start):
    run = start("experiment=fake", "number_of_steps=12")
    assert run.wait() == 0, run.said()
    scored = [row for row in run.rows("rollouts") if row["status"] == "scored"]
    versions = [row["metrics"]["reward/policy/rollouts"] for row in run.rows("policy")]
    assert sum(versions) == len(scored)
    assert [row["version"] for row in run.rows("policy")] == sorted({row["version"] for row in run.rows("policy")})


def test_a_difference_is_found(start: Start):
    run = start("experiment=fake", "number_of_steps=4")
    assert run.wait() == 0, run.said()
    told = run.summary()
    told["reward_policy_last"] += 0.01
    Path(run.directory.summary_json).write_text(json.dumps(told))
    (sentence,) = find_differences(run.directory)
    assert "reward_policy_last" in sentence


def test_the_list_of_runs_tells_the_same(start: Start):
    run = start("experiment=fake", "number_of_steps=4")
    assert run.wait() == 0, run.said()
    folder = run.directory.path.resolve()
    found = recompute(run.directory)["reward_policy_last"]
    assert found is not None
    assert list(find_other_values(folder, {folder: found})) == []
    (sentence,) = find_other_values(folder, {folder: found + 0.01})
    assert "in `runs list`" in sentence
