"""The two presets for four GPUs: they compose, a check finds them valid, a plan finds room on cards of 80 GB, and what they pay
and evaluate is what their comments say."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from telescope.cli import check, plan
from telescope.config.run import RunConfig
from telescope.environments.base import Prompt
from telescope.environments.tasks.countdown import Countdown
from tests.config.conftest import compose_one, sentences

FLAGSHIPS = ("qwen_countdown", "hendrycks_math_evals")


def config_of(experiment: str) -> RunConfig:
    point = compose_one(f"experiment={experiment}")
    assert point.config is not None, sentences(point)
    assert not point.warnings
    return point.config


@pytest.mark.parametrize("experiment", FLAGSHIPS)
def test_it_trains_qwen_by_grpo_on_two_servers_and_two_ranks(experiment: str) -> None:
    config = config_of(experiment)
    assert (config.model.name, config.algorithm_name, config.backend_name) == ("Qwen/Qwen2.5-3B", "grpo", "fsdp")
    assert (config.servers, config.cluster.trainer_num_workers) == (2, 2)
    assert config.cluster == type(config.cluster)()


@pytest.mark.skipif(find_spec("datasets") is None, reason="MATH comes by the package datasets")
@pytest.mark.parametrize("experiment", FLAGSHIPS)
def test_a_check_finds_it_valid(experiment: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "hub_problem", lambda name: None)  # whether this machine reaches the hub is not asked
    assert check.main([f"experiment={experiment}"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"experiment={experiment}: valid, hash ")
    assert "Warning" not in said
    assert "would refuse" not in said


@pytest.mark.parametrize("experiment", FLAGSHIPS)
def test_a_plan_finds_room_for_it_on_four_cards_of_80_gb(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--card", "h100", "--hosts", "1x4x64", f"experiment={experiment}"]) == 0
    said = capsys.readouterr().out
    assert "3,085,938,688 parameters" in said
    assert "A trainer rank of 2 needs about" in said
    assert "share a card" not in said
    assert "Trainer: trains " in said
    assert plan.main(["--placement", "--hosts", "1x4x64", f"experiment={experiment}"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("server-0", "server-1", "trainer-0", "trainer-1"))


def test_countdown_pays_2_for_a_right_answer_and_1_at_most_for_its_form() -> None:
    config = config_of("qwen_countdown")
    task = config.environment("countdown")
    assert isinstance(task, Countdown)
    assert config.reward_range("countdown") == (0.0, 2.0)
    first = task.prompts("train")[0]
    assert task.reward(first, task.right_answer(first)).total == 2.0
    prompt = Prompt((), answer="5+8-3", facts={"numbers": (3, 5, 8, 2), "target": 12})
    for said, total in (
        ("So it is <answer>(5 + 8 - 3) + 2</answer>", 2.0),
        ("<answer>5+8+3+2</answer>", 1.0),
        ("<answer>5+8</answer>", 1.0),
        ("<answer>(5 + 8 - 3) + 2 = 12</answer>", 0.5),
        ("<answer></answer>", 0.5),
        ("(5 + 8 - 3) + 2", 0.0),
    ):
        assert task.reward(prompt, said).total == total, said
    (held_out,) = config.active_evals
    assert (held_out.name, held_out.every) == ("countdown", 20)
    assert 1.0 < held_out.pass_above < 2.0  # the form alone never passes


def test_countdowns_instruction_asks_for_what_is_paid() -> None:
    config = config_of("qwen_countdown")
    task = config.environment("countdown")
    (turn,) = task.prompts("eval")[0].turns
    facts = task.prompts("eval")[0].facts
    assert f"the numbers {' '.join(map(str, facts['numbers']))} into" in turn["content"]
    assert f"equals {facts['target']}." in turn["content"]
    assert "\n" not in turn["content"]
    assert turn["content"].endswith("like this: <answer>(1 + 2) * 3</answer>")
    assert (len(facts["numbers"]), 10 <= facts["target"] <= 100) == (4, True)
    assert config.rollout.stop == ("</answer>",)


def test_math_is_trained_on_and_math500_evaluated_four_times_each() -> None:
    config = config_of("hendrycks_math_evals")
    assert list(config.environments) == ["hendrycks_math"]
    (one,) = config.active_evals
    assert (one.name, one.every, one.num_samples, one.pass_at_k) == ("math500", 25, 4, (1, 4))
    assert (one.num_prompts, one.baseline, one.final) == (None, True, True)
    assert config.played["math500"].name == "math500"
    assert config.environment("hendrycks_math").model_dump()["train_split"] == "train"
