"""An algorithm that is not a part of the package takes part in a whole run, with its own settings from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.run.conftest import ROOT, Start

EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
REAL_TRAINER = ("experiment=fake", "backend=fsdp", "trainer.seq_len=256", "number_of_steps=2")


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, str]:
    """A folder with the algorithms that docs/own_algorithm.md prints, as `spo.py` and `best.py`."""
    folder = tmp_path / "mine" / "plugins" / "algorithms"
    folder.mkdir(parents=True)
    examples = EXAMPLE.findall((ROOT / "docs/own_algorithm.md").read_text())[:2]  # the third is a reader's test of them
    for name, code in zip(("spo", "best"), examples, strict=True):
        (folder / f"{name}.py").write_text(code)
    return "--config-dir", str(tmp_path / "mine")


def test_the_algorithm_of_the_docs_trains_with_the_real_backend(start: Start, own: tuple[str, str]):
    run = start(*own, *REAL_TRAINER, "algorithm=spo", "algorithm.strength=0.5", "algorithm.use_tis=true")
    assert run.wait() == 0, run.said()
    algorithm = json.loads(run.directory.config_json.read_text())["algorithm"]
    assert (algorithm["name"], algorithm["strength"], algorithm["use_tis"]) == ("spo", 0.5, True)
    metrics = [row["metrics"] for row in run.rows("step_metrics")]
    assert len(metrics) == 2
    assert all(step["grad_norm"] > 0 and "tis_weight" in step for step in metrics)


def test_the_advantages_of_the_docs_train_with_the_real_backend(start: Start, own: tuple[str, str]):
    run = start(*own, *REAL_TRAINER, "algorithm=best")
    assert run.wait() == 0, run.said()
    rollouts = {row["rollout_id"]: row for row in run.rows("rollouts")}
    for batch in run.rows("batches"):
        reward = {i: rollouts[i]["reward"] for i in batch["rollout_ids"]}
        for rollout, advantage in zip(batch["rollout_ids"], batch["advantages"], strict=True):
            others = [reward[i] for i in reward if i != rollout and rollouts[i]["group_id"] == rollouts[rollout]["group_id"]]
            assert advantage == pytest.approx(reward[rollout] - max(others), abs=1e-12)


def test_its_settings_are_typed(start: Start, own: tuple[str, str]):
    run = start(*own, *REAL_TRAINER, "algorithm=spo", "algorithm.strength=strong", "algorithm.strenght=1")
    assert run.wait() == 1
    assert "algorithm.strength='strong' must be a number" in run.said()
    assert "Did you mean algorithm.strength?" in run.said()


def test_lengths_cost_reward_and_minibatches_reach_the_trainer(start: Start):
    """Two ranks, two updates a step; advantages are those of the rewards less what lengths cost."""
    run = start(
        "experiment=fake",
        "algorithm=dr_grpo",
        "algorithm.overlong_buffer_tokens=20",
        "algorithm.overlong_penalty=0.5",
        "algorithm.overlong_filter=true",
        "trainer.number_of_minibatches=2",
        "cluster.trainer_num_workers=2",
        "number_of_steps=2",
    )
    assert run.wait() == 0, run.said()
    rollouts = {row["rollout_id"]: row for row in run.rows("rollouts") if row["status"] == "scored"}
    for row in rollouts.values():
        over = min(max((row["completion_tokens"] - 4) / 20, 0.0), 1.0)  # max_tokens=24
        assert row["length_penalty"] == pytest.approx(-0.5 * over)
    assert any(row["length_penalty"] < 0 for row in rollouts.values())
    for batch in run.rows("batches"):
        reward = {i: rollouts[i]["reward"] + rollouts[i]["length_penalty"] for i in batch["rollout_ids"]}
        for rollout, advantage in zip(batch["rollout_ids"], batch["advantages"], strict=True):
            group = [i for i in reward if rollouts[i]["group_id"] == rollouts[rollout]["group_id"]]
            assert advantage == pytest.approx(reward[rollout] - sum(reward[i] for i in group) / len(group), abs=1e-12)
        cut_off = {str(i) for i in reward if rollouts[i]["finish_reason"] == "length"}
        assert set(batch["filtered"]) == cut_off
    metrics = run.rows("step_metrics")[0]["metrics"]
    batch = run.rows("batches")[0]
    assert metrics["filtered_fraction"] == pytest.approx(len(batch["filtered"]) / len(batch["rollout_ids"]))
