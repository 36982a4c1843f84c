"""The shipped tasks: their prompts, what they pay for, and what they refuse as settings."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

from telescope.environments.base import LazyPrompts, Prompt
from telescope.environments.graders.expression import parse_expression
from telescope.environments.hashed_random import HashedRandom
from telescope.environments.tasks.countdown import Countdown
from telescope.environments.tasks.reverse_letters import ReverseLetters


def shown(prompt: Prompt) -> str:
    return prompt.turns[0]["content"]


def test_the_first_prompts_are_these_on_any_machine() -> None:
    assert [shown(p) for p in Countdown().prompts("train")[:3]] == ["use 7 5 9 make 3", "use 6 5 2 make 3", "use 5 5 3 make 3"]
    assert [shown(p) for p in ReverseLetters().prompts("train")[:2]] == ["rev hgbd", "rev efcj"]
    assert ReverseLetters().prompts("train")[0].answer == "dbgh"


def test_prompts_are_the_same_in_a_process_with_another_hash_seed() -> None:
    code = (
        "from telescope.environments.tasks.countdown import Countdown as C; import hashlib, json;"
        "turns = [[dict(t) for t in p.turns] for p in C(seed=5).prompts('eval')];"
        "print(hashlib.sha256(json.dumps(turns).encode()).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": "."},
    )
    turns = [[dict(turn) for turn in prompt.turns] for prompt in Countdown(seed=5).prompts("eval")]
    assert other.stdout.strip() == hashlib.sha256(json.dumps(turns).encode()).hexdigest()


def test_train_and_eval_are_different_streams() -> None:
    task = ReverseLetters(min_length=7, num_eval=512)
    train, held_out = task.prompts("train")[:2000], task.prompts("eval")
    assert len({shown(p) for p in train} & {shown(p) for p in held_out}) == 0
    assert {shown(p) for p in ReverseLetters(seed=1).prompts("train")[:50]}.isdisjoint(shown(p) for p in train)


def test_a_million_prompts_cost_nothing_until_drawn_from() -> None:
    made: list[int] = []
    prompts = LazyPrompts(10**6, lambda index: made.append(index) or Prompt(turns=()))  # type: ignore[func-returns-value]
    assert len(prompts) == 10**6
    assert made == []
    _ = prompts[-1], prompts[3:5]
    assert made == [999_999, 3, 4]
    with pytest.raises(IndexError, match="prompt 1000000 of a split of 1000000"):
        prompts[10**6]


def test_draws_are_even_and_inside_their_bounds() -> None:
    draws = HashedRandom("test", 0)
    counts = [0] * 6
    for _ in range(6000):
        counts[draws.below(6)] += 1
    assert min(counts) > 880
    assert max(counts) < 1120
    assert sorted(draws.shuffled([3, 1, 2])) == [1, 2, 3]
    assert {draws.between(4, 7) for _ in range(200)} == {4, 5, 6, 7}


def test_every_countdown_problem_has_a_solution_within_the_targets() -> None:
    task = Countdown(num_numbers=4, operators="+-*/", max_number=25, min_target=10, max_target=100)
    for prompt in task.prompts("train")[:300]:
        assert 10 <= prompt.facts["target"] <= 100
        assert parse_expression(prompt.answer).value == prompt.facts["target"]
        assert task.reward(prompt, prompt.answer).total == 1.0


@pytest.mark.parametrize(
    ("answer", "total", "exact", "valid_format", "all_numbers"),
    [
        ("5+8-3", 1.0, 1, 1, 1),
        ("8-3+5", 1.0, 1, 1, 1),
        (" (8+5)-3\n", 1.0, 1, 1, 1),
        ("3+5+8", 0.1, 0, 1, 1),
        ("5+5", 0.0, 0, 1, 0),
        ("5+8-3+3-3", 0.0, 0, 1, 0),
        ("10", 0.0, 0, 1, 0),
        ("5+8-3=10", 0.0, 0, 0, 0),
        ("8*5/4", 0.0, 0, 0, 0),
        ("", 0.0, 0, 0, 0),
        ("5+8-3<eos>", 0.0, 0, 0, 0),
    ],
)
def test_countdown_pays_for_the_right_value_of_the_given_numbers(
    answer: str, total: float, exact: int, valid_format: int, all_numbers: int
) -> None:
    prompt = Prompt(turns=(), answer="5+8-3", facts={"numbers": (3, 5, 8), "target": 10})
    reward = Countdown().reward(prompt, answer)
    assert reward.total == total
    assert reward.metrics == {"exact": exact, "valid_format": valid_format, "all_numbers": all_numbers}
    assert reward.golden_answers == ("5+8-3",)


def test_countdown_shows_the_same_solved_examples_before_each_question() -> None:
    task = Countdown(num_numbers=2, examples=3, instruction="Use {numbers} to make {target}.", answer_tag="answer", seed=2)
    first, second = task.prompts("train")[:2]
    assert [turn["role"] for turn in first.turns] == ["user", "assistant"] * 3 + ["user"]
    assert first.turns[:6] == second.turns[:6]
    assert first.turns[6] != second.turns[6]
    assert first.turns[0]["content"] == "Use 7 1 to make 8."
    assert first.turns[1]["content"] == "<answer>7+1</answer>"


def test_countdown_reads_the_last_answer_tag() -> None:
    task = Countdown(answer_tag="answer", instruction="Use {numbers} to make {target}. {Braces} stay.")
    prompt = Prompt(turns=(), facts={"numbers": (3, 5, 8), "target": 10})
    assert task.reward(prompt, "<answer>1</answer> no: <answer>5+8-3</answer> done").total == 1.0
    assert task.reward(prompt, "5+8-3").total == 0.0
    assert task.reward(prompt, "</answer><answer>5+8-3").total == 0.0
    assert shown(task.prompts("train")[0]).endswith("{Braces} stay.")


@pytest.mark.parametrize(
    ("answer", "form", "value"),
    [
        ("<answer>5+8-3</answer>", 1.0, 1.0),
        ("<answer>3+5+8</answer>", 1.0, 0.1),
        ("<answer>10</answer>", 1.0, 0.0),
        ("<answer>5+8-3=10</answer>", 0.5, 0.0),
        ("<answer>5*8</answer>", 0.5, 0.0),  # an operator that is not allowed
        ("<answer></answer>", 0.5, 0.0),
        ("<answer>5+8-3</answer> no, <answer>none</answer>", 0.5, 0.0),
        ("5+8-3", 0.0, 0.0),
        ("<answer>5+8-3", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_countdown_adds_a_bonus_for_the_form_of_the_answer(answer: str, form: float, value: float) -> None:
    prompt = Prompt(turns=(), answer="5+8-3", facts={"numbers": (3, 5, 8), "target": 10})
    for bonus in (0.0, 0.5, 1.0):
        assert Countdown(answer_tag="answer", format_bonus=bonus).reward(prompt, answer).total == bonus * form + value


def test_the_form_alone_is_charted_as_before() -> None:
    prompt = Prompt(turns=(), answer="5+8-3", facts={"numbers": (3, 5, 8), "target": 10})
    with_bonus, without = Countdown(answer_tag="answer", format_bonus=1.0), Countdown(answer_tag="answer")
    for answer in ("<answer>5+8-3</answer>", "<answer>no</answer>", "no"):
        assert with_bonus.reward(prompt, answer).metrics == without.reward(prompt, answer).metrics


@pytest.mark.parametrize(
    ("answer", "total", "in_place", "same_letters"),
    [("dcba", 1.0, 1.0, 1.0), ("abcd", 0.0, 0.0, 1.0), ("dcb", 0.0, 0.75, 0.0), ("dcbaa", 0.0, 0.8, 0.0), ("", 0.0, 0.0, 0.0)],
)
def test_reverse_letters_pays_for_the_exact_word_only(answer: str, total: float, in_place: float, same_letters: float) -> None:
    prompt = Prompt(turns=(), answer="dcba")
    reward = ReverseLetters().reward(prompt, answer)
    assert (reward.total, reward.metrics["in_place"], reward.metrics["same_letters"]) == (total, in_place, same_letters)


def test_partial_credit_is_a_share_of_the_letters_in_place() -> None:
    task = ReverseLetters(partial_credit=0.4)
    prompt = Prompt(turns=(), answer="dcba")
    assert task.reward(prompt, "dcb").total == pytest.approx(0.4 * 0.75)
    assert task.reward(prompt, "dcba").total == 1.0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"operators": "+^"}, "must be some of"),
        ({"min_number": 9, "max_number": 3}, "min_number=9 must not be above max_number=3"),
        ({"instruction": "make {target}"}, "must contain {numbers}"),
        ({"min_target": 900}, "widen the targets"),
        ({"format_bonus": 0.5}, "format_bonus=0.5 needs answer_tag"),
        ({"num_number": 3}, "Extra inputs"),
    ],
)
def test_countdown_refuses_settings_it_cannot_make_problems_of(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Countdown(**settings)  # type: ignore[arg-type]


def test_reverse_letters_refuses_lengths_and_letters_that_make_no_words() -> None:
    with pytest.raises(ValidationError, match="min_length=8 must not be above max_length=7"):
        ReverseLetters(min_length=8)
    with pytest.raises(ValidationError, match="two or more different characters"):
        ReverseLetters(letters="aa")
