"""Runs that end early and go on in their own directory: stopped, killed, told a step, with the real trainer and with fakes."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from telescope.runlog import kept_steps
from telescope.runlog.attempts import read_lineage
from telescope.runlog.checkpoints import steps as complete_steps
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows_of_attempt
from tests.run.conftest import ROOT, Start, WholeRun
from tests.run.plugins import breaking

FAKE = ("experiment=fake", "cluster.device=cpu")
REAL_TRAINER = (*FAKE, "backend=fsdp", "trainer.lr_scheduler=linear", "trainer.learning_rate=1e-3")
SYNCHRONOUS = "orchestrator.max_async_rollout=0"
TRAINED_ANEW = (
    "loss",
    "grad_norm",
    "entropy",
    "learning_rate",
    "kl_divergence_inference",
    "reward/policy",
    "reward/policy/rollouts",
    "reward/trained",
)


def learned(rows: list[dict[str, Any]]) -> dict[int, dict[str, float | None]]:
    return {row["step"]: {name: row["metrics"].get(name) for name in TRAINED_ANEW} for row in rows}


def batches(rows: list[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    return {row["step"]: (row["group_ids"], row["rollout_ids"], row["advantages"], row["lag_versions"]) for row in rows}


def assert_replays(run: WholeRun) -> None:
    replayed = subprocess.run(
        [sys.executable, "-m", "telescope", "replay", str(run.directory.path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_the_real_trainer_goes_on_with_the_same_losses_and_prompts_to_the_bit(start: Start):
    """Steps 3 and 4 are trained twice: by the run that never stopped, and by another attempt that begins after step 2."""
    whole = start(*REAL_TRAINER, SYNCHRONOUS, "number_of_steps=4", "checkpoint.every=2", "seed=5")
    assert whole.wait() == 0, whole.said()
    assert complete_steps(whole.directory.checkpoints) == [2, 4]
    again = start("checkpoint.resume=2", resume=whole)
    assert again.wait() == 0, again.said()
    first = RunDirectory(whole.directory.earlier_attempt(1))
    one, two = (rows_of_attempt(place, "step_metrics") for place in (first, again.directory))
    assert sorted(learned(two)) == [3, 4]
    assert {step: learned(one)[step] for step in (3, 4)} == learned(two)
    assert len({metrics["loss"] for metrics in learned(one).values()}) == 4
    one, two = (rows_of_attempt(place, "batches") for place in (first, again.directory))
    assert {step: batches(one)[step] for step in (3, 4)} == batches(two)
    prompts = [
        {(row["rollout_id"], row["index"], row["seed"], row["completion"]) for row in rows_of_attempt(place, "rollouts")}
        for place in (first, again.directory)
    ]
    assert prompts[1] < prompts[0]
    assert [row["step"] for row in again.rows("step_metrics")] == [1, 2, 3, 4]
    assert learned(again.rows("step_metrics")) == learned(rows_of_attempt(first, "step_metrics"))
    assert again.summary()["steps"] == 4
    assert_replays(again)
    assert again.left_after(30) == []


def test_sigterm_trains_the_step_to_its_end_saves_it_and_another_attempt_finishes(start: Start):
    run = start(*FAKE, "number_of_steps=12", "checkpoint.every=100", "backend.step_s=0.3")
    run.until_step(2)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 75, run.said()
    (saved,) = complete_steps(run.directory.checkpoints)
    assert saved >= 2
    assert run.summary()["exit_reason"] == f"interrupted by SIGTERM; the checkpoint of step {saved} is complete"
    assert run.summary()["steps"] == saved
    again = start(resume=run)
    assert again.wait() == 0, again.said()
    assert f"Going on after step {saved}, in attempt 2" in again.said()
    assert_whole(again, number_of_steps=12)


SLOW_TO_IMPORT = """
import signal, sys, time
from pathlib import Path

if "telescope.orchestrator" in sys.orig_argv:
    Path({flag!r}).touch()
    give_up_at = time.monotonic() + 60
    while signal.SIGTERM not in signal.sigpending() and time.monotonic() < give_up_at:
        time.sleep(0.01)
"""


@pytest.mark.slow
def test_sigterm_while_the_orchestrator_still_imports_ends_in_good_order(start: Start, tmp_path: Path):
    """The interpreter waits for the signal before its first line of ours: nothing of this attempt has begun."""
    run = start(*FAKE, "number_of_steps=4", "checkpoint.every=2")
    assert run.wait() == 0, run.said()
    flag = tmp_path / "imports"
    (tmp_path / "sitecustomize.py").write_text(SLOW_TO_IMPORT.format(flag=str(flag)))
    again = start("checkpoint.resume=2", resume=run, environ={"PYTHONPATH": str(tmp_path)})
    again.until(flag.exists, "at its imports")
    os.kill(again.process.pid, signal.SIGTERM)
    assert again.wait() == 75, again.said()
    assert again.summary()["exit_reason"] == "interrupted by SIGTERM; the checkpoint of step 2 is complete"
    assert again.left_after(30) == []


@pytest.mark.slow
def test_a_run_whose_trainer_is_killed_goes_on_by_itself_from_its_last_checkpoint(start: Start):
    run = start(*FAKE, "number_of_steps=15", "checkpoint.every=1", "backend.step_s=0.3")
    run.until(lambda: bool(complete_steps(run.directory.checkpoints)), "saved a step")
    os.kill(run.find("trainer-0").pid, signal.SIGKILL)
    assert run.wait() == 0, run.said()
    assert "The run failed: trainer-0 was killed by signal 9 (SIGKILL)." in run.said()
    assert "it goes on from its latest checkpoint (checkpoint.max_restarts)" in run.said()
    assert read_lineage(run.directory).attempt == 2
    assert_whole(run, 15)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_that_broke_on_one_of_two_ranks_is_kept_whole_and_run_again_later(start: Start, tmp_path: Path):
    """The other rank waits for it in a collective. The next attempt trains the step, and so does the replay."""
    ranks = (*REAL_TRAINER[:2], "backend=breaks", "cluster.trainer_num_workers=2", "trainer.learning_rate=1e-3")
    place = ("--config-dir", str(breaking(tmp_path / "mine")))
    run = start(*place, *ranks, SYNCHRONOUS, "number_of_steps=4", "checkpoint.every=1", "seed=5")
    assert run.wait(300) == 0, run.said()
    assert "rank 1 breaks on purpose" in run.said()
    first = RunDirectory(run.directory.earlier_attempt(1))
    parts = kept_steps.read(run.directory, 3)
    assert kept_steps.find(run.directory, 3) == first
    assert [part.header.why for part in parts] == [
        "another rank kept its part of it",
        "it ended with RuntimeError: rank 1 breaks on purpose",
    ]
    replayed = subprocess.run(
        [sys.executable, "-m", "telescope", "replay", str(run.directory.path), "--step", "3", "--device", "cpu"],
        capture_output=True, text=True, timeout=300, cwd=ROOT, check=False,
    )  # fmt: skip
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "step_00000002" in replayed.stdout  # the weights: the run's own checkpoint
    (loss,) = re.findall(r"^loss (\S+),", replayed.stdout, re.MULTILINE)
    assert float(loss) == pytest.approx(learned(run.rows("step_metrics"))[3]["loss"], rel=1e-3, abs=1e-6)


def assert_whole(run: WholeRun, number_of_steps: int) -> None:
    """All steps, each group trained once, none lost, no token older than the bound, over all attempts that count."""
    assert [row["step"] for row in run.rows("step_metrics")] == list(range(1, number_of_steps + 1))
    trained = Counter(group for row in run.rows("batches") for group in row["group_ids"])
    assert set(trained.values()) == {1}
    last = {row["group_id"]: row["state"] for row in run.rows("groups")}
    assert sorted(last) == list(range(len(last)))
    assert set(last.values()) <= {"trained", "discarded", "cancelled", "failed"}
    assert {group for group, state in last.items() if state == "trained"} == set(trained)
    prompts = {row["group_id"]: row["index"] for row in run.rows("rollouts")}
    assert len(set(prompts.values())) == len(prompts)  # none twice within the first epoch
    assert max(lag for row in run.rows("batches") for lag in row["lag_versions"]) <= 2 + 8 - 1  # M + D - 1
    summary = run.summary()
    assert (summary["steps"], summary["rollouts"]["trained"]) == (number_of_steps, number_of_steps * 16)
    assert_replays(run)
    assert run.left_after(30) == []


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_real_servers_get_the_checkpoints_weights_and_play_the_same_prompts(start: Start):
    """What vLLM samples may differ in the last bit of a logit with the company of a request, so that prompts and seeds are
    compared, and the distance of the servers' weights from the trainer's: with the base model's it would be wide."""
    whole = start(
        "experiment=reverse_letters", SYNCHRONOUS, "number_of_steps=3", "checkpoint.every=2", "inference.http=false",
        "trainer.learning_rate=0.003", "orchestrator.discard_group_zero_advantage=false",
    )  # fmt: skip
    assert whole.wait(280) == 0, whole.said()
    again = start("checkpoint.resume=2", resume=whole)
    assert again.wait(280) == 0, again.said()
    first = RunDirectory(whole.directory.earlier_attempt(1))
    one, two = (
        {(row["rollout_id"], row["index"], row["seed"]) for row in rows_of_attempt(place, "rollouts")}
        for place in (first, again.directory)
    )
    assert two
    assert two < one
    (anew,) = rows_of_attempt(again.directory, "step_metrics")
    assert anew["step"] == 3
    assert abs(anew["metrics"]["kl_divergence_inference"]) < 1e-3
    commits = [row["version"] for row in rows_of_attempt(again.directory, "weights") if row["phase"] == "committed"]
    assert commits == [2, 3]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_over_and_over_ends_with_every_step_and_no_prompt_twice(start: Start):
    chance, steps = random.Random(3), 30
    run = start(
        *FAKE, f"number_of_steps={steps}", "checkpoint.every=1", "checkpoint.keep_last=2", "backend.step_s=0.1",
        "trainer.lr_scheduler=linear", "trainer.learning_rate=1.0",
    )  # fmt: skip
    checkpoints = run.directory.checkpoints
    for number in range(2, 6):
        done = run.status().get("step") or 0
        run.until(lambda: bool(complete_steps(checkpoints)), "saved a step")
        run.until_step(min(done + chance.randint(1, 5), steps - 1))
        run.remember()
        os.kill(run.process.pid, signal.SIGKILL)  # the rest ends with its lifelines
        run.process.wait(60)
        psutil.wait_procs(run.seen, timeout=60)
        run = start(resume=run)
        run.until(lambda number=number, run=run: read_lineage(run.directory).attempt == number, f"in attempt {number}")
    assert run.wait(240) == 0, run.said()
    assert_whole(run, steps)
    rates = [row["metrics"]["learning_rate"] for row in run.rows("step_metrics")]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == steps
    assert complete_steps(run.directory.checkpoints) == [steps - 1, steps]
