"""The shipped agent program plays as `guess_letter` does, whatever it asks with, and all that it asked for is trained."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from telescope.environments.agent_environment import ProgramOutcome
from telescope.environments.base import Prompt, Reward
from telescope.environments.chat import Recording, TokenChat
from telescope.environments.tasks.guess_letter import GuessLetter
from telescope.environments.tasks.letter_agent import LetterAgent
from telescope.environments.template import ChatTemplate
from tests.environments.proxy.conftest import Policy

SEARCH = Prompt(({"role": "user", "content": "h-n"},), answer="m", facts={"first": 7, "secret": 12})
GUESSES = {"h-n": "k", "later": "ab", "one letter": "m", "earlier": "h"}


def scripted(prompt: str) -> str:
    return GUESSES[prompt.removesuffix("<|assistant|>").rpartition("<|user|>")[2]]


async def played(environment: Any, tokenizer: Any) -> tuple[Reward, Recording]:
    chat = TokenChat(ChatTemplate(tokenizer, [1]), Policy(tokenizer, scripted), 300, max_tokens=20)
    await environment.set_up()
    try:
        reward = await environment.play(SEARCH, chat)
    finally:
        await environment.tear_down()
    return reward, chat.recording()


@pytest.mark.parametrize("sdk", [False, True])
async def test_the_program_is_trained_on_the_very_tokens_of_a_dialogue_played_in_the_worker(tiny_tokenizer: Any, sdk: bool):
    reward, recorded = await played(LetterAgent(sdk=sdk), tiny_tokenizer)
    inside, expected = await played(GuessLetter(), tiny_tokenizer)
    assert (reward.total, inside.total) == (1.0, 1.0)
    assert reward.metrics == {"agent_requests": 3.0, "exact": 1.0, "guesses": 3.0}
    (branch,), (wanted,) = recorded.branches, expected.branches
    said = "<|user|>h-n<|assistant|>k<eos><|user|>later<|assistant|>ab<eos><|user|>one letter<|assistant|>m<eos>"
    assert tiny_tokenizer.decode(branch.ids.tolist()) == said
    for name in ("ids", "mask", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(branch, name), getattr(wanted, name))


async def test_only_the_last_guess_counts_and_a_program_that_failed_found_nothing() -> None:
    environment = LetterAgent()
    for code, said, total in (
        (0, ["k", "m"], 1.0),
        (0, ["m", "k"], 0.0),
        (0, ["x\nm"], 0.0),
        (1, ["m"], 0.0),
        (None, ["m"], 0.0),
    ):
        assert (await environment.score(SEARCH, ProgramOutcome(code, json.dumps(said) + "\n", ""))).total == total


def test_its_games_are_those_of_guess_letter_and_their_settings_too() -> None:
    small = LetterAgent(game=GuessLetter(letters=4, max_turns=2, num_train=5))
    assert list(small.prompts("train")) == list(GuessLetter(letters=4, max_turns=2, num_train=5).prompts("train"))
    assert json.loads(small.stdin(SEARCH)) == {"ask": "h-n", "letter": "m", "guesses": 2}
