"""What a run reports: the policy's reward over everything scored, not over the groups that happened to be kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from telescope.algorithms.rloo import RLOO
from telescope.flow.commands import TrainOnBatch
from telescope.flow.core import Core
from telescope.flow.settings import FlowSettings
from telescope.orchestrator.batch import Recipe, make_batch
from telescope.orchestrator.recorder import Recorder
from telescope.orchestrator.rollout_store import Rollout, RolloutStore
from telescope.orchestrator.scores import RewardRanges
from telescope.records import EnvironmentCard
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from telescope.runlog.writer import RunLog
from telescope.wire.messages import StepReport
from tests.orchestrator.test_rollout_store import make, order


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def counts():
    return Core(FlowSettings(number_of_steps=1, environments=(("countdown", 1.0),))).counts()


async def test_reward_counts_discarded_rollouts_and_trained_reward_does_not(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=3)
    store = RolloutStore()
    safe = asyncio.Event()
    for rollout_id, group_id, reward in ((0, 0, 1.0), (1, 0, 0.0), (2, 1, 1.0), (3, 1, 1.0)):
        rollout = make(rollout_id, group_id, reward)
        store.add(rollout)
        recorder.record_rollout(rollout, safe.set)
    given_up = make(4, 2, 0.0)
    given_up.taken = False
    recorder.record_rollout(given_up, safe.set)  # written, not counted
    command = TrainOnBatch(
        step=6, group_ids=(0,), rollout_ids=((0, 1),), baseline_group_ids=(1,), baseline_rollout_ids=((2, 3),)
    )
    recorder.record_batch(make_batch(command, store, Recipe(RLOO(), group_size=2, max_tokens=10), ranks=1))
    metrics = recorder.record_step(StepReport(step=6, metrics={"loss": 0.25}, timings={"timing_step_active": 0.5}), counts())
    await asyncio.wait_for(safe.wait(), 60)
    log.close()
    assert metrics["reward/mean"] == 0.75
    assert metrics["sample/exact"] == 0.75
    assert metrics["reward/trained_mean"] == 0.5
    assert metrics["staleness_mean"] == 0.5
    assert metrics["staleness_max"] == 1.0
    assert metrics["loss"] == 0.25
    assert [row["status"] for row in rows(run, "rollouts")] == ["scored"] * 4 + ["ignored"]
    (batch,) = rows(run, "batches")
    assert batch["advantages"] == [1.0, -1.0]
    assert batch["baseline_group_ids"] == [1]
    assert batch["lag_versions"] == [1, 1]  # the oldest token of each is of version 4, trained in step 6
    (step,) = rows(run, "step_metrics")
    assert step["metrics"]["reward/mean"] == 0.75


async def test_time_counts_from_when_generation_may_begin(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr("telescope.orchestrator.recorder.time.monotonic", lambda: clock[0])
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=2)
    clock[0] = 130.0  # the engine has started
    recorder.start_clock()
    clock[0] = 131.0
    recorder.start_clock()  # nothing begins twice
    steps = []
    for step, ended in ((1, 134.0), (2, 136.0)):
        store = RolloutStore()
        for rollout_id, reward in ((0, 1.0), (1, 0.0)):
            store.add(make(rollout_id, 0, reward))
        recorder.record_batch(
            make_batch(
                TrainOnBatch(step=step, group_ids=(0,), rollout_ids=((0, 1),), baseline_group_ids=(), baseline_rollout_ids=()),
                store, Recipe(RLOO(), group_size=2, max_tokens=10), ranks=1,
            )
        )  # fmt: skip
        clock[0] = ended
        steps.append(recorder.record_step(StepReport(step=step, metrics={}, timings={}), counts()))
    recorder.write_summary(counts(), {})
    log.close()
    assert [metrics["timing_step_total"] for metrics in steps] == [4.0, 2.0]
    assert steps[0]["tokens_per_s"] == steps[0]["tokens"] / 4
    assert orjson.loads(run.summary_json.read_bytes())["seconds"]["training"] == 6.0


async def test_an_attempt_that_was_told_to_stop_is_cancelled_and_one_that_failed_is_an_error(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=1)
    told, failed = Rollout(order(0), "worker-0", 1, cancelled=True), Rollout(order(1), "worker-0", 2)
    recorder.record_failure(told, "cancelled: its group is cancelled: off_policy", "infrastructure")
    recorder.record_failure(failed, "no such key", "grader")
    log.close()
    assert [(row["rollout_id"], row["status"], row.get("failure")) for row in rows(run, "rollouts")] == [
        (0, "cancelled", None), (1, "error", "grader"),
    ]  # fmt: skip


@pytest.mark.parametrize(("metrics", "said"), [
    ({"update_skipped": 1.0}, "step 6: 1 update left out, as a gradient was not a finite number"),
    ({"update_skipped": 1.0, "updates_not_finite": 0.0}, "step 6: 1 update left out, as filters left nothing to train"),
    ({"update_skipped": 3.0, "updates_not_finite": 2.0},
     "step 6: 2 updates left out, as a gradient was not a finite number; 1 update left out, as filters left nothing to train"),
])  # fmt: skip
async def test_an_update_that_was_left_out_is_alerted_and_counted(run: RunDirectory, metrics: dict[str, float], said: str):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=3)
    store = RolloutStore()
    for rollout_id, reward in ((0, 1.0), (1, 0.0)):
        store.add(make(rollout_id, 0, reward))
    command = TrainOnBatch(step=6, group_ids=(0,), rollout_ids=((0, 1),), baseline_group_ids=(), baseline_rollout_ids=())
    recorder.record_batch(make_batch(command, store, Recipe(RLOO(), group_size=2, max_tokens=10), ranks=1))
    recorder.record_step(StepReport(step=6, metrics=metrics, timings={}), counts())
    recorder.write_summary(counts(), {})
    log.close()
    assert orjson.loads(run.summary_json.read_bytes())["updates_skipped"] == metrics["update_skipped"]
    assert rows(run, "alerts")[0]["message"] == said


async def test_the_summary_compares_the_first_five_steps_with_the_last_five(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=12)
    recorder.history = [{"reward/mean": step / 10, "sample/exact": step / 20} for step in range(1, 13)]
    recorder.write_summary(counts(), {"exit_reason": "all 12 steps are trained"})
    log.close()
    summary = orjson.loads(run.summary_json.read_bytes())
    assert summary["steps"] == 12
    assert summary["reward_mean_first"] == pytest.approx(0.3)
    assert summary["reward_mean_last"] == pytest.approx(1.0)
    assert summary["exact_last"] == pytest.approx(0.5)
    assert summary["exit_reason"] == "all 12 steps are trained"


async def test_the_status_has_the_latest_alert_that_the_terminal_shall_show(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=3)
    recorder.alert("error", "checkpoint", "the checkpoint of step 6 failed")
    recorder.alert("warning", "server-0", "server-0 is given up and started again", shown=False)
    recorder.write_status({})
    log.close()
    status = orjson.loads(run.status_json.read_bytes())
    assert (status["alerts"], status["alert"]) == (1, "the checkpoint of step 6 failed")
    assert len(rows(run, "alerts")) == 2


async def test_the_status_keeps_the_reward_of_the_step_before_where_nothing_was_scored_since(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=3)
    recorder.write_status({})
    assert orjson.loads(run.status_json.read_bytes())["reward"] is None
    recorder.history = [{"reward/mean": 0.5, "sample/exact": 0.25, "tokens_per_s": 7.0}, {"tokens_per_s": 9.0}]
    recorder.write_status({"queue": 3})
    log.close()
    status = orjson.loads(run.status_json.read_bytes())
    assert (status["step"], status["reward"], status["exact"], status["tokens_per_s"], status["queue"]) == (
        2,
        0.5,
        0.25,
        9.0,
        3,
    )


@pytest.mark.parametrize(
    ("steps", "over", "first", "last"),
    [(1, 1, None, 0.1), (2, 1, 0.1, 0.2), (3, 1, 0.1, 0.3), (9, 4, 0.25, 0.75), (10, 5, 0.3, 0.8)],
)
async def test_no_step_of_a_short_run_stands_at_both_ends_of_the_summary(run: RunDirectory, steps, over, first, last):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=steps)
    recorder.history = [{"reward/mean": step / 10} for step in range(1, steps + 1)]
    recorder.write_summary(counts(), {})
    log.close()
    summary = orjson.loads(run.summary_json.read_bytes())
    found = (summary["mean_over_steps"], summary["reward_mean_first"], summary["reward_mean_last"])
    assert found == (over, first if first is None else pytest.approx(first), pytest.approx(last))


async def test_a_run_without_a_step_has_no_reward_rather_than_zero(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    Recorder(run, log, None, number_of_steps=3).write_summary(counts(), {})
    log.close()
    assert orjson.loads(run.summary_json.read_bytes())["reward_mean_last"] is None


async def test_left_out_prompts_and_rewards_out_of_range_stand_in_the_summary(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    ranges = RewardRanges({"countdown": (0.0, 2.0)})
    recorder = Recorder(run, log, None, 3, ranges)
    for _ in range(2):
        recorder.record_environments((EnvironmentCard("gsm8k", {"train": 7456, "eval": 5}, "d", too_long=17),))
    store = RolloutStore()
    for rollout_id, reward in ((0, 1.0), (1, 3.0)):
        rollout = make(rollout_id, 0, reward)
        store.add(rollout)
        recorder.record_rollout(rollout, lambda: None)
    command = TrainOnBatch(step=6, group_ids=(0,), rollout_ids=((0, 1),), baseline_group_ids=(), baseline_rollout_ids=())
    recorder.record_batch(make_batch(command, store, Recipe(RLOO(), group_size=2, max_tokens=10), ranks=1))
    metrics = recorder.record_step(StepReport(step=6, metrics={}, timings={}), counts())
    assert (metrics["reward/mean"], metrics["reward/normalized_mean"], metrics["reward/out_of_range"]) == (2.0, 1.0, 1.0)
    recorder.write_summary(counts(), {})
    log.close()
    summary = orjson.loads(run.summary_json.read_bytes())
    assert summary["prompts"] == {"gsm8k": {"kept": 7456, "too_long": 17}}
    assert summary["rewards_out_of_range"] == {"countdown": 1}
    told = [row["message"] for row in rows(run, "alerts")]
    assert told[0].startswith("17 of 7473 prompts of gsm8k are longer than ")
    assert len(told) == 2


async def test_a_scored_rollout_is_written_and_called_safe_once_the_recorder_catches_up(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=1)
    safe: list[int] = []
    for rollout_id in (0, 1, 2):
        recorder.record_rollout(make(rollout_id, 0, 1.0), lambda id=rollout_id: safe.append(id))
    assert recorder.behind
    recorder.catch_up(2)
    assert recorder.behind
    assert recorder.tokens["completion"] == 2 * make(0, 0, 1.0).result.completion_tokens
    assert recorder.last_row == 3  # whoever asks how far the rows have come gets all that had come before
    assert not recorder.behind
    log.close()
    await asyncio.sleep(0)
    assert safe == [0, 1, 2]
    assert [row["rollout_id"] for row in rows(run, "rollouts")] == [0, 1, 2]


async def test_a_checkpoint_counts_rollouts_that_were_put_off(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=1)
    recorder.record_rollout(make(7, 0, 1.0), lambda: None)
    assert recorder.make_counters(frozenset({7})).tallied == (7,)
    log.close()
