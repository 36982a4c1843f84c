"""Whole runs with evals beside training: their numbers against the samples' own rows, and what a kill and a stop leave."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from telescope.flow.evals import EVAL_IDS
from telescope.flow.replay import replay
from telescope.runlog.journal import journal_lines
from tests.run.conftest import Start, WholeRun

FAKE = ("experiment=fake", "cluster.device=cpu")


def scored(run: WholeRun, name: str, step: int) -> list[dict[str, Any]]:
    rows = run.rows("eval_samples")
    return [row for row in rows if (row["eval"], row["step"], row["status"]) == (name, step, "scored")]


def count_passes(rewards: list[float], k: int, above: float) -> tuple[float, float]:
    """pass@k and pass^k of one prompt, by looking at every k of its samples."""
    draws = list(itertools.combinations([reward > above for reward in rewards], k))
    return sum(map(any, draws)) / len(draws), sum(map(all, draws)) / len(draws)


def assert_numbers_follow_from_samples(run: WholeRun, row: dict[str, Any]) -> None:
    samples = scored(run, row["eval"], row["step"])
    assert len(samples) == row["scored"] == row["prompts"] * row["samples"]
    prompts: dict[int, list[float]] = {}
    for sample in samples:
        prompts.setdefault(sample["index"], []).append(sample["reward"])
    assert sorted(prompts) == list(range(row["prompts"]))
    assert row["reward"] == pytest.approx(sum(sample["reward"] for sample in samples) / len(samples), abs=1e-12)
    for k in row["pass_at"]:
        some, every = zip(*(count_passes(rewards, int(k), row["pass_above"]) for rewards in prompts.values()), strict=True)
        assert row["pass_at"][k] == pytest.approx(sum(some) / len(some), abs=1e-12)
        assert row["pass_all"][k] == pytest.approx(sum(every) / len(every), abs=1e-12)
    for name, value in row["metrics"].items():
        assert value == pytest.approx(sum(sample["metrics"][name] for sample in samples) / len(samples), abs=1e-12)
    assert row["version_first"] == min(sample["version_first"] for sample in samples)
    assert row["version_last"] == max(sample["version_last"] for sample in samples)


def test_two_evals_beside_training_and_their_numbers(start: Start):
    run = start(
        *FAKE,
        "number_of_steps=4",
        "eval.num_samples=4",
        "eval.pass_at_k=[1,2,4]",
        "+evals.countdown={every:2,num_prompts:5}",
        "+evals.letters={environment:reverse_letters,kwargs:{num_eval:3},pass_above:0.1,baseline:false}",
        "evals.letters.num_samples=1",
        "evals.letters.pass_at_k=[1]",
        "evals.letters.temperature=0",
    )
    assert run.wait() == 0, run.said()
    rows = run.rows("evals")
    due = [("countdown", 0), ("countdown", 2), ("countdown", 4), ("letters", 4)]
    assert sorted((row["eval"], row["step"]) for row in rows) == due
    assert {row["state"] for row in rows} == {"complete"}
    for row in rows:
        assert_numbers_follow_from_samples(run, row)
    first = next(row for row in rows if row["step"] == 0)
    assert (first["version_first"], first["version_last"]) == (0, 0)
    assert {(row["version_first"], row["version_last"]) for row in rows if row["step"] == 4} == {(4, 4)}
    assert {row["temperature"] for row in scored(run, "letters", 4)} == {0.0}
    assert {row["temperature"] for row in scored(run, "countdown", 4)} == {1.0}
    seeds = [{(row["index"], row["sample"], row["seed"]) for row in scored(run, "countdown", step)} for step in (0, 2, 4)]
    assert seeds[0] == seeds[1] == seeds[2]
    assert_training_has_nothing_of_them(run)
    summary = run.summary()["evals"]
    last = next(row for row in rows if row["eval"] == "letters")
    assert summary["letters"]["reward"] == last["reward"]
    assert summary["countdown"]["first"] == {"step": 0, "reward": first["reward"]}
    assert summary["countdown"]["step"] == 4
    assert "eval countdown of step 0: reward" in run.said()
    assert replay(journal_lines(run.directory.journal)).disagreement is None
    assert run.left_after(30) == []


def assert_training_has_nothing_of_them(run: WholeRun) -> None:
    assert {row["split"] for row in run.rows("rollouts")} == {"train"}
    assert {row["split"] for row in run.rows("eval_samples")} == {"eval"}
    assert min(row["rollout_id"] for row in run.rows("eval_samples")) >= EVAL_IDS
    for stream, name in (("rollouts", "rollout_id"), ("groups", "group_id"), ("rollouts", "group_id")):
        assert max(row[name] for row in run.rows(stream)) < EVAL_IDS
    assert all(max(row["rollout_ids"]) < EVAL_IDS for row in run.rows("batches"))
    summary = run.summary()
    rollouts = [row for row in run.rows("rollouts") if row["status"] == "scored"]
    assert summary["rollouts"]["generated"] == len(rollouts)
    assert summary["tokens"]["completion"] == sum(row["completion_tokens"] for row in rollouts)


def trained(run: WholeRun) -> list[tuple[int, list[int], list[float]]]:
    return sorted((row["step"], row["rollout_ids"], row["advantages"]) for row in run.rows("batches"))


def test_a_synchronous_run_trains_the_same_with_and_without_evals(start: Start):
    settings = (*FAKE, "number_of_steps=4", "orchestrator.max_async_rollout=0", "seed=11")
    plain = start(*settings)
    assert plain.wait() == 0, plain.said()
    beside = start(*settings, "eval.every=1", "eval.num_prompts=8", "eval.num_samples=2")
    assert beside.wait() == 0, beside.said()
    assert len(beside.rows("evals")) == 5
    assert trained(beside) == trained(plain)
    played = [
        {(row["rollout_id"], row["index"], row["seed"], row["reward"], row["completion"]) for row in run.rows("rollouts")}
        for run in (plain, beside)
    ]
    assert played[0] == played[1]
    policy = [[row["metrics"].get("reward/policy") for row in run.rows("step_metrics")] for run in (plain, beside)]
    assert policy[0] == policy[1]


def evaluates(run: WholeRun, step: int) -> bool:
    return f"eval countdown of step {step}" in str(run.status().get("doing"))


def assert_each_eval_is_whole_and_counted_once(run: WholeRun, steps: list[int], samples: int) -> None:
    rows = [row for row in run.rows("evals") if row["state"] == "complete"]
    assert [row["step"] for row in rows] == steps
    for row in rows:
        assert_numbers_follow_from_samples(run, row)
    kept = Counter((row["step"], row["index"], row["sample"]) for row in run.rows("eval_samples") if row["status"] == "scored")
    assert set(kept.values()) == {1}
    assert len(kept) == samples * len(steps)


def test_a_run_whose_trainer_is_killed_in_mid_eval_goes_on_and_counts_each_sample_once(start: Start):
    run = start(
        *FAKE,
        "number_of_steps=6",
        "checkpoint.every=1",
        "eval.every=3",
        "eval.baseline=false",
        "eval.num_prompts=300",
        "eval.num_samples=2",
        "inference.fake_token_s=0.02",
        "backend.step_s=0.3",
    )
    run.until(lambda: evaluates(run, 3) and (run.status().get("step") or 0) >= 4, "in the eval of step 3")
    os.kill(run.find("trainer-0").pid, signal.SIGKILL)
    assert run.wait() == 0, run.said()
    assert_each_eval_is_whole_and_counted_once(run, [3, 6], 600)
    assert replay(journal_lines(run.directory.journal)).disagreement is None


def test_a_run_that_is_stopped_in_its_last_eval_goes_on_with_it(start: Start):
    run = start(
        *FAKE,
        "number_of_steps=2",
        "checkpoint.every=1",
        "eval.every=2",
        "eval.baseline=false",
        "eval.num_prompts=200",
        "eval.num_samples=2",
        "inference.fake_token_s=0.01",
    )
    run.until(lambda: evaluates(run, 2), "in the eval of step 2")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 75, run.said()
    assert [row["state"] for row in run.rows("evals")] == ["cut off"]
    again = start(resume=run)
    assert again.wait() == 0, again.said()
    assert [(row["step"], row["state"]) for row in again.rows("evals")] == [(2, "complete")]
    assert_each_eval_is_whole_and_counted_once(again, [2], 400)
    assert again.summary()["exit_reason"] == "all 2 steps are trained"


def test_an_eval_has_a_server_of_its_own_and_one_version_while_training_goes_on(start: Start):
    run = start(*FAKE, *HELD, "number_of_steps=7", "eval.num_prompts=24")
    assert run.wait() == 0, run.said()
    rows = {row["step"]: row for row in run.rows("evals")}
    assert sorted(rows) == [0, 3, 6, 7]
    assert rows[3]["state"] == "complete"
    assert (rows[3]["version_first"], rows[3]["version_last"]) == (3, 3)
    hold, release = holds_of(run)[:2]
    assert (hold["type"], release["type"]) == ("HoldServers", "ReleaseServers")
    assert (hold["servers"], hold["version"], hold["evals"]) == (release["servers"], 3, [["countdown", 3]])
    meanwhile = [row for row in run.rows("rollouts") if row["status"] == "scored" and row["version_last"] > 3]
    assert meanwhile, "rollouts of training were sampled by later versions"
    assert any("countdown of step 3: reward" in line for line in run.said().splitlines())
    assert_numbers_follow_from_samples(run, rows[3])
    assert replay(journal_lines(run.directory.journal)).disagreement is None


HELD = (
    "cluster.inference_num_workers=3",
    "orchestrator.max_concurrent_prompts_per_server=2",
    "eval.every=3",
    "eval.num_samples=2",
    "inference.fake_token_s=0.02",
    "backend.step_s=0.3",
)


def holds_of(run: WholeRun) -> list[dict[str, Any]]:
    commands = [command for line in list(journal_lines(run.directory.journal))[1:] for command in json.loads(line)["commands"]]
    return [command for command in commands if command["type"] in ("HoldServers", "ReleaseServers")]


def test_an_eval_whose_server_is_killed_in_mid_eval_loses_no_sample_and_counts_none_twice(start: Start):
    run = start(
        *FAKE, *HELD, "number_of_steps=9", "eval.baseline=false", "eval.final=false", "eval.num_prompts=60", "eval.every=8"
    )
    run.until(lambda: evaluates(run, 8) and " on server-" in str(run.status().get("doing")), "in the eval of step 8")
    held = str(run.status()["doing"]).rpartition(" on ")[2]
    os.kill(run.find(held).pid, signal.SIGKILL)
    assert run.wait() == 0, run.said()
    assert_each_eval_is_whole_and_counted_once(run, [8], 120)
    assert f"{held} is lost, and evals go on beside training on all servers that are left" in run.said()
    assert run.summary()["evals"]["countdown"]["failed"] == 0
    assert replay(journal_lines(run.directory.journal)).disagreement is None


def saved_steps(run: WholeRun) -> list[int]:
    return sorted(int(folder.name[5:]) for folder in run.directory.checkpoints.glob("step_????????"))


def test_the_best_checkpoint_by_an_eval_outlives_later_ones_and_a_resume(start: Start):
    run = start(
        *FAKE,
        "number_of_steps=6",
        "checkpoint.every=6",
        "checkpoint.keep_last=1",
        "checkpoint.keep_best=countdown:max",
        "eval.every=2",
        "eval.num_prompts=6",
        "eval.num_samples=2",
        "backend.step_s=0.3",
    )
    assert run.wait() == 0, run.said()
    best = assert_best_is_kept(run)
    assert f"best step {best}: the reward of countdown" in listed(run)
    again = start("number_of_steps=10", resume=run)
    assert again.wait() == 0, again.said()
    assert_best_is_kept(again)
    made = {row["step"] for row in again.rows("checkpoints") if row["state"] == "complete"}
    assert made == {2, 4, 8, 10}, "and 6, which it went on from: the row of that is not in it"
    assert len(saved_steps(again)) <= 3, "the last, the best, and one whose eval still played when the last was complete"


def assert_best_is_kept(run: WholeRun) -> int:
    scores = {row["step"]: row["reward"] for row in run.rows("evals") if row["state"] == "complete" and row["step"]}
    best = run.summary()["best_checkpoint"]
    assert best["score"] == max(scores.values()) == scores[best["step"]]
    assert {best["step"], max(scores)} <= set(saved_steps(run))
    assert set(saved_steps(run)) <= set(scores), "one is made wherever the eval is due"
    return int(best["step"])


def listed(run: WholeRun) -> str:
    asked = [sys.executable, "-m", "telescope", "runs", "list", str(run.directory.path)]
    return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=100).stdout


def test_a_run_whose_eval_gains_no_more_ends_saved_and_done(start: Start):
    """No reward of countdown is above 1, and none of `never` is above 0."""
    run = start(
        *FAKE,
        "number_of_steps=40",
        "checkpoint.every=40",
        "eval.stop_after=2",
        "+evals.never={environment:countdown,every:1,num_prompts:1,max_tokens:1}",
        "backend.step_s=0.3",
    )
    assert run.wait() == 0, run.said()
    summary = run.summary()
    last = summary["steps"]
    assert last < 40
    assert summary["exit_reason"].startswith("the reward of never has not gained in 2 evals since step ")
    assert summary["exit_reason"].endswith(f"the run ends with step {last} of 40 (eval.stop_after=2)")
    assert saved_steps(run) == [last]
    assert max(row["step"] for row in run.rows("evals") if row["state"] == "complete") == last
    assert replay(journal_lines(run.directory.journal)).disagreement is None
    again = start(resume=run)
    assert again.wait() != 0
    assert f"has ended with step {last} by eval.stop_after=2" in again.said()


def test_a_run_without_evals_has_no_column_of_them(start: Start):
    run = start(*FAKE, "number_of_steps=1")
    assert run.wait() == 0, run.said()
    told = [run.summary(), run.status(), run.status()["counts"], *(row["metrics"] for row in run.rows("step_metrics"))]
    assert [name for one in told for name in one if "eval" in name] == []
