"""The adapter of reasoning-gym: its oracles score 1, wrong answers do not, and scorers that raise give no reward."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys

import pytest
from pydantic import ValidationError

from telescope.environments.adapters.reasoning_gym import ReasoningGym, make_problem, score
from telescope.environments.failures import GraderError
from telescope.environments.graders.pool import open_graders

# A kind of each family whose problems are quickly made; boxnet, graph_color, propositional_logic, rubiks_cube and rush_hour
# store no answer of their own, so they prove nothing here.
TASKS = (
    *("chain_sum", "basic_arithmetic", "gcd", "leg_counting", "fraction_simplification", "simple_equations", "base_conversion"),
    *("caesar_cipher", "letter_counting", "word_sorting", "spell_backward", "number_sorting", "calendar_arithmetic"),
    *("countdown", "mini_sudoku", "n_queens", "tower_of_hanoi", "shortest_path", "largest_island"),
    *("knights_knaves", "syllogism", "family_relationships", "circuit_logic", "number_sequence", "simple_geometry"),
)


@pytest.mark.parametrize("task", TASKS)
def test_the_stored_answer_scores_1_and_another_problems_answer_does_not(task: str) -> None:
    made = [make_problem(task, "{}", seed) for seed in range(6)]
    assert [score(task, "{}", seed, str(each["answer"])) for seed, each in enumerate(made)] == [1.0] * 6
    assert all(score(task, "{}", seed, "no such answer at all") < 1 for seed in range(6))
    others = [score(task, "{}", seed, str(made[seed - 1]["answer"])) for seed in range(6)]
    assert sum(each < 1 for each in others) >= sum(made[seed]["answer"] != made[seed - 1]["answer"] for seed in range(6)) - 1


async def test_a_rollout_is_scored_in_a_grader_process() -> None:
    task = ReasoningGym(task="chain_sum", config={"max_terms": 3})
    prompt = task.prompts("train")[7]
    assert prompt.turns[0]["content"].endswith("Give the final answer between <answer> and </answer>.")
    async with open_graders(1):
        answers = (
            f"<answer>{prompt.answer}</answer>",
            "<answer>1e9</answer>",
            prompt.answer,
            "<answer>" + "1" * 20_000 + "</answer>",
        )
        rewards = await asyncio.gather(*(task.reward(prompt, answer) for answer in answers))
    assert rewards[0].total == 1.0
    assert [reward.metrics["exact"] for reward in rewards] == [1.0, 0.0, 0.0, 0.0]
    assert [reward.metrics["has_answer"] for reward in rewards] == [1.0, 1.0, 0.0, 1.0]
    assert rewards[0].golden_answers == (prompt.answer,)


async def test_a_scorer_that_raises_is_a_graders_failure_never_a_reward() -> None:
    task = ReasoningGym(task="prime_factorization")
    with pytest.raises(GraderError, match=r"reasoning_gym.score: ValueError"):
        await task.reward(task.prompts("train")[0], "<answer>zzz</answer>")


def test_train_and_eval_are_made_from_different_seeds() -> None:
    task = ReasoningGym(num_train=20, num_eval=10, seed=3)
    seeds = {split: [prompt.facts["seed"] for prompt in task.prompts(split)] for split in ("train", "eval")}
    assert seeds == {"train": list(range(3, 23)), "eval": list(range(23, 33))}


def test_problems_are_the_same_in_a_process_with_another_hash_seed() -> None:
    code = (
        "import hashlib, json, sys; from telescope.environments.adapters.reasoning_gym import make_problem;"
        "shown = [[make_problem(t, '{}', s)['question'] for s in range(3)] for t in sys.argv[1:]];"
        "print(hashlib.sha256(json.dumps(shown).encode()).hexdigest())"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, *TASKS],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": "."},
    )
    shown = [[make_problem(task, "{}", seed)["question"] for seed in range(3)] for task in TASKS]
    assert said.stdout.strip() == hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def test_unknown_tasks_and_settings_are_refused_with_their_names() -> None:
    with pytest.raises(ValueError, match=r"task='chain_sums' is not a data set of reasoning-gym\. Did you mean chain_sum\?"):
        ReasoningGym(task="chain_sums").prompts("train")
    with pytest.raises(ValueError, match=r"is refused by chain_sum: .*max_termss"):
        ReasoningGym(task="chain_sum", config={"max_termss": 3}).prompts("train")
    for task in ("composite", "list_functions"):
        with pytest.raises(ValidationError, match="can't be trained on"):
            ReasoningGym(task=task)
    assert json.loads(ReasoningGym(config={"b": 1, "a": 2}).model_dump_json())["config"] == {"a": 2, "b": 1}
