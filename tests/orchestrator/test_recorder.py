"""What a run reports: the policy's reward over all groups of a version, not over those that were kept or were short."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import orjson
import pytest

from telescope.algorithms.reinforce_pp import ReinforcePP
from telescope.algorithms.rloo import RLOO
from telescope.flow.commands import RecordGroupState, TrainOnBatch
from telescope.flow.core import Core
from telescope.flow.settings import FlowSettings
from telescope.orchestrator.batch import Recipe, make_batch
from telescope.orchestrator.cohorts import CohortEnds, CohortMeans, Mean, ScoreMeans
from telescope.orchestrator.recorder import Recorder
from telescope.orchestrator.reward_ranges import RewardRanges
from telescope.orchestrator.rollout_store import Rollout, RolloutStore
from telescope.orchestrator.saved_state import SummaryCounters
from telescope.records import EnvironmentCard
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from telescope.runlog.writer import RunLog
from telescope.wire.messages import StepReport
from tests.orchestrator.test_rollout_store import make, order


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def counts(version: int = 0):
    made = Core(FlowSettings(number_of_steps=1, environments=(("countdown", 1.0),))).counts()
    return msgspec.structs.replace(made, version=version)


def play(recorder: Recorder, group_id: int, version: int, *states: str, reason: str = "") -> None:
    """Say that a group came to these states."""
    for state in ("queued", *states):
        recorder.record_group(RecordGroupState(group_id, state, reason if state == states[-1] else "", version))


async def test_reward_counts_discarded_rollouts_and_trained_reward_does_not(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=3, group_size=2)
    store = RolloutStore()
    safe = asyncio.Event()
    play(recorder, 0, 4, "complete", "kept")
    play(recorder, 1, 4, "complete", "discarded", reason="zero_advantage")
    play(recorder, 2, 4, "cancelled", reason="off_policy")
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
    metrics = recorder.record_step(StepReport(step=6, metrics={"loss": 0.25}, timings={"timing_step_active": 0.5}), counts(5))
    await asyncio.wait_for(safe.wait(), 60)
    log.close()
    assert metrics["reward/policy"] == 0.75
    assert [metrics[f"reward/policy/{name}"] for name in ("version", "rollouts", "unfinished")] == [4, 4, 2]
    assert metrics["sample/exact"] == 0.75
    assert metrics["sample/exact/count"] == 4
    assert [metrics[f"groups/{name}"] for name in ("begun", "cancelled", "discarded", "discarded/all_zero")] == [3, 1, 1, 0]
    assert (metrics["reward/trained"], metrics["reward/trained/rollouts"]) == (0.5, 2)
    assert metrics["staleness_mean"] == 0.5
    assert metrics["staleness_max"] == 1.0
    assert metrics["loss"] == 0.25
    assert [row["status"] for row in rows(run, "rollouts")] == ["scored"] * 4 + ["ignored"]
    (batch,) = rows(run, "batches")
    assert batch["advantages"] == [1.0, -1.0]
    assert {name: metrics[f"advantage/{name}"] for name in ("mean", "std", "min", "max", "count")} == {
        "mean": 0.0, "std": 1.0, "min": -1.0, "max": 1.0, "count": 2.0,
    }  # fmt: skip
    assert {row["temperature"] for row in rows(run, "rollouts")} == {0.7}
    assert batch["baseline_group_ids"] == [1]
    assert batch["lag_versions"] == [1, 1]  # the oldest token of each is of version 4, trained in step 6
    (step,) = rows(run, "step_metrics")
    assert step["metrics"]["reward/policy"] == 0.75
    (policy,) = rows(run, "policy")
    assert (policy["version"], policy["cut_off"], policy["metrics"]["reward/policy"]) == (4, False, 0.75)


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
        timings = {"timing_step_active": 1.5, "timing_waiting_for_data": 33.0}
        steps.append(recorder.record_step(StepReport(step=step, metrics={}, timings=timings), counts()))
    recorder.write_summary(counts(), {})
    log.close()
    assert [metrics["timing_step_total"] for metrics in steps] == [4.0, 2.0]
    assert [metrics["timing_waiting_for_data"] for metrics in steps] == [2.5, 33.0]  # the first began before the clock
    assert steps[0]["tokens_per_s/processed"] == steps[0]["tokens"] / 4
    assert steps[0]["tokens_per_s/trained"] < steps[0]["tokens_per_s/processed"]
    assert orjson.loads(run.summary_json.read_bytes())["seconds"]["training"] == 6.0
    again = Recorder(run, log, None, number_of_steps=4)
    again.resume(recorder.make_counters(), steps)
    again.write_summary(counts(), {})
    assert orjson.loads(run.summary_json.read_bytes())["seconds"]["training"] == 6.0  # of the attempt before, too


def train(recorder: Recorder, store: RolloutStore, step: int, recipe: Recipe) -> dict[str, float]:
    """Two rollouts of group 0 are trained; the step's metrics."""
    command = TrainOnBatch(step=step, group_ids=(0,), rollout_ids=((0, 1),), baseline_group_ids=(), baseline_rollout_ids=())
    recorder.record_batch(make_batch(command, store, recipe, ranks=1))
    return recorder.record_step(StepReport(step=step, metrics={}, timings={}), counts(step))


async def test_tokens_a_second_are_those_since_the_step_before(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    """Not all of the run's by the last step's time."""
    clock = [100.0]
    monkeypatch.setattr("telescope.orchestrator.recorder.time.monotonic", lambda: clock[0])
    recorder = Recorder(run, RunLog(run, "orchestrator"), None, number_of_steps=3)
    recorder.start_clock()
    found = []
    for step, (scored, ends) in enumerate(((8, 104.0), (3, 105.0), (0, 107.0)), 1):
        store = RolloutStore()
        for rollout_id in (0, 1):
            store.add(make(rollout_id, 0, float(rollout_id)))
        for rollout_id in range(scored):  # of 2 sampled tokens each
            recorder.record_rollout(make(100 * step + rollout_id, 9, 1.0), lambda: None)
        clock[0] = ends
        metrics = train(recorder, store, step, Recipe(RLOO(), group_size=2, max_tokens=10))
        found.append((metrics["tokens_per_s/sampled"], metrics["tokens_per_s/trained"], metrics["tokens_per_s/processed"]))
    assert found == [(4.0, 1.0, 2.0), (6.0, 4.0, 8.0), (0.0, 2.0, 4.0)]


@pytest.mark.parametrize("cut_off", [False, True])
async def test_what_a_filter_leaves_out_of_the_loss_keeps_its_length_in_the_metrics(run: RunDirectory, cut_off: bool):
    """Lengths are those of the rollouts, and a cut-off one is one that met its limit: not the longest of a batch, and not one
    whose tokens were masked."""
    recorder = Recorder(run, RunLog(run, "orchestrator"), None, number_of_steps=1, group_size=2)
    store = RolloutStore()
    play(recorder, 0, 0, "complete")
    for rollout_id in (0, 1):
        rollout = make(rollout_id, 0, float(rollout_id))
        ended = "length" if cut_off and rollout_id else "stop"
        rollout.answer = msgspec.structs.replace(rollout.result, finish_reason=ended, completion_tokens=2 + 5 * rollout_id)
        store.add(rollout)
        recorder.record_rollout(rollout, lambda: None)
    metrics = train(recorder, store, 1, Recipe(RLOO(overlong_filter=True), group_size=2, max_tokens=10))
    assert [metrics[f"rollouts/completion_tokens/{name}"] for name in ("min", "mean", "max")] == [2.0, 4.5, 7.0]
    assert metrics["rollouts/stop_reason_length_pct"] == (50.0 if cut_off else 0.0)
    assert metrics["truncated_fraction"] == metrics["overlong_filtered_fraction"] == (0.5 if cut_off else 0.0)


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


def score(recorder: Recorder, version: int, rewards: list[float], *, group_id: int, state: str = "kept") -> None:
    """A group that began at a version and got these rewards."""
    play(recorder, group_id, version, "complete", state)
    for place, reward in enumerate(rewards):
        recorder.record_rollout(make(group_id * 10 + place, group_id, reward), lambda: None)


def summarize(run: RunDirectory, recorder: Recorder, log: RunLog, fields: dict[str, object] | None = None) -> dict[str, object]:
    recorder.end_cohorts()
    recorder.write_summary(counts(), fields or {})
    log.close()
    return orjson.loads(run.summary_json.read_bytes())


async def test_the_summary_compares_the_first_five_versions_with_the_last_five_by_rollouts(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=12, group_size=2)
    for version in range(12):
        score(recorder, version, [version / 10] * 2, group_id=version)
    score(recorder, 11, [0.0] * 2, group_id=99)
    summary = summarize(run, recorder, log, {"exit_reason": "all 12 steps are trained"})
    assert summary["reward_policy_first"] == pytest.approx(0.2)
    assert summary["reward_policy_last"] == pytest.approx((0.7 + 0.8 + 0.9 + 1.0 + 1.1) * 2 / 12)
    assert summary["policy_last"]["versions"] == [7, 11]
    assert summary["policy_last"]["rollouts"] == 12
    assert summary["exact_last"] == 0.75  # of every rollout that `make` makes
    assert summary["exit_reason"] == "all 12 steps are trained"


async def test_a_version_that_the_runs_end_cut_off_counts_only_where_there_is_no_other(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=2, group_size=2)
    score(recorder, 0, [0.5, 0.5], group_id=0)
    play(recorder, 1, 1, "cancelled", reason="the run ended")
    recorder.record_rollout(make(10, 1, 0.0), lambda: None)  # the short one of the two
    summary = summarize(run, recorder, log)
    assert (summary["reward_policy_last"], summary["policy_last"]["unfinished"]) == (0.5, 0)
    assert [(row["version"], row["cut_off"]) for row in rows(run, "policy")] == [(0, False), (1, True)]


async def test_a_run_that_is_cut_off_in_its_first_version_says_what_is_missing(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=2, group_size=2)
    play(recorder, 1, 0, "cancelled", reason="the run ended")
    recorder.record_rollout(make(10, 1, 0.25), lambda: None)
    summary = summarize(run, recorder, log)
    assert (summary["reward_policy_last"], summary["policy_last"]["unfinished"]) == (0.25, 1)


async def test_no_version_is_told_before_all_of_its_groups_have_ended(run: RunDirectory):
    """Short answers come first: a mean of what has finished would be theirs alone."""
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=3, group_size=2)
    score(recorder, 0, [0.0, 0.0], group_id=0)
    play(recorder, 1, 0, "generating", "scoring")  # the long one
    reports = []
    for step in (1, 2, 3):
        store = RolloutStore()
        for rollout_id, reward in ((0, 1.0), (1, 0.0)):
            store.add(make(rollout_id, 0, reward))
        command = TrainOnBatch(step=step, group_ids=(0,), rollout_ids=((0, 1),), baseline_group_ids=(), baseline_rollout_ids=())
        recorder.record_batch(make_batch(command, store, Recipe(RLOO(), group_size=2, max_tokens=10), ranks=1))
        if step == 3:
            for state in ("complete", "kept"):
                recorder.record_group(RecordGroupState(1, state, "", 0))
            for rollout_id in (10, 11):
                recorder.record_rollout(make(rollout_id, 1, 1.0), lambda: None)
        reports.append(recorder.record_step(StepReport(step=step, metrics={}, timings={}), counts(step - 1)))
        recorder.write_status({})
        told = orjson.loads(run.status_json.read_bytes())
        assert (told["reward"], told["reward_rollouts"]) == ((0.5, 4) if step == 3 else (None, None))
    log.close()
    assert [report.get("reward/policy") for report in reports] == [None, None, 0.5]


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


@pytest.mark.parametrize(
    ("versions", "first", "last"),
    [(1, None, 0.1), (2, 0.1, 0.2), (3, 0.1, 0.3), (9, 0.25, 0.75), (10, 0.3, 0.8)],
)
async def test_no_version_of_a_short_run_stands_at_both_ends_of_the_summary(run: RunDirectory, versions, first, last):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=versions, group_size=1)
    for version in range(versions):
        score(recorder, version, [(version + 1) / 10], group_id=version)
    summary = summarize(run, recorder, log)
    found = (summary["reward_policy_first"], summary["reward_policy_last"])
    assert found == (first if first is None else pytest.approx(first), pytest.approx(last))


async def test_a_checkpoint_goes_on_with_the_versions_that_were_not_told(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=3, group_size=2)
    score(recorder, 0, [1.0, 0.0], group_id=0)
    play(recorder, 1, 0, "scoring")
    recorder.record_rollout(make(10, 1, 1.0), lambda: None)  # played anew after the checkpoint, with the rest of its group
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(recorder.make_counters()), type=SummaryCounters)
    following = Recorder(run, log, None, number_of_steps=3, group_size=2)
    following.resume(saved, ())
    score(following, 1, [0.0, 0.0], group_id=5)
    score(following, 2, [0.0, 1.0], group_id=6)
    summary = summarize(run, following, log)
    told = [(row["version"], row["cut_off"], row["metrics"]["reward/policy"]) for row in rows(run, "policy")]
    assert told == [(0, True, 0.5), (1, False, 0.0), (2, False, 0.5)]  # the short part of version 0 is not its policy
    assert (summary["reward_policy_first"], summary["reward_policy_last"]) == (0.0, 0.5)


async def test_a_checkpoint_between_two_versions_loses_neither(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=3, group_size=2)
    score(recorder, 0, [1.0, 0.0], group_id=0)
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(recorder.make_counters()), type=SummaryCounters)
    following = Recorder(run, log, None, number_of_steps=3, group_size=2)
    following.resume(saved, ())
    score(following, 1, [0.0, 0.0], group_id=5)
    summary = summarize(run, following, log)
    assert [(row["version"], row["cut_off"]) for row in rows(run, "policy")] == [(0, False), (1, False)]
    assert (summary["reward_policy_first"], summary["reward_policy_last"]) == (0.5, 0.0)


async def test_versions_that_end_out_of_order_stand_in_order_in_the_summary(run: RunDirectory):
    ends = CohortEnds()
    for version in (0, 1, 2, 4, 5, 6, 7, 3, 8, 9):
        means = ScoreMeans(Mean(version / 10, 1), {})
        ends.add(CohortMeans(version, 1, 0, False, means, {}))
    first, last = ends.choose()
    assert [[one.version for one in some] for some in (first, last)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


async def test_several_environments_are_told_apart(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    recorder = Recorder(run, log, None, number_of_steps=1, group_size=1, environments=("countdown", "hard"))
    score(recorder, 0, [1.0], group_id=0)
    hard = make(10, 1, 0.5)
    hard.order = msgspec.structs.replace(hard.order, prompt=msgspec.structs.replace(hard.order.prompt, environment="hard"))
    play(recorder, 1, 0, "complete", "discarded", reason="zero_advantage")
    recorder.record_rollout(hard, lambda: None)
    recorder.record_failure(Rollout(hard.order, "worker-0", 2), "no such key", "grader")
    store = RolloutStore()
    store.add(make(0, 0, 1.0))
    command = TrainOnBatch(step=1, group_ids=(0,), rollout_ids=((0,),), baseline_group_ids=(), baseline_rollout_ids=())
    recorder.record_batch(make_batch(command, store, Recipe(ReinforcePP(), group_size=1, max_tokens=10), ranks=1))
    metrics = recorder.record_step(StepReport(step=1, metrics={}, timings={}), counts(1))
    summary = summarize(run, recorder, log)
    assert [metrics[f"env/{label}/reward"] for label in ("countdown", "hard")] == [1.0, 0.5]
    assert [metrics[f"env/{label}/discarded"] for label in ("countdown", "hard")] == [0, 1]
    assert [metrics[f"env/{label}/failed_pct"] for label in ("countdown", "hard")] == [0, 50]
    assert metrics["reward/policy"] == 0.75
    assert summary["policy_last"]["environments"]["hard"]["reward"] == 0.5


async def test_a_run_without_a_step_has_no_reward_rather_than_zero(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    Recorder(run, log, None, number_of_steps=3).write_summary(counts(), {})
    log.close()
    assert orjson.loads(run.summary_json.read_bytes())["reward_policy_last"] is None


async def test_left_out_prompts_and_rewards_out_of_range_stand_in_the_summary(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    ranges = RewardRanges({"countdown": (0.0, 2.0)})
    recorder = Recorder(run, log, None, 3, ranges)
    for _ in range(2):
        recorder.record_environments((EnvironmentCard("gsm8k", {"train": 7456, "eval": 5}, "d", too_long=17),))
    store = RolloutStore()
    play(recorder, 0, 4, "complete", "kept")
    for rollout_id, reward in ((0, 1.0), (1, 3.0)):
        rollout = make(rollout_id, 0, reward)
        store.add(rollout)
        recorder.record_rollout(rollout, lambda: None)
    command = TrainOnBatch(step=6, group_ids=(0,), rollout_ids=((0, 1),), baseline_group_ids=(), baseline_rollout_ids=())
    recorder.record_batch(make_batch(command, store, Recipe(RLOO(), group_size=2, max_tokens=10), ranks=1))
    metrics = recorder.record_step(StepReport(step=6, metrics={}, timings={}), counts(5))
    found = [metrics[name] for name in ("reward/policy", "reward/policy/normalized", "reward/out_of_range")]
    assert found == [2.0, 1.0, 1.0]
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
    score(recorder, 0, [1.0], group_id=0)
    (cohort,) = recorder.make_counters().cohorts
    assert list(cohort.groups[0].scores) == [0]
    log.close()
