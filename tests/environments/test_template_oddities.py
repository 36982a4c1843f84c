"""A template whose turn end ends nothing, that writes no header, or that writes the date is told of in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from telescope.cli.env.check_policies import GoldenAnswers
from telescope.environments.tasks.countdown import Countdown
from telescope.environments.template import ChatTemplate
from telescope.records import PromptRef, RolloutOrder, Sampling

HEADER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TURNS = "{% for m in messages %}<|user|>{{ m.content }}{% if m.role == 'assistant' %}END{% endif %}{% endfor %}"


def template(tokenizer: Any, text: str, ends: tuple[int, ...] = (1,)) -> ChatTemplate:
    return ChatTemplate(tokenizer, ends, chat_template=text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TURNS.replace("END", "{{ eos_token }}") + HEADER, []),
        (TURNS.replace("END", "\n{{ eos_token }}\n") + HEADER, []),
        (TURNS.replace("END", "###") + HEADER, ["the chat template writes '###' behind an answer, and answers end with"]),
        (TURNS.replace("END", "") + HEADER, ["the chat template writes '' behind an answer"]),
        (TURNS.replace("END", "{{ eos_token }}"), ["the chat template writes the same with and without add_generation_prompt"]),
        (
            "{{ strftime_now('%d %b %Y') }}" + TURNS.replace("END", "{{ eos_token }}") + HEADER,
            ["the chat template writes the date (strftime_now)"],
        ),
        ("{% if false %}{{ strftime_now('%d') }}{% endif %}" + TURNS.replace("END", "{{ eos_token }}") + HEADER, []),
        ("{{ raise_exception('another dialogue') }}", []),
    ],
)
def test_each_oddity_has_its_sentence(tiny_tokenizer: Any, text: str, told: list[str]) -> None:
    found = template(tiny_tokenizer, text).find_oddities()
    assert len(found) == len(told), found
    assert all(sentence.startswith(begin) for sentence, begin in zip(found, told, strict=True))


def test_any_of_the_end_tokens_ends_a_turn(tiny_tokenizer: Any) -> None:
    text = TURNS.replace("END", tiny_tokenizer.decode([2])) + HEADER
    assert len(template(tiny_tokenizer, text).find_oddities()) == 1
    assert template(tiny_tokenizer, text, (1, 2)).find_oddities() == []


def test_the_embedded_models_own_template_is_fine(tiny_tokenizer: Any) -> None:
    assert ChatTemplate(tiny_tokenizer, [1]).find_oddities() == []


@pytest.mark.parametrize(("opening", "begin"), [("", ""), ("<think>", "</think>")])
async def test_a_right_answer_stands_behind_the_thought_that_the_prompt_has_opened(
    tiny_tokenizer: Any, opening: str, begin: str
) -> None:
    own = template(tiny_tokenizer, TURNS + HEADER + opening)
    environment = Countdown(answer_tag="answer")
    prompts = {"train": environment.prompts("train")}
    prompt = prompts["train"][0]
    order = RolloutOrder(0, 0, 0, 0, PromptRef("countdown", "train", 0), 0)
    sampled = await GoldenAnswers(own, environment, prompts).answer(
        order, 0, own.render(prompt.turns).ids, Sampling(temperature=1.0, max_tokens=99, seed=0)
    )
    assert own.decode(sampled.ids[:-1].tolist()) == f"{begin}<answer>{prompt.answer}</answer>"
