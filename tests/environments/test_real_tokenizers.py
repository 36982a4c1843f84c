"""Exact ids against one full render of the dialogue, with the vocabularies of real models and texts made to confuse them."""

from __future__ import annotations

import asyncio
import unicodedata
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.environments.base import Turn
from telescope.environments.chat import Recording, TokenChat
from telescope.environments.template import ChatTemplate
from tests.environments.conftest import Script
from tests.environments.real_tokenizers import Model, model

FAST, SLOW = ("qwen3", "deepseek", "smollm2"), ("qwen3.6", "mistral")
NAMES = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
LOOKS_SPECIAL = (
    "<|im_end|>", "<|im_start|>", "<think>", "</think>", "<think>\nfirst add\n</think>\n\n", "<tool_call>", "</s>", "[/INST]",
    "<｜end▁of▁sentence｜>", "<|endoftext|>", "\n", " ", "é", "e\u0301", "𝄞", "don't", "12345", "  \n\n",
)  # fmt: skip
CHARACTERS = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"])  # SmolLM2 has no bytes for some others
TEXTS = st.lists(st.one_of(st.text(CHARACTERS, max_size=6), st.sampled_from(LOOKS_SPECIAL)), max_size=5).map("".join)


@dataclass(frozen=True)
class Step:
    """What comes to the policy, and what it answers. `spelled`: character by character, as no tokenizer would."""

    role: str  # user, tool, or restart
    message: str
    answer: str
    ended: bool
    spelled: bool

    def ids(self, by: Model) -> list[int]:
        pieces = self.answer if self.spelled else [self.answer]
        ids = [token for piece in pieces for token in by.encode(piece)]
        return [*ids, by.end_id] if self.ended or not ids else ids

    @property
    def turn(self) -> Turn:
        return {"role": "tool", "content": self.message} if self.role == "tool" else {"role": "user", "content": self.message}


STEPS = st.lists(
    st.builds(Step, st.sampled_from(["user", "user", "tool", "restart"]), TEXTS, TEXTS, st.booleans(), st.booleans()),
    min_size=1,
    max_size=5,
)


@dataclass(frozen=True)
class Played:
    recording: Recording
    answers: list[list[int]]
    prompts: list[list[int]]  # as the policy saw them
    renders: list[str]  # the template's text of the same dialogues, each rendered at once
    branches: list[int]  # turns at which a branch must begin


def play(by: Model, steps: list[Step], *, thinking: bool, tools: bool) -> Played:
    template = ChatTemplate(by.tokenizer, [by.end_id], enable_thinking=thinking)
    answers = [step.ids(by) for step in steps]
    policy = Script(*((ids, "stop" if ids[-1] == by.end_id else "length") for ids in answers))
    chat = TokenChat(template, policy, 1_000_000)
    given_tools = [TOOL] if tools else []
    history: list[Turn] = []
    renders: list[str] = []
    branches: list[int] = []

    async def talk() -> None:
        said = ""
        for at, step in enumerate(steps):
            if step.role == "restart":
                chat.restart()
                history.clear()
            history.append(step.turn if history else {"role": "user", "content": step.message})
            renders.append(template.text(history, given_tools))
            if len(history) == 1 or not renders[-1].startswith(said):
                branches.append(at)
            answer = await chat.say(history[-1], tools=given_tools)
            ended = answers[at][-1] == by.end_id
            said = renders[-1] + answer + (by.end if ended else "")
            history.append({"role": "assistant", "content": answer})

    asyncio.run(talk())
    return Played(chat.recording(), answers, policy.prompts, renders, branches)


def same_text(one: str, other: str) -> bool:
    """Some tokenizers compose characters before anything else."""
    return unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)


def check(by: Model, steps: list[Step], *, thinking: bool, tools: bool) -> None:
    played = play(by, steps, thinking=thinking, tools=tools)
    decode = lambda ids: by.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)  # noqa: E731
    for prompt, render in zip(played.prompts, played.renders, strict=True):
        assert same_text(decode(prompt), render)
    first_logprobs = [round(-(at + 1), 2) for at in range(len(steps))]
    begun: list[int] = []
    trained: list[tuple[int, float]] = []
    for branch in played.recording.branches:
        sampled = branch.mask.astype(bool)
        assert np.isnan(branch.logprobs[~sampled]).all()
        assert (branch.versions[~sampled] == -1).all()
        begun.append(first_logprobs.index(round(float(branch.logprobs[sampled][0]), 2)))
        trained += zip(branch.ids[sampled].tolist(), np.round(branch.logprobs[sampled], 2).tolist(), strict=True)
    assert begun == played.branches
    wanted = [(token, round(-(at + 1) - k / 100, 2)) for at, ids in enumerate(played.answers) for k, token in enumerate(ids)]
    assert [token for token, _ in trained] == [token for token, _ in wanted]
    assert np.allclose([logprob for _, logprob in trained], [logprob for _, logprob in wanted], atol=0.011)
    # Each prompt with the answer it got is the beginning of a branch: nothing was put between or changed afterwards.
    whole = [branch.ids.tolist() for branch in played.recording.branches]
    for prompt, answer in zip(played.prompts, played.answers, strict=True):
        assert any(ids[: len(prompt) + len(answer)] == prompt + answer for ids in whole)


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps=STEPS, thinking=st.booleans(), tools=st.booleans())
def test_exact_ids_read_like_a_full_render_and_each_sampled_token_is_trained_once(
    name: str, steps: list[Step], thinking: bool, tools: bool
) -> None:
    check(model(name), steps, thinking=thinking, tools=tools)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAST, *SLOW])
@settings(max_examples=120, deadline=None, derandomize=True)
@given(steps=STEPS, thinking=st.booleans(), tools=st.booleans())
def test_so_they_do_for_many_more_texts(name: str, steps: list[Step], thinking: bool, tools: bool) -> None:
    by = model(name)
    if not by.speaks_tool:  # its template refuses tool results without calls, and empty texts
        steps = [
            Step("user" if s.role == "tool" else s.role, s.message or "-", s.answer + ".", s.ended, s.spelled) for s in steps
        ]
    check(by, steps, thinking=thinking, tools=tools)


CALM = [
    Step("user", "What is 5+8?", "Let me think: 13.", True, False),
    Step("user", "And minus 3?", "That is 10, isn't it?", True, False),
    Step("user", "Sure?", "Yes.", True, False),
]


@pytest.mark.parametrize("name", NAMES)
def test_of_a_calm_dialogue_the_exact_ids_are_those_of_one_full_render(name: str) -> None:
    by = model(name)
    played = play(by, CALM, thinking=True, tools=by.speaks_tool)
    (only,) = played.recording.branches
    assert only.ids.tolist() == [*by.encode(played.renders[-1]), *played.answers[-1]]
    assert int(only.mask.sum()) == sum(map(len, played.answers))


@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen3.6", marks=pytest.mark.slow)])
def test_thoughts_stay_while_tools_answer_and_go_when_the_user_speaks(name: str) -> None:
    thought = "<think>\nI should look.\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    steps = [
        Step("user", "look", thought, True, False),
        Step("tool", "a cat", thought, True, False),
        Step("tool", "a dog", "<think>\nok\n</think>\n\nboth", True, False),
        Step("user", "thanks", "welcome", True, False),
    ]
    played = play(model(name), steps, thinking=True, tools=True)
    assert played.branches == [0, 3]
    first, second = played.recording.branches
    assert int(first.mask.sum()) == sum(map(len, played.answers[:3]))
    assert int(second.mask.sum()) == len(played.answers[3])
    assert "I should look" in model(name).tokenizer.decode(first.ids)
    assert "I should look" not in model(name).tokenizer.decode(second.ids)


@pytest.mark.slow
def test_a_template_that_moves_its_tools_to_the_last_question_begins_a_branch_with_each() -> None:
    assert play(model("mistral"), CALM, thinking=True, tools=True).branches == [0, 1, 2]


@pytest.mark.slow
async def test_results_of_tools_follow_raw_calls_in_the_template_of_mistral() -> None:
    by = model("mistral")
    template = ChatTemplate(by.tokenizer, [by.end_id])
    call = by.encode('[TOOL_CALLS][{"name": "look", "arguments": {}, "id": "abcdefghi"}]')
    policy = Script(([*call, by.end_id], "stop"), ([*by.encode("A cat."), by.end_id], "stop"))
    chat = TokenChat(template, policy, 10_000)
    await chat.say({"role": "user", "content": "look"}, tools=[TOOL])
    await chat.say({"role": "tool", "content": "a cat", "tool_call_id": "abcdefghi"})
    added = by.tokenizer.decode(policy.prompts[1][len(policy.prompts[0]) + len(call) + 1 :])
    assert added == '[TOOL_RESULTS]{"content": "a cat", "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    assert len(chat.recording().branches) == 1
