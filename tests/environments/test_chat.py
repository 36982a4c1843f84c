"""What is trained on: exact ids, which of them were sampled, with which log-prob, by which version."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from telescope.environments.chat import BrokenCompletion, ChatError, GenerationAborted, PromptTooLong, Sampled, TokenChat
from telescope.environments.failures import ContextFull
from telescope.environments.template import ChatTemplate, TemplateError
from telescope.records import Trajectory
from tests.environments.conftest import CHATML, THINKING, TRIMMING, Script


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def rounded(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), 2) for value in values]


def sampled_tokens(branches: tuple[Trajectory, ...]) -> list[tuple[int, float, int]]:
    """(id, log-prob, version) of every token with mask 1, in order over all branches."""
    return [
        (int(token), round(float(logprob), 2), int(version))
        for branch in branches
        for token, mask, logprob, version in zip(branch.ids, branch.mask, branch.logprobs, branch.versions, strict=True)
        if mask
    ]


def scripted(turn: int, ids: list[int]) -> list[tuple[int, float, int]]:
    return [(token, round(-(turn + 1) - at / 100, 2), 10 * turn + at) for at, token in enumerate(ids)]


async def test_one_turn_is_prompt_then_answer_with_its_end_token(tiny: ChatTemplate) -> None:
    # <|user|> r e v _ a b <|assistant|>  |  b a <eos>
    policy = Script(([72, 71, 1], "stop"))
    chat = TokenChat(tiny, policy, 100)
    assert await chat.say(user("rev ab")) == "ba"
    record = chat.recording()
    (only,) = record.branches
    assert only.ids.tolist() == [4, 88, 75, 92, 6, 71, 72, 5, 72, 71, 1]
    assert only.mask.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert rounded(only.logprobs) == [None] * 8 + [-1.0, -1.01, -1.02]
    assert only.versions.tolist() == [-1] * 8 + [0, 1, 2]
    assert [array.dtype for array in (only.ids, only.mask, only.logprobs, only.versions)] == [
        np.int32,
        np.uint8,
        np.float32,
        np.int32,
    ]
    assert policy.prompts == [[4, 88, 75, 92, 6, 71, 72, 5]]
    assert (record.prompt_tokens, record.completion_tokens, record.turns, record.finish_reason) == (8, 3, 1, "stop")
    assert (record.prompt_text, record.completion_text) == ("<|user|>rev ab<|assistant|>", "ba")


async def test_the_next_prompt_is_the_exact_ids_so_far_plus_separators(tiny: ChatTemplate) -> None:
    policy = Script(([72, 71, 1], "stop"), ([73, 1], "stop"))
    chat = TokenChat(tiny, policy, 100)
    await chat.say(user("ab"))
    assert await chat.say(user("c")) == "c"
    (only,) = chat.recording().branches
    #                          <user> a  b  <asst> b  a <eos> <user> c <asst>  c <eos>
    assert only.ids.tolist() == [4, 71, 72, 5, 72, 71, 1, 4, 73, 5, 73, 1]
    assert only.mask.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert rounded(only.logprobs) == [None] * 4 + [-1.0, -1.01, -1.02] + [None] * 3 + [-2.0, -2.01]
    assert only.versions.tolist() == [-1, -1, -1, -1, 0, 1, 2, -1, -1, -1, 10, 11]
    assert policy.prompts[1] == only.ids.tolist()[:10]
    assert chat.recording().completion_text == "ba<eos><|user|>c<|assistant|>c"


async def test_an_answer_cut_off_gets_its_end_token_from_the_template_untrained(tiny: ChatTemplate) -> None:
    policy = Script(([72, 71], "length"), ([73, 1], "stop"))
    chat = TokenChat(tiny, policy, 100)
    assert await chat.say(user("ab")) == "ba"
    assert chat.truncated
    await chat.say(user("c"))
    assert not chat.truncated
    (only,) = chat.recording().branches
    assert only.ids.tolist() == [4, 71, 72, 5, 72, 71, 1, 4, 73, 5, 73, 1]
    assert only.mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]


async def test_an_answer_that_ended_at_a_stop_text_is_kept_whole_and_the_dialogue_goes_on_in_its_exact_tokens(
    tiny: ChatTemplate,
) -> None:
    """No end token was sampled: the template's own one follows as prompt."""
    policy = Script(([72, 71], "stop"), ([73, 1], "stop"))
    chat = TokenChat(tiny, policy, 100)
    assert await chat.say({"role": "user", "content": "ab"}) == "ba"
    assert not chat.truncated
    await chat.say({"role": "user", "content": "c"})
    first, second = policy.prompts
    assert second[: len(first) + 3] == [*first, 72, 71, 1]
    (branch,) = chat.recording().branches
    assert branch.mask[len(first) : len(first) + 3].tolist() == [1, 1, 0]


async def test_an_end_token_at_the_limit_is_text_only_where_it_did_not_end_the_answer(tiny: ChatTemplate) -> None:
    chat = TokenChat(tiny, Script(([72, 1, 71], "length")), 100)
    assert await chat.say(user("ab")) == "b<eos>a"


async def test_special_tokens_inside_an_answer_show_in_its_text(tiny: ChatTemplate) -> None:
    chat = TokenChat(tiny, Script(([72, 2, 71, 1], "stop")), 100)
    assert await chat.say(user("ab")) == "b<bos>a"


async def test_several_turns_given_at_once_are_all_prompt(tiny: ChatTemplate) -> None:
    chat = TokenChat(tiny, Script(([71, 1], "stop")), 100)
    await chat.say({"role": "system", "content": "s"}, user("a"))
    assert chat.recording().branches[0].ids.tolist() == [3, 89, 4, 71, 5, 71, 1]


async def test_merges_of_a_real_vocabulary_do_not_shift_the_mask(bpe_tokenizer: Any) -> None:
    template = ChatTemplate(bpe_tokenizer, [bpe_tokenizer.eos_token_id], chat_template=CHATML)
    end = bpe_tokenizer.eos_token_id
    first = [*bpe_tokenizer.encode("the answer is 5+8-3"), end]
    second = [*bpe_tokenizer.encode("take away"), end]
    assert len(first) < len("the answer is 5+8-3")
    policy = Script((first, "stop"), (second, "stop"))
    chat = TokenChat(template, policy, 1000)
    await chat.say(user("use 3 5 8 make 10"))
    await chat.say(user("are you sure"))
    (only,) = chat.recording().branches
    assert sampled_tokens((only,)) == scripted(0, first) + scripted(1, second)
    # Canonical answers: the exact ids are then those of one full render of the dialogue, up to the newline after its end.
    full = bpe_tokenizer.apply_chat_template(
        [user("use 3 5 8 make 10"), {"role": "assistant", "content": "the answer is 5+8-3"}, user("are you sure"),
         {"role": "assistant", "content": "take away"}], chat_template=CHATML, tokenize=False,
    )  # fmt: skip
    assert only.ids.tolist() == bpe_tokenizer.encode(full.removesuffix("\n"), add_special_tokens=False)


async def test_tokens_that_the_tokenizer_would_not_choose_are_kept_as_sampled(bpe_tokenizer: Any) -> None:
    template = ChatTemplate(bpe_tokenizer, [bpe_tokenizer.eos_token_id], chat_template=CHATML)
    spelled = [bpe_tokenizer.convert_tokens_to_ids(letter) for letter in "answer"]
    assert bpe_tokenizer.encode("answer") != spelled
    policy = Script(([*spelled, bpe_tokenizer.eos_token_id], "stop"), ([bpe_tokenizer.eos_token_id], "stop"))
    chat = TokenChat(template, policy, 1000)
    assert await chat.say(user("x")) == "answer"
    assert await chat.say(user("y")) == ""
    (only,) = chat.recording().branches
    at = len(policy.prompts[0])
    assert only.ids.tolist()[at : at + 7] == [*spelled, bpe_tokenizer.eos_token_id]
    assert policy.prompts[1][: at + 7] == only.ids.tolist()[: at + 7]


async def test_half_a_character_stays_the_tokens_that_were_sampled(bpe_tokenizer: Any) -> None:
    template = ChatTemplate(bpe_tokenizer, [bpe_tokenizer.eos_token_id], chat_template=CHATML)
    half = bpe_tokenizer.encode("é")[:1]
    policy = Script((half, "length"), ([bpe_tokenizer.eos_token_id], "stop"))
    chat = TokenChat(template, policy, 1000)
    assert await chat.say(user("x")) == "�"
    await chat.say(user("y"))
    (only,) = chat.recording().branches
    assert only.ids.tolist()[len(policy.prompts[0])] == half[0]
    assert int(only.mask.sum()) == 2


async def test_a_template_that_strips_thinking_starts_a_branch(bpe_tokenizer: Any) -> None:
    end = bpe_tokenizer.eos_token_id
    template = ChatTemplate(bpe_tokenizer, [end], chat_template=THINKING, enable_thinking=True)
    first = [*bpe_tokenizer.encode("<think>\nfirst add\n</think>\n\n5+8"), end]
    second = [*bpe_tokenizer.encode("<think>\nthen\n</think>\n\n8"), end]
    policy = Script((first, "stop"), (second, "stop"))
    chat = TokenChat(template, policy, 1000)
    await chat.say(user("add"))
    assert await chat.say(user("more")) == "<think>\nthen\n</think>\n\n8"
    record = chat.recording()
    assert len(record.branches) == 2
    assert sampled_tokens(record.branches) == scripted(0, first) + scripted(1, second)
    shown = (
        "<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n5+8<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )
    assert policy.prompts[1] == bpe_tokenizer.encode(shown, add_special_tokens=False)
    assert int(record.branches[1].mask[: len(policy.prompts[1])].sum()) == 0
    assert (record.turns, record.completion_tokens) == (2, len(first) + len(second))


async def test_an_answer_without_thought_needs_no_branch_in_that_template(bpe_tokenizer: Any) -> None:
    end = bpe_tokenizer.eos_token_id
    template = ChatTemplate(bpe_tokenizer, [end], chat_template=THINKING, enable_thinking=True)
    plain = [*bpe_tokenizer.encode("5+8"), end]
    chat = TokenChat(template, Script((plain, "stop"), (plain, "stop")), 1000)
    await chat.say(user("add"))
    await chat.say(user("more"))
    assert len(chat.recording().branches) == 1


async def test_the_empty_thought_in_the_header_is_prompt_and_gone_in_the_next_turn(bpe_tokenizer: Any) -> None:
    end = bpe_tokenizer.eos_token_id
    template = ChatTemplate(bpe_tokenizer, [end], chat_template=THINKING, enable_thinking=False)
    plain = [*bpe_tokenizer.encode("5+8"), end]
    policy = Script((plain, "stop"), (plain, "stop"))
    chat = TokenChat(template, policy, 1000)
    await chat.say(user("add"))
    await chat.say(user("more"))
    assert bpe_tokenizer.decode(policy.prompts[0]).endswith("assistant\n<think>\n\n</think>\n\n")
    assert "<think>" not in bpe_tokenizer.decode(policy.prompts[1]).split("more")[0]
    assert sampled_tokens(chat.recording().branches) == scripted(0, plain) + scripted(1, plain)


@pytest.mark.parametrize(("answer", "branches"), [("5+8", 1), (" 5+8\n", 2)])
async def test_a_template_that_trims_branches_only_where_it_trimmed(bpe_tokenizer: Any, answer: str, branches: int) -> None:
    end = bpe_tokenizer.eos_token_id
    template = ChatTemplate(bpe_tokenizer, [end], chat_template=TRIMMING)
    ids = [*bpe_tokenizer.encode(answer), end]
    chat = TokenChat(template, Script((ids, "stop"), (ids, "stop")), 1000)
    await chat.say(user("add"))
    await chat.say(user("more"))
    assert len(chat.recording().branches) == branches
    assert sampled_tokens(chat.recording().branches) == scripted(0, ids) + scripted(1, ids)


async def test_another_end_token_than_the_template_writes_starts_a_branch(bpe_tokenizer: Any) -> None:
    other = bpe_tokenizer.convert_tokens_to_ids("<|endoftext|>")
    template = ChatTemplate(bpe_tokenizer, [bpe_tokenizer.eos_token_id, other], chat_template=CHATML)
    ids = [*bpe_tokenizer.encode("5+8"), other]
    chat = TokenChat(template, Script((ids, "stop"), (ids, "stop")), 1000)
    assert await chat.say(user("add")) == "5+8"
    await chat.say(user("more"))
    assert [int(branch.mask.sum()) for branch in chat.recording().branches] == [len(ids), len(ids)]


@pytest.mark.parametrize("finish", ["stop", "length"])
async def test_no_stray_space_between_turns_of_a_sentencepiece_tokenizer(metaspace_tokenizer: Any, finish: str) -> None:
    tokenizer = metaspace_tokenizer
    template = ChatTemplate(tokenizer, [tokenizer.eos_token_id])
    answer = tokenizer.encode("five and eight", add_special_tokens=False)
    ids = [*answer, tokenizer.eos_token_id] if finish == "stop" else answer
    policy = Script((ids, finish), ([tokenizer.eos_token_id], "stop"))  # type: ignore[arg-type]
    chat = TokenChat(template, policy, 1000)
    text = await chat.say(user("add"))
    await chat.say(user("more"))
    tail = policy.prompts[1][len(policy.prompts[0]) + len(answer) :]
    assert (
        tail
        == tokenizer.encode("x</s>[INST] more [/INST]", add_special_tokens=False)[
            len(tokenizer.encode("x", add_special_tokens=False)) :
        ]
    )
    full = "[INST] add [/INST]" + text + "</s>[INST] more [/INST]"
    assert len(chat.recording().branches) == 1
    assert tokenizer.decode(policy.prompts[1]).replace(" ", "") == full.replace(" ", "")


@pytest.mark.parametrize("shape", list(itertools.product([CHATML, THINKING, TRIMMING], [True, False])), ids=str)
async def test_each_sampled_token_is_trained_once_over_many_turns(bpe_tokenizer: Any, shape: tuple[str, bool]) -> None:
    end = bpe_tokenizer.eos_token_id
    template = ChatTemplate(bpe_tokenizer, [end], chat_template=shape[0], enable_thinking=shape[1])
    texts = ["5+8", " 5 ", "<think>\nadd\n</think>\n\n8", "</think>", "", "answer\n", "é"]
    answers = [([*bpe_tokenizer.encode(text), *([end] if at % 3 else [])] or [end]) for at, text in enumerate(texts)]
    policy = Script(*((ids, "stop" if ids[-1] == end else "length") for ids in answers))
    chat = TokenChat(template, policy, 10_000)
    for at in range(len(texts)):
        await chat.say(user(f"turn {at}"))
    record = chat.recording()
    assert sampled_tokens(record.branches) == [token for at, ids in enumerate(answers) for token in scripted(at, ids)]
    for branch in record.branches:
        assert np.isnan(branch.logprobs[branch.mask == 0]).all()
        assert (branch.versions[branch.mask == 0] == -1).all()
    # Each prompt the policy saw is the beginning of a recorded branch, up to the answer it then gave.
    beginnings = {tuple(branch.ids[:end_at]) for branch in record.branches for end_at in range(len(branch.ids) + 1)}
    assert all(tuple(prompt + ids) in beginnings for prompt, ids in zip(policy.prompts, answers, strict=True))


class Broken:
    def __init__(self, **changes: Any) -> None:
        self._changes = changes

    async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None) -> Sampled:
        good: dict[str, Any] = {
            "ids": np.array([71, 1], np.int32),
            "logprobs": np.array([-0.5, -0.25], np.float32),
            "versions": np.array([3, 3], np.int32),
            "finish_reason": "stop",
        }
        return Sampled(**(good | self._changes))


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"logprobs": np.array([-0.5, np.nan], np.float32)}, BrokenCompletion, "token 1 of a completion has log-prob nan"),
        ({"logprobs": np.array([-np.inf, -1], np.float32)}, BrokenCompletion, "token 0 of a completion has log-prob -inf"),
        ({"logprobs": np.array([-1, 0.5], np.float32)}, BrokenCompletion, "token 1 of a completion has log-prob 0.5"),
        ({"logprobs": np.array([-1], np.float32)}, BrokenCompletion, "2 ids, 1 log-probs and 2 versions"),
        ({"logprobs": np.array([], np.float32)}, BrokenCompletion, "2 ids, 0 log-probs"),
        ({"versions": np.array([3, -1], np.int32)}, BrokenCompletion, "negative token id or weight version"),
        ({"ids": np.array([-1, 1], np.int32)}, BrokenCompletion, "negative token id or weight version"),
        ({k: np.array([], np.int32) for k in ("ids", "logprobs", "versions")}, BrokenCompletion, "no tokens"),
        ({"finish_reason": "abort"}, GenerationAborted, "stopped the answer after 2 tokens"),
        ({"routed": np.zeros((2, 1, 1), np.uint8)}, BrokenCompletion, "routing of 2 tokens, and prompt and answer 5"),
    ],
)
async def test_a_completion_that_cannot_be_trained_on_is_an_error(
    tiny: ChatTemplate, changes: dict[str, Any], error: type[ChatError], why: str
) -> None:
    chat = TokenChat(tiny, Broken(**changes), 100)
    with pytest.raises(error, match=why):
        await chat.say(user("a"))
    with pytest.raises(ChatError, match="a turn of the dialogue failed"):
        chat.recording()


class Recorder:
    """A policy whose server records routing: token t of what it reads at turn n goes to expert 10 n + t. `silent`: turns of
    which it records none."""

    def __init__(self, policy: Script, silent: tuple[int, ...] = ()) -> None:
        self._policy, self._silent = policy, silent

    async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None) -> Sampled:
        sampled = await self._policy.sample(ids, turn, max_tokens)
        if turn in self._silent:
            return sampled
        read = 10 * turn + np.arange(len(ids) + len(sampled.ids) - 1)
        return replace(sampled, routed=np.r_[read, 255].astype(np.uint8)[:, None, None])


@pytest.mark.parametrize(
    ("silent", "expected"),
    [
        ((), [0, 1, 2, 3, 4, 5, 16, 17, 18, 19, 20, 255]),
        ((0,), [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 255]),
        ((1,), [0, 1, 2, 3, 4, 5, 255, 255, 255, 255, 255, 255]),
        ((0, 1), None),
    ],
)
async def test_a_tokens_first_record_stays_over_the_turns(
    tiny: ChatTemplate, silent: tuple[int, ...], expected: list[int] | None
) -> None:
    """The last token of an answer is read with the next turn's prompt."""
    #                                    <user> a  b  <asst> b  a <eos> <user> c <asst>  c <eos>
    chat = TokenChat(tiny, Recorder(Script(([72, 71, 1], "stop"), ([73, 1], "stop")), silent), 100)
    await chat.say(user("ab"))
    await chat.say(user("c"))
    (only,) = chat.recording().branches
    assert (None if only.routed is None else only.routed[:, 0, 0].tolist()) == expected


async def test_a_prompt_that_leaves_no_room_is_refused_before_it_is_sent(tiny: ChatTemplate) -> None:
    policy = Script(([71, 1], "stop"), ([71, 1], "stop"))
    chat = TokenChat(tiny, policy, 6)
    with pytest.raises(PromptTooLong, match="the prompt of turn 0 has 7 tokens, more than the 6"):
        await chat.say(user("aaaaa"))
    assert policy.prompts == []


async def test_a_dialogue_that_outgrows_the_model_is_the_policys_and_what_was_sampled_stands(tiny: ChatTemplate) -> None:
    policy = Script(([71, 1], "stop"), ([71, 1], "stop"))
    chat = TokenChat(tiny, policy, 6)
    await chat.say(user("aaaa"))
    with pytest.raises(ContextFull, match="the prompt of turn 1 has 11 tokens, more than the 6"):
        await chat.say(user("a"))
    assert len(policy.prompts) == 1
    recording = chat.recording()
    assert [branch.mask.tolist() for branch in recording.branches] == [[0] * 6 + [1, 1]]
    assert recording.finish_reason == "length"


async def test_a_dialogue_without_an_answer_is_no_rollout(tiny: ChatTemplate) -> None:
    with pytest.raises(ChatError, match="without asking the policy"):
        TokenChat(tiny, Script(), 100).recording()


async def test_half_a_surrogate_pair_that_an_environment_says_is_put_to_the_policy_as_the_sign_for_none(
    tiny: ChatTemplate,
) -> None:
    chat = TokenChat(tiny, Script(([72, 1], "stop"), ([72, 1], "stop")), 100)
    await chat.say(user("a\ud800"))
    await chat.say(user("b\udcff"))  # the name of a file that is not UTF-8
    record = chat.recording()
    assert record.prompt_text == "<|user|>a\ufffd<|assistant|>"
    assert len(record.branches) == 1
    assert tiny.lengths([(user("\ud800"),)]) == tiny.lengths([(user("\ufffd"),)])


@pytest.mark.parametrize(
    "turn", ["hello", {"content": "a"}, {"role": 3, "content": "a"}, {"role": "user"}, {"role": "user", "content": None}, None]
)
async def test_what_is_no_message_is_refused_and_the_dialogue_goes_on(tiny: ChatTemplate, turn: Any) -> None:
    chat = TokenChat(tiny, Script(([72, 1], "stop")), 100)
    for put in (chat.say, chat.restart):
        with pytest.raises(TypeError, match=r"is not a message like|has no content"):
            await put(turn)
    await chat.say(user("a"))
    assert chat.recording().prompt_text == "<|user|>a<|assistant|>"


async def test_a_template_that_refuses_the_roles_says_so(tiny_tokenizer: Any) -> None:
    strict = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
    template = ChatTemplate(tiny_tokenizer, [1], chat_template=strict)
    with pytest.raises(TemplateError, match="refuses the dialogue of system, user: no system role"):
        template.opening([{"role": "system", "content": ""}, user("a")])


ECHO = (
    "{% for t in tools or [] %}<|system|>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}<|assistant|>"
)
LOOK = {"type": "function", "function": {"name": "look"}}


async def test_tools_stand_in_the_prompt_and_stay_there(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer, [1], chat_template=ECHO)
    policy = Script(([72, 1], "stop"), ([73, 1], "stop"))
    chat = TokenChat(template, policy, 100)
    await chat.say(user("a"), tools=[LOOK])
    await chat.say({"role": "tool", "content": "b", "tool_call_id": "1"})
    (only,) = chat.recording().branches
    #                          <sys> l  o   o   k  <user> a <asst> b <eos> <user> b <asst> c <eos>
    assert only.ids.tolist() == [3, 82, 85, 85, 81, 4, 71, 5, 72, 1, 4, 72, 5, 73, 1]
    assert only.mask.tolist() == [0] * 8 + [1, 1] + [0] * 3 + [1, 1]


async def test_other_tools_begin_a_branch(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer, [1], chat_template=ECHO)
    chat = TokenChat(template, Script(([72, 1], "stop"), ([73, 1], "stop")), 100)
    await chat.say(user("a"), tools=[LOOK])
    await chat.say(user("b"), tools=[{"type": "function", "function": {"name": "go"}}])
    recording = chat.recording()
    assert [int(branch.mask.sum()) for branch in recording.branches] == [2, 2]
    assert recording.finish_reason == "stop"  # it was not cut off: it went on


STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}"
    "<|{{ 'user' if m.role == 'tool' else m.role }}|>{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %}"
    "{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}<|assistant|>"
)


@pytest.mark.parametrize(("answer", "branches"), [("!look", 1), ("look!", 2)])
async def test_a_template_that_wants_calls_spelled_out_gets_the_last_answer_restated(
    tiny_tokenizer: Any, answer: str, branches: int
) -> None:
    """Where it writes the call as the policy did, the exact ids go on."""
    template = ChatTemplate(tiny_tokenizer, [1], chat_template=STRICT)
    first = [*tiny_tokenizer.encode(answer, add_special_tokens=False), 1]
    policy = Script((first, "stop"), ([73, 1], "stop"), ([74, 1], "stop"))
    chat = TokenChat(template, policy, 100)
    await chat.say(user("a"))
    restated = {"role": "assistant", "content": "", "tool_calls": [LOOK]}
    await chat.say(restated, {"role": "tool", "content": "b"})
    await chat.say(user("d"))
    record = chat.recording()
    assert len(record.branches) == branches
    assert sampled_tokens(record.branches) == scripted(0, first) + scripted(1, [73, 1]) + scripted(2, [74, 1])
    assert tiny_tokenizer.decode(policy.prompts[1]) == "<|user|>a<|assistant|>!look<eos><|user|>b<|assistant|>"
    assert tiny_tokenizer.decode(policy.prompts[2]).endswith("!look<eos><|user|>b<|assistant|>c<eos><|user|>d<|assistant|>")


async def test_a_template_that_refuses_a_result_says_so_and_the_rollout_has_failed(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer, [1], chat_template=STRICT)
    chat = TokenChat(template, Script(([72, 1], "stop")), 100)
    await chat.say(user("a"))
    with pytest.raises(TemplateError, match="a result without a call"):
        await chat.say({"role": "tool", "content": "b"})
    assert isinstance(chat.failure, TemplateError)


async def test_a_restart_begins_a_branch_in_which_what_was_sampled_is_prompt(tiny: ChatTemplate) -> None:
    policy = Script(([72, 71, 1], "stop"), ([73, 1], "stop"), ([74, 1], "stop"))
    chat = TokenChat(tiny, policy, 100)
    answer = await chat.say(user("ab"))
    chat.restart(user("sum"), {"role": "assistant", "content": answer})
    await chat.say(user("c"))
    await chat.say(user("d"))
    one, two = chat.recording().branches
    assert one.ids.tolist() == [4, 71, 72, 5, 72, 71, 1]
    #                        <user> s  u   m  <asst> b a <eos> <user> c <asst> c <eos> <user> d <asst> d <eos>
    assert two.ids.tolist() == [4, 89, 91, 83, 5, 72, 71, 1, 4, 73, 5, 73, 1, 4, 74, 5, 74, 1]
    assert two.mask.tolist() == [0] * 11 + [1, 1] + [0] * 3 + [1, 1]
    assert sampled_tokens((one, two)) == scripted(0, [72, 71, 1]) + scripted(1, [73, 1]) + scripted(2, [74, 1])
    assert chat.recording().turns == 3


async def test_room_counts_down_and_a_full_dialogue_goes_on_after_a_restart(tiny: ChatTemplate) -> None:
    chat = TokenChat(tiny, Script(([72, 1], "stop"), ([73, 1], "stop")), 8)
    assert chat.tokens_left == 8
    await chat.say(user("ab"))
    assert chat.tokens_left == 2
    with pytest.raises(ContextFull):
        await chat.say(user("c"))
    chat.restart()
    assert await chat.say(user("c")) == "c"
    assert [int(branch.mask.sum()) for branch in chat.recording().branches] == [2, 2]


async def test_a_shorter_answer_leaves_room_for_a_longer_prompt(tiny: ChatTemplate) -> None:
    class Asked(Script):
        async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None) -> Sampled:
            limits.append(max_tokens)
            return await super().sample(ids, turn, max_tokens)

    limits: list[int | None] = []
    chat = TokenChat(tiny, Asked(([72, 1], "stop"), ([73, 1], "stop")), 5, max_tokens=10)
    await chat.say(user("abc"), max_tokens=20)
    with pytest.raises(ContextFull):
        await chat.say(user("d"), max_tokens=7)
    await chat.say(user("d"), max_tokens=5)
    assert limits == [20, 5]  # the sampler takes the lesser one
    with pytest.raises(ValueError, match="max_tokens=0"):
        await chat.say(user("d"), max_tokens=0)


class Slow:
    """Answers when told to; the answer's first token is the prompt's last but one."""

    def __init__(self) -> None:
        self.asked: dict[int, asyncio.Future[None]] = {}
        self.all_asked = asyncio.Event()

    async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None) -> Sampled:
        self.asked[turn] = asyncio.get_running_loop().create_future()
        if len(self.asked) == 3:
            self.all_asked.set()
        await self.asked[turn]
        answer = np.array([ids[-2], 1], np.int32)
        return Sampled(answer, np.full(2, -turn - 1.0, np.float32), np.full(2, turn, np.int32), "stop")


async def test_dialogues_side_by_side_are_branches_of_one_rollout(tiny: ChatTemplate) -> None:
    policy = Slow()
    chat = TokenChat(tiny, policy, 100)
    lines = [chat.dialogue() for _ in range(3)]
    asking = [asyncio.create_task(line.say(user(letter))) for line, letter in zip(lines, "abc", strict=True)]
    await asyncio.wait_for(policy.all_asked.wait(), 60)
    with pytest.raises(RuntimeError, match="close was called while"):
        chat.close()
    with pytest.raises(ChatError, match="while the policy was still answering"):
        chat.recording()
    policy.asked[2].set_result(None)
    assert await asking[2] == "c"
    asking[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking[1]
    policy.asked[0].set_result(None)
    assert await asking[0] == "a"
    record = chat.recording()
    assert [branch.ids.tolist() for branch in record.branches] == [[4, 73, 5, 73, 1], [4, 71, 5, 71, 1]]
    assert [branch.versions[-1] for branch in record.branches] == [2, 0]
    assert record.branch_turns == (((0, 2),), ((1, 2),))  # numbered as they came, not as they were asked
    assert (record.turns, record.completion_tokens, record.prompt_tokens) == (2, 4, 3)


async def test_a_cancelled_answer_of_the_environments_own_dialogue_is_a_failure(tiny: ChatTemplate) -> None:
    policy = Slow()
    chat = TokenChat(tiny, policy, 100)
    asking = asyncio.create_task(chat.say(user("a")))
    while not policy.asked:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(ChatError, match="a turn of the dialogue failed"):
        chat.recording()


async def test_a_side_dialogue_that_is_too_long_does_not_cut_the_rollout_off(tiny: ChatTemplate) -> None:
    chat = TokenChat(tiny, Script(([71, 1], "stop"), ([71, 1], "stop")), 6)
    await chat.say(user("aaaa"))
    side = chat.dialogue()
    with pytest.raises(ContextFull):
        await side.say(user("a" * 50))
    assert (chat.truncated, side.truncated, chat.recording().finish_reason) == (False, True, "stop")
    with pytest.raises(ContextFull):
        await chat.say(user("a"))
    assert (chat.truncated, chat.recording().finish_reason) == (True, "length")
    chat.restart()
    await chat.say(user("a"))
    assert (chat.truncated, chat.recording().finish_reason) == (False, "stop")


async def test_an_answer_of_a_side_dialogue_that_was_cut_off_is_not_the_main_ones(tiny: ChatTemplate) -> None:
    chat = TokenChat(tiny, Script(([71, 1], "stop"), ([71, 72], "length")), 100)
    await chat.say(user("a"))
    await chat.dialogue().say(user("b"))
    assert (chat.truncated, chat.recording().finish_reason) == (False, "stop")


async def test_of_a_rollout_whose_main_dialogue_asked_nothing_the_one_that_answered_last_counts(tiny: ChatTemplate) -> None:
    chat = TokenChat(tiny, Script(([71, 1], "stop"), ([71, 72], "length"), ([71, 1], "stop")), 8)
    one, two = chat.dialogue(), chat.dialogue()
    await one.say(user("a"))
    assert chat.recording().finish_reason == "stop"
    await two.say(user("b"))
    assert chat.recording().finish_reason == "length"
    two.restart()
    await two.say(user("b"))
    with pytest.raises(ContextFull):
        await one.say(user("a" * 50))
    assert chat.recording().finish_reason == "stop"
    with pytest.raises(ContextFull):
        await two.say(user("a" * 50))
    assert chat.recording().finish_reason == "length"


def test_a_group_renders_its_prompt_once_and_cannot_change_it(tiny: ChatTemplate) -> None:
    first, second = tiny.opening([user("rev abc")]), tiny.opening([user("rev abc")])
    assert first is second
    with pytest.raises(ValueError, match="read-only"):
        first.ids[0] = 7
