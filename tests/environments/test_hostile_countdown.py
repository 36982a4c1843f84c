"""Countdown under answers that are meant to hang or crash whoever evaluates them."""

from __future__ import annotations

import pytest

from telescope.environments.base import Prompt
from telescope.environments.tasks.countdown import Countdown

PROMPT = Prompt((), answer="5+8-3", facts={"numbers": (3, 5, 8), "target": 10})


@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9**9",
        "3**5**8",
        "9^9^9",
        "(" * 10**6,
        "(" * 500_000 + "5+8-3" + ")" * 500_000,
        "-" * 10**6 + "5",
        "5+8-3+" * 10**5,
        "9" * 10**6,
        "__import__('os').system('true')",
        "5+8-3\x00",
        "٥+8-3",
        "<answer>" * 10**5,
    ],
    ids=lambda text: text[:12],
)
def test_hostile_answers_earn_nothing_and_cost_nothing(answer: str) -> None:
    for task in (Countdown(operators="+-*/"), Countdown(operators="+-*/", answer_tag="answer")):
        assert task.reward(PROMPT, answer).total == 0.0
        assert task.reward(PROMPT, f"<answer>{answer}</answer>").total == 0.0
