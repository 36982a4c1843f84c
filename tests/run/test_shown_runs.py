"""Whole runs that do not learn, each for another reason, and what `telescope show` says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from telescope.cli.main import main
from tests.run.conftest import Start, WholeRun

TASK = '''
from telescope.environments.base import Prompt, Reward, SingleTurn


class Hopeless(SingleTurn):
    """Says of every answer that it is wrong; with `breaks`, raises at every fourth prompt instead of it, and gives 0 or 1."""

    breaks: bool = False

    def prompts(self, split):
        return [Prompt(({"role": "user", "content": f"say {number}"},), answer=str(number)) for number in range(400)]

    def reward(self, prompt, answer):
        if self.breaks and int(prompt.answer) % 4 == 0:
            raise KeyError("no such line")
        return Reward(float(self.breaks and len(answer) % 2))
'''


def show(run: WholeRun, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Its numbers; the page itself keeps to two screens."""
    capsys.readouterr()
    assert main(["show", str(run.directory.path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 100
    assert main(["show", str(run.directory.path), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["damaged"] == []
    return told


def own_task(folder: Path) -> tuple[str, ...]:
    (folder / "mine/plugins/environments").mkdir(parents=True)
    (folder / "mine/plugins/environments/hopeless.py").write_text(TASK)
    return "experiment=fake", "--config-dir", str(folder / "mine"), "env=[hopeless]"


def test_a_run_whose_weights_do_not_move_and_whose_answers_are_cut_off(start: Start, capsys: pytest.CaptureFixture[str]):
    begun = ("experiment=fake", "number_of_steps=12", "rollout.max_tokens=5", "checkpoint.at_end=none")
    run = start(*begun, "trainer.learning_rate=0")
    assert run.wait() == 0
    assert f"telescope show {run.directory.path}" in run.said().splitlines()[-1]
    told = show(run, capsys)
    assert (told["state"], told["step"]) == ("done", 12)
    advice = {one["rule"]: one for one in told["advice"]}
    assert advice["learning rate of 0"]["command"] == " ".join(("telescope run", *begun))
    assert "rollout.max_tokens=10" in advice["cut off"]["command"]
    summary = run.summary()
    reward = next(one for one in told["curves"] if one["name"] == "reward/policy")
    assert reward["first"] == pytest.approx(summary["reward_policy_first"])
    assert reward["last"] == pytest.approx(summary["reward_policy_last"])
    assert told["groups"]["begun"] == sum(summary["groups"].values())
    assert told["groups"]["discarded"] == summary["groups"].get("discarded", 0)
    assert {one["environment"] for one in told["wrong"]} == {"countdown"}
    assert all(one["golden_answers"] for one in told["wrong"])


@pytest.mark.slow
def test_a_run_whose_rewards_are_all_equal(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = start(*own_task(tmp_path))
    assert run.wait() == 70
    told = show(run, capsys)
    assert (told["state"], told["step"]) == ("failed", 0)
    assert "equal rewards" in told["reason"]
    assert told["advice"][0]["rule"] == "too hard"
    groups = told["groups"]
    assert groups["discarded"] == groups["discarded_all_zero"] == groups["complete"] > 100
    assert told["advice"][0]["command"] == f"telescope env check hopeless --config-dir {tmp_path / 'mine'}"
    assert len(told["wrong"]) == 5
    assert told["right"] == []


@pytest.mark.slow
def test_a_run_whose_grader_fails(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = start(*own_task(tmp_path), "+environments.hopeless.kwargs.breaks=true", "number_of_steps=6")
    assert run.wait() == 0
    told = show(run, capsys)
    (environment,) = told["environments"]
    assert environment["failed"] > 0
    assert "KeyError" in environment["causes"][0][0]
    failures = told["advice"][0]
    assert (failures["rule"], failures["command"]) == (
        "failures",
        f"telescope env check hopeless --config-dir {tmp_path / 'mine'} breaks=true",
    )
