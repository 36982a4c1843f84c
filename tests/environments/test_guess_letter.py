"""The task of several turns: what it replies, when it is over, and what it scores."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from telescope.environments.chat import TokenChat
from telescope.environments.tasks.guess_letter import GuessLetter
from telescope.environments.template import ChatTemplate
from tests.environments.conftest import Script

TASK = GuessLetter()
PROMPT = next(prompt for prompt in TASK.prompts("train") if prompt.answer == "e" and prompt.facts["first"] == 0)


async def play(tiny: ChatTemplate, *answers: str) -> tuple[Any, str]:
    policy = Script(*(([*tiny.encode(answer).tolist(), 1], "stop") for answer in answers))
    chat = TokenChat(tiny, policy, 100)
    reward = await TASK.play(PROMPT, chat)
    return reward, chat.recording().completion_text


async def test_halving_finds_it(tiny: ChatTemplate) -> None:
    reward, said = await play(tiny, "d", "f", "e")
    assert (reward.total, reward.tags) == (1.0, ())
    assert reward.metrics == {"exact": 1.0, "guesses": 3.0, "sensible": 1.0}
    assert said == "d<eos><|user|>later<|assistant|>f<eos><|user|>earlier<|assistant|>e"
    assert PROMPT.turns[0]["content"] == "a-g"


async def test_three_guesses_are_all(tiny: ChatTemplate) -> None:
    reward, _ = await play(tiny, "d", "c", "zz")
    assert (reward.total, reward.tags) == (0.0, ("out_of_turns",))
    assert reward.metrics == {"exact": 0.0, "guesses": 3.0, "sensible": pytest.approx(1 / 3)}


async def test_what_is_no_letter_costs_a_guess_and_is_told(tiny: ChatTemplate) -> None:
    reward, said = await play(tiny, "dd", "e")
    assert reward.total == 1.0
    assert said.startswith("dd<eos><|user|>one letter<|assistant|>")


def test_the_secret_is_not_in_the_prompt_and_every_window_comes() -> None:
    prompts = TASK.prompts("train")[:2000]
    assert {str(prompt.turns[0]["content"]) for prompt in prompts} == {f"{chr(97 + at)}-{chr(103 + at)}" for at in range(20)}
    assert len({(prompt.turns[0]["content"], prompt.answer) for prompt in prompts}) == 140
    assert [prompt.answer for prompt in GuessLetter().prompts("train")[:9]] == [prompt.answer for prompt in prompts[:9]]


def test_guesses_that_find_any_letter_are_refused() -> None:
    with pytest.raises(ValidationError, match="give fewer guesses"):
        GuessLetter(letters=3)
