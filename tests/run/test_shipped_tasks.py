"""One whole run with real processes over all shipped tasks at once: loaded, played, scored and recorded by a worker."""

from __future__ import annotations

from pathlib import Path

from tests.environments.datasets_at_home import write_all
from tests.run.conftest import Start


def test_a_run_over_all_shipped_tasks_trains_two_steps(start: Start, tmp_path: Path):
    copies = write_all(tmp_path / "copies")
    tasks = [*copies, "reasoning_gym", "wordle"]
    settings = [f"+environments.{name}.kwargs.data_dir={copy}" for name, copy in copies.items()]
    settings += [f"+environments.{name}.kwargs.held_out=2" for name in ("dapo_math", "deepscaler")]
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
