"""Wordle: colours, whole games from scripts, and lists of words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from telescope.environments.base import Prompt
from telescope.environments.tasks.wordle import Wordle, WordleGame, colour_guess

SHORT = {"g": "green", "y": "yellow", "-": "grey"}


@pytest.mark.parametrize(
    ("secret", "guess", "shown"),
    [
        ("react", "crane", "yyg-y"),
        ("react", "react", "ggggg"),
        ("abbey", "babes", "yygg-"),
        ("apple", "puppy", "y-g--"),
        ("level", "eerie", "yg---"),
        ("sugar", "llama", "--y--"),
        ("those", "geese", "---gg"),
    ],
)
def test_a_letter_is_coloured_as_often_as_the_secret_has_it(secret: str, guess: str, shown: str) -> None:
    assert colour_guess(secret, guess) == tuple(SHORT[each] for each in shown)


def test_over_all_pairs_of_words_no_letter_is_coloured_too_often_and_greens_are_the_right_places() -> None:
    words = Wordle().word_list[::9]
    for secret in words:
        for guess in words:
            shown = colour_guess(secret, guess)
            assert [colour == "green" for colour in shown] == [a == b for a, b in zip(secret, guess, strict=True)]
            coloured = Counter(letter for letter, colour in zip(guess, shown, strict=True) if colour != "grey")
            assert coloured == Counter(secret) & Counter(guess)


class Script:
    """A policy that gives these answers, and remembers what it was told."""

    truncated = False
    tokens_left = 1000

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.told: list[str] = []

    async def say(self, *turns: Any, **_: Any) -> str:
        self.told += [turn["content"] for turn in turns]
        return self.answers.pop(0)

    def close(self) -> None: ...


async def play(task: Wordle, *answers: str, secret: str = "react") -> tuple[Any, Script]:
    chat = Script(*answers)
    prompt = Prompt(({"role": "user", "content": "go"},), answer=secret)
    return await task.play(prompt, chat), chat  # type: ignore[arg-type]


async def test_a_game_is_won_with_the_word_and_each_further_guess_may_cost() -> None:
    reward, chat = await play(Wordle(turn_cost=0.1), "I try <guess>CRANE</guess>", "<think>hm</think><guess> react </guess>")
    assert chat.told == ["go", "c:yellow r:yellow a:green n:grey e:yellow"]
    assert reward.total == pytest.approx(0.9)
    assert reward.metrics == {"found": 1.0, "guesses": 2.0, "valid_guesses": 1.0, "green": 1.0}
    assert reward.info == {"guesses": ["crane", "react"]}


async def test_a_lost_game_earns_a_part_for_its_best_guess_and_rubbish_costs_a_turn() -> None:
    reward, chat = await play(Wordle(max_turns=3), "<guess>reads</guess>", "no idea", "<guess>stony</guess>")
    assert chat.told[2] == "That was not a guess: one word of five letters is asked for."
    assert reward.total == pytest.approx(0.2 * 3 / 5)
    assert reward.metrics == {"found": 0.0, "guesses": 2.0, "valid_guesses": pytest.approx(2 / 3), "green": 0.6}
    assert reward.tags == ("out_of_turns",)


async def test_guesses_outside_the_list_are_refused_where_that_is_asked_for() -> None:
    reward, chat = await play(Wordle(only_known_guesses=True, answer_tag=None), "zzzzz", "water", secret="water")
    assert chat.told[1] == "zzzzz is not in the word list."
    assert (reward.total, reward.metrics["valid_guesses"]) == (1.0, 0.5)


@pytest.mark.parametrize(
    "answer", ["<guess>four</guess>", "<guess>näher</guess>", "react", "<guess>react", "<guess>re act</guess>", ""]
)
def test_what_is_no_word_of_five_letters_is_no_guess(answer: str) -> None:
    assert Wordle().find_guess(answer) is None


def test_words_are_common_ones_a_packages_or_ones_own(tmp_path: Path) -> None:
    assert len(Wordle().word_list) == 465
    assert len(Wordle(words="reasoning_gym").word_list) == 9_925
    assert set(Wordle().word_list) <= set(Wordle(words="reasoning_gym").word_list)
    (tmp_path / "words.txt").write_text("Crane\nlonger\nreact three\n")
    assert Wordle(words_file=str(tmp_path / "words.txt")).word_list == ("crane", "react", "three")
    (tmp_path / "one.txt").write_text("crane")
    with pytest.raises(ValidationError, match="at least two words of five letters"):
        Wordle(words_file=str(tmp_path / "one.txt"))
    with pytest.raises(ValidationError, match=r"words_file: .*none.txt can't be read"):
        Wordle(words_file=str(tmp_path / "none.txt"))


def test_secrets_of_the_eval_split_are_never_trained_on() -> None:
    task = Wordle(num_train=3000, num_eval=500)
    train, held_out = ({prompt.answer for prompt in task.prompts(split)} for split in ("train", "eval"))
    assert len(held_out) > 40
    assert not train & held_out
    assert [p.answer for p in task.prompts("train")[:3]] == [p.answer for p in Wordle().prompts("train")[:3]]


def test_a_state_belongs_to_one_game() -> None:
    task = Wordle()
    first, second = (task.initial_state(Prompt((), answer="react")) for _ in range(2))
    task.reply(first, "<guess>react</guess>")
    assert task.is_done(first)
    assert second == WordleGame("react")
