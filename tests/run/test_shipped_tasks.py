"""One whole run with real processes over all shipped tasks at once: loaded, played, scored and recorded by a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environments.datasets_at_home import write_all
from tests.run.conftest import Start


@pytest.mark.slow
def test_a_run_over_all_shipped_tasks_trains_two_steps(start: Start, tmp_path: Path):
    copies = write_all(tmp_path / "copies")
    tasks = [*copies, "reasoning_gym", "wordle"]
    settings = [f"+environments.{name}.kwargs.data_dir={copy}" for name, copy in copies.items()]
    settings += [f"+environments.{name}.kwargs.held_out=2" for name in ("dapo_math", "deepscaler", "i3_code")]
    run = start(
        *("experiment=fake", f"env=[{','.join(tasks)}]", "number_of_steps=2", *settings),
        *("inference.max_model_len=4096", "trainer.seq_len=8192", "rollout.group_size=2"),
        "orchestrator.prompts_batch_size_for_trainer=24",
        "orchestrator.discard_group_zero_advantage=false",
    )
    assert run.wait() == 0, run.said()
    assert run.summary()["steps"] == 2
    rows = run.rows("rollouts")
    assert {row["environment"] for row in rows} <= set(tasks)
    assert len({row["environment"] for row in rows}) >= 6
    assert all(0 <= row["reward"] <= 1 for row in rows)
    assert run.left_after(60) == []


@pytest.mark.slow
def test_a_run_of_questions_with_a_python_tool_trains_two_steps(start: Start, tmp_path: Path):
    """Its worker opens a pool of real sandboxes, and leaves none behind. No answer of the fake engine is a call; programs are
    run in tests/sandboxes/test_python_tool.py."""
    copies = write_all(tmp_path / "copies")
    run = start(
        *("experiment=hendrycks_math_python", "model=tiny", "inference=fake", "backend=fake", "number_of_steps=2"),
        f"+environments.hendrycks_math.kwargs.data_dir={copies['hendrycks_math']}",
        *("inference.max_model_len=4096", "rollout.group_size=2", "orchestrator.prompts_batch_size_for_trainer=2"),
        *("orchestrator.discard_group_zero_advantage=false", "rollout.max_tokens=64", "logging.use_wandb=false"),
    )
    assert run.wait() == 0, run.said()
    assert run.summary()["steps"] == 2
    assert run.summary()["rollouts"]["failed"] == 0
    rows = run.rows("rollouts")
    assert all(row["metrics"]["total_tool_calls"] == 0 for row in rows if row["status"] == "scored")
    assert run.left_after(60) == []
