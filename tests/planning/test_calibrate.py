"""What a run says of its own times, and whether it tells those of runs that it is not."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.flow.predict import ALWAYS, LIMIT, REAL, around, calibrated, off, play
from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.replay import encode_line, encode_opening
from telescope.flow.settings import FlowSettings
from telescope.planning.calibration import (
    PROCESSES,
    FittedEngine,
    HostCosts,
    TimeOverlap,
    Uncalibratable,
    _count_equal_shares,
    _find_host_costs,
    _fit_line,
    _fit_times,
    _JournalFacts,
    calibrate,
    fit_engine,
    least_squares,
    measure_processor_step_s,
)
from telescope.planning.latencies import EngineTimes, Latencies, empirical
from telescope.planning.simulator import SimulatedCluster, SimulatedRun, SimulatedStep, simulate
from telescope.runlog.journal import Journal
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from telescope.runlog.writer import RunLog

LENGTHS = FlowSettings(
    number_of_steps=20,
    prompts_batch_size_for_trainer=8,
    group_size=4,
    max_async_rollout=2,
    max_concurrent_prompts_per_server=32,
    environments=(("task", 1.0),),
    discard_group_zero_advantage=False,
)
TRUTH = Latencies(
    prompt_tokens=empirical([10, 20, 40]),
    completion_tokens=empirical([20, 40, 60, 120]),
    engine=EngineTimes(step_s=0.02, sequence_s=0.0005, prefill_token_s=0.0002),
    request_s=0.002,
    train_step_s=0.4,
    train_token_s=0.0005,
    sync_s=0.06,
    pause_s=0.01,
)
SPENT = {"orchestrator": 0.002, "workers": 0.001, "servers": 0.003}
"""Processor seconds that a rollout costs where the truth is known; an engine's step costs 18 ms, a token 0.45 ms."""


def recorded(folder: Path, settings: FlowSettings, *, processor_seconds: bool = True) -> tuple[RunDirectory, SimulatedRun]:
    """A run directory of a run whose times are known: the simulator's, written as the orchestrator writes a real one's."""
    run = RunDirectory.create(folder)
    journal, log = Journal(run.journal), RunLog(run, "orchestrator")
    journal.append(encode_opening(settings))
    placed: dict[str, tuple[float, int, str]] = {}
    prompts: dict[str, int] = {}
    trained: list[float] = []

    def watch(now: float, event: seen.AnyEvent, ordered: Sequence[do.AnyCommand]) -> None:
        journal.append(encode_line(now, event, list(ordered)))
        match event:
            case seen.TurnStarted(request_id=request_id, prompt_tokens=tokens):
                prompts[request_id] = tokens
            case seen.TurnDone(request_id=request_id, rollout_id=rollout_id, completion_tokens=tokens, finish_reason=reason):
                at, number, server = placed[request_id]
                log.append(
                    "turns",
                    {
                        "request_id": request_id, "rollout_id": rollout_id, "turn": 0, "server": server,
                        "prompt_tokens": prompts[request_id], "completion_tokens": tokens, "cached_tokens": 0 if number % 4 == 0
                        else prompts[request_id] - 1, "finish_reason": reason, "placed_ns": 10**9 + round(at * 1e9),
                        "done_ns": 10**9 + round(now * 1e9), "queued_s": 0.0, "generated_s": now - at - TRUTH.request_s,
                    },
                )  # fmt: skip
            case seen.StepDone():
                trained.append(now)
        for command in ordered:
            if isinstance(command, do.PlaceRequest):
                placed[command.request_id] = now, len(placed), command.server

    outcome = simulate(settings, SimulatedCluster(servers=1, ranks=1, server_capacity=128), TRUTH, watch)
    before: SimulatedStep | None = None
    for number, step in enumerate(outcome.steps, start=1):
        scores = step.scores - (before.scores if before else 0)
        engine_steps = step.engine_steps - (before.engine_steps if before else 0.0)
        sampled = step.sampled - (before.sampled if before else 0.0)
        active = step.done_s - step.begun_s
        metrics = {"timing_step_active": active, "timing_forward_total": TRUTH.train_token_s * step.tokens}
        if processor_seconds:
            metrics |= {f"processor_s/{part}": seconds * scores for part, seconds in SPENT.items()}
            metrics |= {"processor_s/engines": 0.018 * engine_steps + 0.00045 * sampled, "processor_s/trainers": active / 2}
        log.append("step_metrics", {"step": number, "metrics": metrics})
        before = step
    log.close()
    journal.close()
    return run, outcome


def test_times_that_are_known_are_found_again_and_tell_those_of_other_configurations(tmp_path: Path) -> None:
    """No clock but the simulator's: 20 ms a step, 0.5 ms a sequence, 0.4 s and 0.5 ms a token for the trainer."""
    run, outcome = recorded(tmp_path / "run", LENGTHS)
    found = calibrate(run, ranks=1)
    assert found.step_s == pytest.approx(outcome.step_s)
    for sequences in (32, 64):  # as many as ran there; 55 cached tokens each
        rate = found.latencies.engine.tokens_per_s(sequences, 55 * sequences)
        assert rate == pytest.approx(TRUTH.engine.tokens_per_s(sequences), rel=0.2)
    assert found.latencies.train_step_s == pytest.approx(0.4, rel=0.02)
    assert found.latencies.train_token_s == pytest.approx(0.0005, rel=0.02)
    assert found.latencies.sync_s == pytest.approx(0.06)
    costs = found.host_costs
    assert costs is not None
    assert costs.rollout_s == pytest.approx(0.006)
    assert costs.training_share == pytest.approx(0.5)
    assert costs.engine_step_s == pytest.approx(0.018, rel=0.3)
    assert costs.engine_token_s == pytest.approx(0.00045, rel=0.3)
    cluster = SimulatedCluster(servers=1, ranks=1, server_capacity=128)
    for name, change in OTHERS.items():
        settings = msgspec.structs.replace(LENGTHS, seed=7, **change)
        other, real = recorded(tmp_path / name, settings)
        told = simulate(settings, cluster, found.latencies)
        assert told.step_s == pytest.approx(real.step_s, rel=0.12), name
        spent = measure_processor_step_s([row["metrics"] for row in rows(other, "step_metrics")])
        assert costs.estimate_step_s(told.steps) == pytest.approx(spent, rel=0.12), name


OTHERS: dict[str, dict[str, Any]] = {
    "synchronous": {"max_async_rollout": 0},
    "one_ahead": {"max_async_rollout": 1},
    "half_batch": {"prompts_batch_size_for_trainer": 4},
    "few_lanes": {"max_concurrent_prompts_per_server": 4},
    "large_groups": {"group_size": 8},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_real_runs_cost_the_processor_seconds_that_calibrations_beside_them_tell(tmp_path: Path) -> None:
    """vLLM and FSDP on shared cores: the median step of a synchronous run and of one of half the batch, within 15 %. What a
    step costs changes with what else the machine does: a run is told by the calibrations before and after it, and one that is
    missed is played again beside another one, twice at most. A gap of the model would be there each time."""
    overrides = {name: tuple(words) for name, *words in REAL}
    beside = [calibrated(play(tmp_path, "calibrated-0", overrides["calibrated"]))]
    left, missed = ["synchronous", "half_batch"], list[tuple[str, float]]()
    for turn in (1, 2, 3):
        runs = {name: play(tmp_path, f"{name}-{turn}", overrides[name]) for name in left}
        beside.append(calibrated(play(tmp_path, f"calibrated-{turn}", overrides["calibrated"])))
        told = {name: off(beside[-2:], run) for name, run in runs.items()}
        left = [name for name in left if abs(told[name]) > LIMIT]
        missed += [(name, told[name]) for name in left]
        if not left:
            return
    raise AssertionError(f"told off by {missed}")


def test_a_run_is_told_by_the_calibrations_next_to_it() -> None:
    names = ["calibrated", "a", "b", "calibrated_again", "c", "calibrated_at_last"]
    assert [around(names, place) for place in range(len(names))] == [
        ["calibrated_again"],
        ["calibrated", "calibrated_again"],
        ["calibrated", "calibrated_again"],
        ["calibrated", "calibrated_at_last"],
        ["calibrated_again", "calibrated_at_last"],
        ["calibrated_again"],
    ]


def test_a_run_that_does_not_say_its_processor_time_is_calibrated_without(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path / "run", msgspec.structs.replace(LENGTHS, number_of_steps=3), processor_seconds=False)
    found = calibrate(run, ranks=1)
    assert (found.host_costs, found.processor_step_s) == (None, None)
    assert measure_processor_step_s([{"processor_s/workers": 1.0}]) is None


def test_host_costs_are_added_up_over_what_lies_between_the_ends_of_two_train_steps() -> None:
    """2 ms a rollout, 10 ms an engine's step, 0.1 ms a token, and half of a trainer's 4 and 6 seconds."""
    costs = HostCosts(rollout_s=0.002, engine_step_s=0.01, engine_token_s=0.0001, training_share=0.5)
    first = STEP
    second = msgspec.structs.replace(first, begun_s=10.0, done_s=16.0, sampled=5000.0, engine_steps=300.0, scores=150)
    spent = (0.002 * 50 + 0.01 * 100 + 0.0001 * 1000 + 2.0, 0.002 * 100 + 0.01 * 200 + 0.0001 * 4000 + 3.0)
    assert costs.estimate_step_s([first]) == pytest.approx(spent[0])
    assert costs.estimate_step_s([first, second]) == pytest.approx(sum(spent) / 2)


def test_an_engines_step_costs_what_it_takes_alone_and_tokens_have_the_rest_of_what_was_spent() -> None:
    """Two train steps behind one for warming up: 300 engine steps of 10 ms, 3,000 tokens, 9 seconds of the engines."""
    journal = _JournalFacts(
        trains={1: (0.0, 100), 2: (10.0, 100), 3: (20.0, 100)}, trained={1: 4.0, 2: 14.0, 3: 26.0}, scored=[3.0, 11.0, 25.0],
        answered={"early": (2.0, 500), "a": (12.0, 2000), "b": (22.0, 1000)},
    )  # fmt: skip
    row = {f"processor_s/{part}": seconds for part, seconds in zip(PROCESSES, (1.0, 2.0, 3.0, 4.5, 5.0), strict=True)}
    times = EngineTimes(step_s=0.01)
    fitted = FittedEngine(times, 0.0, 0.0, {"early": 50.0, "a": 100.0, "b": 200.0})
    found = _find_host_costs(journal, dict.fromkeys((1, 2, 3), row), fitted)
    # the trainers: 10 seconds of processors in 4 + 6 of training
    assert found == HostCosts(rollout_s=12.0 / 2, engine_step_s=0.01, engine_token_s=6.0 / 3000, training_share=1.0)
    slow = FittedEngine(EngineTimes(step_s=1.0), 0.0, 0.0, fitted.steps)
    found = _find_host_costs(journal, dict.fromkeys((1, 2, 3), row), slow)
    assert found is not None
    assert (found.engine_step_s, found.engine_token_s) == (9.0 / 300, 0.0)  # no more than was spent in all


STEP = SimulatedStep(
    begun_s=1.0, done_s=5.0, committed_s=6.0, rollouts=40, tokens=2000, sampled=1000.0, generating_s=4.0, paused_s=0.0,
    sequence_s=40.0, engine_steps=100.0, scores=50,
)  # fmt: skip


def test_what_a_step_takes_by_itself_is_what_requests_saw_that_ran_alone() -> None:
    """3 ms a step and 0.5 ms a sequence; 100 requests on a crowded server that took longer the more there were, and six alone.
    Least squares over all of them says that a step takes nothing."""
    random = np.random.default_rng(0)
    crowd = random.uniform(40, 120, 100)
    features = np.array([[10.0, 10 * beside] for beside in (*crowd, *[1.0] * 6)])
    took = features @ [0.003, 0.0005] * np.array([*(crowd / 60), *[1.0] * 6])
    assert least_squares(features, took)[0] == 0.0
    assert _fit_times(features, took)[0] == pytest.approx(0.0035)


@pytest.mark.timeout(900)
def test_a_plan_from_a_run_names_its_times(tmp_path: Path) -> None:
    play(tmp_path, "run", ("experiment=fake", "number_of_steps=3", "inference.fake_token_s=0.01", "backend.step_s=0.1"))
    command = [sys.executable, "-m", "telescope", "plan", "experiment=fake", *ALWAYS, "--calibrate", str(tmp_path / "run")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "Calibrated on " in answer.stdout
    assert "Simulated (3 steps): a step takes " in answer.stdout
    assert " of processor time, all processes together (the calibrated run's own: " in answer.stdout


def test_a_run_without_steps_is_no_calibration(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.journal.parent.mkdir(parents=True)
    run.journal.write_bytes(b"")
    with pytest.raises(Uncalibratable, match="is empty: the run ended before it decided anything"):
        calibrate(run, ranks=1)


def test_least_squares_leave_out_what_would_be_negative() -> None:
    random = np.random.default_rng(0)
    features = random.random((200, 3))
    assert least_squares(features, features @ [1.0, 0.5, 0.0]) == pytest.approx([1.0, 0.5, 0.0], abs=1e-9)
    found = least_squares(features, features @ [1.0, 0.5, -0.2])
    assert found[2] == 0.0
    assert min(found) >= 0


def all_sets(features: np.ndarray, values: np.ndarray) -> float:
    """The smallest squared error of coefficients of 0 or more, by trying every set of columns."""
    errors = []
    for size in range(features.shape[1] + 1):
        for kept in map(list, itertools.combinations(range(features.shape[1]), size)):
            found = np.zeros(features.shape[1])
            found[kept] = np.linalg.lstsq(features[:, kept], values, rcond=None)[0] if kept else 0.0
            errors += [float(((features @ found - values) ** 2).sum())] * bool((found >= 0).all())
    return min(errors)


def test_of_all_coefficients_without_a_negative_one_least_squares_find_the_best() -> None:
    """Leaving out the worst column first, and then the next, kept the wrong ones in one of a hundred such fits."""
    random = np.random.default_rng(1)
    for _ in range(300):
        tokens, share = random.random(20) * 100 + 1, random.random((3, 20))
        features = np.array([tokens, tokens * share[0] * 50, tokens * share[1] * 5000, share[2] * 300, tokens * share[2]]).T
        values = np.abs(features @ [0.01, 2e-4, 1e-6, 1e-4, 0.002] * (1 + random.normal(size=20) / 2))
        found = np.array(least_squares(features, values))
        assert min(found) >= 0
        assert ((features @ found - values) ** 2).sum() <= all_sets(features, values) * (1 + 1e-6) + 1e-12


REQUEST = st.tuples(
    st.integers(0, 5), st.integers(0, 3), st.integers(1, 500), st.integers(0, 500), st.floats(0, 3), st.booleans()
)


@settings(max_examples=100, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=12))
def test_any_finished_requests_give_times_that_a_simulation_takes(
    requests: list[tuple[int, int, int, int, float, bool]],
) -> None:
    """A single one, equal ones, those that took no time, those that a pause covers."""
    turns = [
        {"request_id": str(number), "server": f"server-{server}", "placed_ns": at * 10**9,
         "done_ns": int((at + took) * 1e9), "generated_s": took, "prompt_tokens": prompt, "cached_tokens": 0,
         "completion_tokens": tokens}
        for number, (at, server, tokens, prompt, took, _) in enumerate(requests)
    ]  # fmt: skip
    pauses = [
        {"server": f"server-{server}", "ended_ns": int((at + took) * 1e9), "pause_s": took}
        for at, server, _, _, took, paused in requests
        if paused
    ]
    fitted = fit_engine(turns, pauses, [(0.0, 2.0, 1.0)], kv_tokens=1e5, max_seqs=64)
    times = fitted.times
    for value in (
        times.step_s,
        times.sequence_s,
        times.kv_token_s,
        times.prefill_token_s,
        fitted.error,
        *fitted.steps.values(),
    ):
        assert 0 <= value < float("inf")
    assert times.step_s > 0
    assert 0 <= fitted.shared_share <= 0.9


def test_a_line_through_train_steps_is_believed_only_where_it_is_seen() -> None:
    tokens = np.array([1000.0, 2000, 3000, 4000, 5000, 6000])
    fixed, token_s = _fit_line(tokens, 0.5 + 0.001 * tokens)
    assert (fixed, token_s) == pytest.approx((0.5, 0.001))
    assert _fit_line(tokens, np.array([0.4, 0.6, 0.5, 0.4, 0.6, 0.5])) == (0.5, 0.0)


def test_what_is_in_progress_is_averaged_over_time() -> None:
    beside = TimeOverlap([(0.0, 10.0, 1.0), (5.0, 10.0, 1.0)])
    assert beside.over(0, 10) == pytest.approx(1.5)
    assert beside.over(5, 10) == pytest.approx(2.0)
    assert beside.over(10, 20) == pytest.approx(0.0)


def test_smaller_groups_have_equal_rewards_more_often() -> None:
    """Three groups of four: 1 1 1 1, 1 1 1 0, 1 1 0 0. Pairs agree in (6 + 3 + 2) of 18 cases, triples in (4 + 1) of 12."""
    rewards = {number: float(text) for number, text in enumerate("111111101100")}
    journal = _JournalFacts(rewards=rewards, complete={0, 1, 2})
    assert _count_equal_shares(journal, 4) == pytest.approx((11 / 18, 5 / 12, 1 / 3, (1 / 3) ** 2 / (5 / 12)))
