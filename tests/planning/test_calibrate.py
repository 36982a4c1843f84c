"""What a run says of its own times, and whether it tells those of runs that it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.flow.predict import ALWAYS, REAL, calibrated, play, predicted_s, step_s
from telescope.planning.calibrate import Uncalibratable, _least_squares, _line, _Sum, calibrate
from telescope.runlog.layout import RunDirectory

SLEEPS = (
    "experiment=fake", "number_of_steps=8", "inference.fake_token_s=0.04", "backend.step_s=0.4",
    "orchestrator.discard_group_zero_advantage=false",  # whether a batch waits for another group would be chance
)  # fmt: skip


@pytest.mark.timeout(400)
def test_a_run_of_known_times_tells_them_and_those_of_other_configurations(tmp_path: Path) -> None:
    """A fake engine of 40 ms a token and a fake train step of 0.4 s; then a synchronous run, and one of few lanes."""
    first = play(tmp_path, "first", SLEEPS)
    found = calibrated(first)
    engine = found.load.engine
    assert engine.step_s + 8 * engine.sequence_s == pytest.approx(0.04, rel=0.15)
    assert found.load.train_step_s == pytest.approx(0.4, rel=0.15)
    assert found.load.shared_share < 0.1
    assert predicted_s(found, first) == pytest.approx(step_s(first), rel=0.15)
    for name, change in (("synchronous", "max_async_rollout=0"), ("lanes", "max_concurrent_prompts_per_server=2")):
        other = play(tmp_path, name, (*SLEEPS, f"orchestrator.{change}", "seed=5"))
        assert predicted_s(found, other) == pytest.approx(step_s(other), rel=0.15), name


def test_a_plan_from_a_run_names_its_times(tmp_path: Path) -> None:
    play(tmp_path, "run", ("experiment=fake", "number_of_steps=3", "inference.fake_token_s=0.01", "backend.step_s=0.1"))
    command = [sys.executable, "-m", "telescope.plan", "experiment=fake", *ALWAYS, "--calibrate", str(tmp_path / "run")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "Calibrated on " in answer.stdout
    assert "Simulated (3 steps): a step takes " in answer.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_tells_the_step_time_of_its_twin_and_of_its_synchronous_self(tmp_path: Path) -> None:
    """vLLM and FSDP on two cores. The limit is wider than on an idle machine: benchmarks/results/plan.md."""
    names = {name: overrides for name, *overrides in REAL}
    found = calibrated(play(tmp_path, "calibrated", tuple(names["calibrated"])))
    for name in ("seed", "synchronous"):
        run = play(tmp_path, name, tuple(names[name]))
        assert predicted_s(found, run) == pytest.approx(step_s(run), rel=0.3), name


def test_a_run_without_steps_is_no_calibration(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.journal.parent.mkdir(parents=True)
    run.journal.write_bytes(b"")
    with pytest.raises(Uncalibratable, match="is empty: the run ended before it decided anything"):
        calibrate(run, ranks=1)


def test_least_squares_leave_out_what_would_be_negative() -> None:
    random = np.random.default_rng(0)
    features = random.random((200, 3))
    assert _least_squares(features, features @ [1.0, 0.5, 0.0]) == pytest.approx([1.0, 0.5, 0.0], abs=1e-9)
    found = _least_squares(features, features @ [1.0, 0.5, -0.2])
    assert found[2] == 0.0
    assert min(found) >= 0


def test_a_line_through_train_steps_is_believed_only_where_it_is_seen() -> None:
    tokens = np.array([1000.0, 2000, 3000, 4000, 5000, 6000])
    fixed, token_s = _line(tokens, 0.5 + 0.001 * tokens)
    assert (fixed, token_s) == pytest.approx((0.5, 0.001))
    assert _line(tokens, np.array([0.4, 0.6, 0.5, 0.4, 0.6, 0.5])) == (0.5, 0.0)


def test_what_is_in_progress_is_averaged_over_time() -> None:
    beside = _Sum([(0.0, 10.0, 1.0), (5.0, 10.0, 1.0)])
    assert beside.over(0, 10) == pytest.approx(1.5)
    assert beside.over(5, 10) == pytest.approx(2.0)
    assert beside.over(10, 20) == pytest.approx(0.0)
