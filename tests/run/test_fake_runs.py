"""Whole runs with real processes, sockets and files, and a fake engine and backend: they end, and say the same twice."""

from __future__ import annotations

import subprocess
import sys

import pytest

from telescope.flow.replay import replay
from telescope.runlog.journal import journal_lines
from tests.run.conftest import ROOT, Start, WholeRun


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_ends_with_exactly_the_steps_asked_for_and_its_journal_says_so_again(start: Start, steps: int):
    run = start("experiment=fake", f"number_of_steps={steps}", "orchestrator.max_async_rollout=2")
    assert run.wait() == 0, run.said()
    summary = run.summary()
    assert (summary["steps"], summary["ok"]) == (steps, True)
    assert summary["exit_reason"] == f"all {steps} steps are trained"
    last = run.status()
    assert (last["state"], last["step"], last["doing"]) == ("done", steps, f"all {steps} steps are trained")
    assert [row["step"] for row in run.rows("step_metrics")] == list(range(1, steps + 1))
    assert run.left_after(30) == []
    assert str(run.directory.path) in run.said()
    assert replay(journal_lines(run.directory.journal)).disagreement is None
    if steps == 2:
        assert_the_command_says_so(run)


def assert_the_command_says_so(run: WholeRun) -> None:
    command = [sys.executable, "-m", "telescope", "replay", str(run.directory.path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "agree" in said.stdout


def trained(run: WholeRun) -> list[tuple[int, list[int], list[float]]]:
    return [(row["step"], row["rollout_ids"], row["advantages"]) for row in run.rows("batches")]


def played(run: WholeRun) -> list[tuple[int, str, int, int, float, str]]:
    return sorted(
        (row["rollout_id"], row["environment"], row["index"], row["seed"], row["reward"], row["completion"])
        for row in run.rows("rollouts")
    )


def test_two_synchronous_runs_with_one_seed_play_and_train_the_same_and_another_seed_plays_other_prompts(start: Start):
    runs = [start("experiment=fake", "number_of_steps=4", "orchestrator.max_async_rollout=0", "seed=11") for _ in range(2)]
    for run in runs:
        assert run.wait() == 0, run.said()
    assert played(runs[0]) == played(runs[1])
    assert len({reward for *_, reward, _ in played(runs[0])}) > 1
    assert sorted(trained(runs[0])) == sorted(trained(runs[1]))
    other = start("experiment=fake", "number_of_steps=4", "orchestrator.max_async_rollout=0", "seed=12")
    assert other.wait() == 0, other.said()
    assert {row[2] for row in played(other)} != {row[2] for row in played(runs[0])}


def test_weights_are_broadcast_to_the_server_at_each_step(start: Start):
    run = start("experiment=fake", "number_of_steps=3", "weight_sync.transport=gloo")
    assert run.wait() == 0, run.said()
    log = (run.directory.path / "logs" / "server-0.log").read_text(encoding="utf-8")
    for version in (1, 2, 3):
        assert f"PrepareWeights {version}: serving {version - 1}" in log
        assert f"CommitWeights {version}: serving {version}" in log


def test_no_token_lags_further_than_the_bound_says(start: Start):
    run = start(
        "experiment=fake", "number_of_steps=8", "orchestrator.max_async_rollout=1", "orchestrator.max_off_policy_steps=1"
    )
    assert run.wait() == 0, run.said()
    lags = [lag for row in run.rows("batches") for lag in row["lag_versions"]]
    assert len(lags) == 8 * 4 * 4
    assert 0 <= min(lags) <= max(lags) <= 1  # M + D - 1


def test_several_workers_servers_and_ranks_share_the_work(start: Start):
    run = start(
        "experiment=fake",
        "number_of_steps=3",
        "cluster.env_num_workers=2",
        "cluster.inference_num_workers=2",
        "cluster.trainer_num_workers=2",
    )
    assert run.wait() == 0, run.said()
    assert {row["worker"] for row in run.rows("rollouts")} == {"worker-0", "worker-1"}
    assert {row["server"] for row in run.rows("turns")} == {"server-0", "server-1"}
    commits = [(row["version"], row["server"]) for row in run.rows("weights") if row["phase"] == "committed"]
    assert sorted(commits) == [(version, f"server-{index}") for version in (1, 2, 3) for index in (0, 1)]


def test_servers_sleep_before_each_step_and_wake_with_its_version(start: Start):
    overrides = ("number_of_steps=2", "orchestrator.max_async_rollout=0", "inference.sleep_while_training=drop_weights")
    run = start("experiment=fake", *overrides, "inference.fake_token_s=0.002")
    assert run.wait() == 0, run.said()
    assert run.summary()["steps"] == 2
    said = run.directory.log("server-0").read_text()
    marks = ("asleep for step 1 ", "PrepareWeights 1:", "CommitWeights 1:", "asleep for step 2 ", "PrepareWeights 2:")
    places = [said.find(mark) for mark in marks]
    assert -1 not in places
    assert places == sorted(places)
    assert run.rows("alerts") == []


def test_each_process_sets_aside_what_it_has_loaded_before_it_begins(start: Start):
    """Else a full collection of Python's garbage stops it for a tenth of a second now and then."""
    run = start("experiment=fake", "number_of_steps=1", "debug=true")
    assert run.wait() == 0, run.said()
    for process in ("orchestrator", "worker-0", "server-0", "trainer-0"):
        assert "are set aside from garbage collection" in run.directory.log(process).read_text(encoding="utf-8"), process
