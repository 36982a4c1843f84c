"""Prompts that leave no room for an answer are counted and left out before anything is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pydantic import Field

from telescope.environments.base import LazyPrompts, Prompt, SingleTurn
from telescope.environments.template import ChatTemplate
from telescope.workers.loading import EnvironmentBroken
from telescope.workers.prompt_lengths import leave_out_too_long
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


def test_measuring_ends_at_its_deadline_with_a_sentence(template: ChatTemplate) -> None:
    with pytest.raises(EnvironmentBroken, match=r"0 of its 3 train prompts were measured in -1 s.*placement_timeout_s"):
        leave_out_too_long(loaded(Lengths(lengths=(3, 4, 20))), template, 10, -1)
