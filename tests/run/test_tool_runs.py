"""Whole runs with tools: the presets end with a fake engine, and with a real one the policy learns to call its tool."""

from __future__ import annotations

import statistics

import pytest

from tests.run.conftest import Start

FAKE = ("inference=fake", "backend=fake", "logging.use_wandb=false", "orchestrator.prompts_batch_size_for_trainer=2")
TAU = ("model=tiny", "rollout.max_tokens=12", "inference.max_model_len=65536", "trainer.seq_len=65536")
COUNTS = ("total_tool_calls", "tool_success_count", "tool_error_count", "tool_success_rate", "unique_tools_used")


@pytest.mark.parametrize(
    ("experiment", "more", "tool"),
    [pytest.param("look_up", (), "look", marks=pytest.mark.slow), ("tau_retail", TAU, "cancel_pending_order")],
)
def test_a_preset_with_tools_runs_two_steps_and_charts_its_calls(
    start: Start, experiment: str, more: tuple[str, ...], tool: str
):
    # A fake engine writes nonsense, so all rewards may be equal: groups of equal rewards must not be thrown away.
    keep = "orchestrator.discard_group_zero_advantage=false"
    run = start(f"experiment={experiment}", *FAKE, *more, keep, "number_of_steps=2", "rollout.group_size=2")
    assert run.wait() == 0, run.said()
    assert run.summary()["steps"] == 2
    rollouts = run.rows("rollouts")
    assert len(rollouts) >= 8
    for name in (*COUNTS, "malformed_tool_calls", f"{tool}_calls"):
        assert all(name in row["metrics"] for row in rollouts), name


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(700)
def test_the_whole_system_learns_to_call_a_tool(start: Start):
    run = start("experiment=look_up", "inference.http=false", "logging.use_wandb=false")
    assert run.wait(600) == 0, run.said()[-4000:]
    steps = [row["metrics"] for row in run.rows("step_metrics")]
    curve = [row["sample/exact"] for row in steps if row.get("sample/exact") is not None]
    assert statistics.mean(curve[-5:]) - statistics.mean(curve[:5]) >= 0.15, curve
    assert {row["turns"] for row in run.rows("rollouts")} == {1, 2}
