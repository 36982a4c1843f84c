"""Prompts that leave no room for an answer are counted and left out before anything is drawn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import Field

from telescope.environments.base import LazyPrompts, Prompt, SingleTurn
from telescope.environments.chat import TokenChat
from telescope.environments.template import ChatTemplate
from telescope.records import PromptRef
from telescope.workers.loading import EnvironmentBroken
from telescope.workers.prompt_cache import PromptCache
from telescope.workers.prompt_lengths import leave_out_too_long
from tests.environments.conftest import Script
from tests.environments.test_answer_form import BETWEEN_MARKS, CHANNELS, open_template
from tests.workers.conftest import loaded

# the tiny model has a token a letter, and its template adds two


class Lengths(SingleTurn):
    lengths: tuple[int, ...]

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [Prompt(({"role": "user", "content": "a" * length},), answer=str(n)) for n, length in enumerate(self.lengths)]


class Formula(Lengths):
    size: int = 1000
    made: list[int] = Field(default_factory=list)

    def prompts(self, split: str) -> Sequence[Prompt]:
        return LazyPrompts(self.size, self.one)

    def one(self, index: int) -> Prompt:
        self.made.append(index)
        return Prompt(({"role": "user", "content": "a" * self.lengths[index % len(self.lengths)]},))


def test_too_long_prompts_are_left_out_counted_and_change_the_digest(template: ChatTemplate) -> None:
    whole = loaded(Lengths(lengths=(3, 8, 9, 20, 5)))
    kept = leave_out_too_long(whole, template, 10, 60)
    assert (kept.card.split_sizes, kept.card.too_long) == ({"train": 3, "eval": 5}, 2)
    assert [kept.prompts["train"][index].answer for index in range(3)] == ["0", "1", "4"]
    assert [prompt.answer for prompt in kept.prompts["train"][1:]] == ["1", "4"]
    assert kept.card.digest != whole.card.digest
    assert leave_out_too_long(whole, template, 11, 60).card.digest not in (kept.card.digest, whole.card.digest)
    assert leave_out_too_long(whole, template, 22, 60) is whole


def test_a_data_set_is_measured_whole_in_chunks(template: ChatTemplate) -> None:
    lengths = [3] * 2500
    for place in (0, 999, 1000, 2499):
        lengths[place] = 30
    kept = leave_out_too_long(loaded(Lengths(lengths=tuple(lengths))), template, 10, 60)
    assert (kept.card.split_sizes["train"], kept.card.too_long) == (2496, 4)


def test_an_environment_of_which_nothing_fits_is_refused_with_the_numbers(template: ChatTemplate) -> None:
    with pytest.raises(EnvironmentBroken, match=r"each of its 2 train prompts is longer than the 10 tokens .*shortest: 11"):
        leave_out_too_long(loaded(Lengths(lengths=(9, 12))), template, 10, 60)


def test_a_formula_far_from_the_limit_is_sampled_and_one_near_it_is_measured_whole(template: ChatTemplate) -> None:
    short, near = Formula(lengths=(3,)), Formula(lengths=(3, 3, 3, 3, 3, 3, 9))
    assert leave_out_too_long(loaded(short), template, 10, 60).card.too_long == 0
    assert len(set(short.made)) == 256
    kept = leave_out_too_long(loaded(near), template, 10, 60)
    assert (kept.card.split_sizes["train"], kept.card.too_long) == (858, 142)


def test_characters_of_several_bytes_are_counted_as_tokens_not_guessed(template: ChatTemplate) -> None:
    """Twice the bytes must fit, or the prompt is tokenised."""

    class Umlauts(Lengths):
        def prompts(self, split: str) -> Sequence[Prompt]:
            return [Prompt(({"role": "user", "content": text},)) for text in ("a", "ü" * 7, "a" * 11)]

    kept = leave_out_too_long(loaded(Umlauts(lengths=())), template, 10, 60)
    assert (kept.card.split_sizes["train"], kept.card.too_long) == (2, 1)


class Words:
    """A tokenizer of a token a word, that counts the characters it was given; a letter beyond ASCII is a token too."""

    def __init__(self) -> None:
        self.read = 0

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        return "".join(f"<|{turn['role']}|> {turn['content']}" for turn in conversation)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.read += len(text)
        return [0] * (len(text.split()) + sum(not letter.isascii() for letter in text) * (not text.isascii()))

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return "</s>"


class Texts(SingleTurn):
    texts: tuple[str, ...]
    times: int = 1

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [Prompt(({"role": "user", "content": text},)) for text in self.texts] * self.times


def measured(environment: Texts, longest: int) -> tuple[int, int, float]:
    """(prompts that are too long, characters tokenised, CPU seconds)."""
    words, begin = Words(), time.process_time()
    whole = loaded(environment)
    kept = leave_out_too_long(whole, ChatTemplate(words, [0]), longest, 60)
    return kept.card.too_long, words.read, time.process_time() - begin


def test_a_hundred_thousand_plain_prompts_are_measured_by_a_sample():
    """2,000 bytes and 401 tokens each, where 1,000 fit: bytes alone do not say so."""
    too_long, read, seconds = measured(Texts(texts=("word " * 399 + "last",), times=100_000), 1000)
    assert too_long == 0
    assert read < 257 * 2100
    assert seconds < 4.0, "tokenising them all takes 15, and machines differ by two"


def test_what_is_no_plain_text_is_tokenised_whatever_the_sample_says():
    """600 letters that are a token each among prompts of 401 tokens, at a place that the sample does not hold."""
    texts = ["word " * 399 + "last"] * 2000
    texts[777] = "ü" * 1200
    assert measured(Texts(texts=tuple(texts)), 1000)[0] == 1


def test_prompts_of_megabytes_are_told_by_their_begin():
    """Plain ones by their words, others by the tokens of what comes first."""
    plain, odd, short = "word " * 300_000, "wörd " * 300_000, "word " * 100
    too_long, read, seconds = measured(Texts(texts=(plain, plain, short), times=20_000), 1000)
    assert too_long == 40_000
    assert read < 257 * 600
    assert seconds < 10.0, "4.4 to 5.8 on one machine within a minute"
    too_long, read, _ = measured(Texts(texts=(odd, short)), 1000)
    assert too_long == 1
    assert read < 3 * 17_000, "16 characters a token of the limit, in the sample and again"


def test_a_long_prompt_of_few_tokens_is_read_to_its_end():
    gaps = "word" + " " * 100_000
    assert measured(Texts(texts=(gaps * 3, "word")), 1000)[0] == 0


def test_measuring_ends_at_its_deadline_with_a_sentence(template: ChatTemplate) -> None:
    with pytest.raises(EnvironmentBroken, match=r"0 of its 3 train prompts were measured in -1 s.*placement_timeout_s"):
        leave_out_too_long(loaded(Lengths(lengths=(3, 4, 20))), template, 10, -1)


class Shown(SingleTurn):
    """A question behind an example with a model's own marks."""

    raw: str

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [
            Prompt(
                (
                    {"role": "user", "content": "2 + 3"},
                    {"role": "assistant", "content": self.raw},
                    {"role": "user", "content": "4 + 5"},
                )
            )
        ]


@pytest.mark.parametrize(
    ("source", "raw", "tokens"),
    [
        pytest.param(
            BETWEEN_MARKS, "<|START_THINKING|>five<|END_THINKING|><|START_TEXT|>5<|END_TEXT|>", 159, id="between marks"
        ),
        pytest.param(
            CHANNELS,
            "<|channel|>analysis<|message|>five<|end|><|start|>assistant<|channel|>final<|message|>5",
            125,
            id="channels",
        ),
    ],
)
async def test_the_answer_of_an_example_is_measured_and_remembered_as_it_is_asked(source: str, raw: str, tokens: int) -> None:
    template, task = open_template(source), loaded(Shown(raw=raw))
    prompts = PromptCache(template)
    prompt = await prompts.get_prompt(task, PromptRef("task", "train", 0))
    policy = Script((template.tokenizer.encode("x", add_special_tokens=False), "length"))
    write, template.tokenizer.apply_chat_template = template.tokenizer.apply_chat_template, refuse  # type: ignore[method-assign]
    await TokenChat(template, policy, 1000).say(*prompt.turns)
    template.tokenizer.apply_chat_template = write  # type: ignore[method-assign]
    asked = len(policy.prompts[0])
    assert (asked, template.lengths([prompt.turns]), len(template.render(prompt.turns).ids)) == (tokens, [tokens], tokens)
    assert leave_out_too_long(task, template, asked, 60) is task
    with pytest.raises(EnvironmentBroken, match=f"shortest: {asked}"):
        leave_out_too_long(task, template, asked - 1, 60)
    prompts.close()


def refuse(*arguments: Any, **options: Any) -> str:
    raise AssertionError("the prompt was rendered once more")
