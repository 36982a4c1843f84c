"""Calls run, results given back, and whose fault it is when one goes wrong."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from transformers import AutoTokenizer

from telescope.config.plugins import ENVIRONMENTS, find
from telescope.environments.base import Prompt, Reward
from telescope.environments.chat import TokenChat
from telescope.environments.failures import InfrastructureError, PolicyError
from telescope.environments.template import ChatTemplate
from telescope.environments.tool_environment import ToolEnvironment, ToolState
from telescope.environments.tools.redact import declare_secrets
from tests.environments.conftest import CHATML, EMBEDDED, Script
from tests.environments.tools.talk import Talk

QUESTION = Prompt(({"role": "user", "content": "2 + 3?"},), answer="5")


@dataclass
class Notes(ToolState):
    notes: list[str] = field(default_factory=list)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def later(text: str) -> str:
    await asyncio.sleep(0)
    return text[::-1]


class Desk(ToolEnvironment):
    greeting: str = "hello"

    def note(self, text: str, state: Notes) -> str:
        state.notes.append(text)
        return f"{self.greeting}: {len(state.notes)}"

    def fail(self, how: str) -> str:
        raise {
            "tool": KeyError("k"),
            "machine": InfrastructureError("down"),
            "policy": PolicyError("no"),
            "exit": SystemExit(3),
        }[how]

    async def hang(self) -> None:
        await asyncio.Event().wait()

    tools: ClassVar[tuple[Any, ...]] = (add, later, note, fail, hang)

    def initial_state(self, prompt: Prompt) -> Notes:
        return Notes()

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [QUESTION]

    def reward(self, prompt: Prompt, state: Notes) -> Reward:
        return Reward(float(state.final_answer == prompt.answer), {"notes": float(len(state.notes))})


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def played(*answers: str, chat: dict[str, bool] | None = None, **settings: Any) -> tuple[Reward, Talk]:
    talk = Talk(answers, **(chat or {}))
    return await Desk(**settings).play(QUESTION, talk), talk


async def test_a_call_is_run_and_its_result_given_back_and_the_answer_without_a_call_is_the_last():
    reward, talk = await played(f"let me see {call('add', a=2, b=3)}", "5")
    assert reward.total == 1
    assert talk.results(1) == ["5"]
    assert talk.closed
    assert dict(reward.metrics) == {
        "total_tool_calls": 1,
        "tool_success_count": 1,
        "tool_error_count": 0,
        "tool_success_rate": 1,
        "unique_tools_used": 1,
        "malformed_tool_calls": 0,
        "add_calls": 1,
        "later_calls": 0,
        "note_calls": 0,
        "fail_calls": 0,
        "hang_calls": 0,
        "notes": 0,
    }


async def test_several_calls_of_one_answer_run_in_their_order_with_the_state_they_share():
    reward, talk = await played(call("note", text="a") + call("later", text="abc") + call("note", text="b"), "5")
    assert talk.results(1) == ["hello: 1", "cba", "hello: 2"]
    assert [turn["name"] for turn in talk.said[1] if turn["role"] == "tool"] == ["note", "later", "note"]
    assert (reward.metrics["total_tool_calls"], reward.metrics["unique_tools_used"], reward.metrics["note_calls"]) == (3, 2, 2)


async def test_calls_side_by_side_wait_for_each_other_and_keep_their_places():
    met = asyncio.Barrier(2)

    async def meet(who: str) -> str:
        await met.wait()
        return who

    class Meeting(Desk):
        concurrent_calls: ClassVar[bool] = True
        tools: ClassVar[tuple[Any, ...]] = (meet,)

    talk = Talk([call("meet", who="a") + call("meet", who="b"), "5"])
    await Meeting(tool_timeout_s=60).play(QUESTION, talk)
    assert talk.results(1) == ["a", "b"]


async def test_of_calls_side_by_side_one_failure_of_the_machinery_fails_the_rollout():
    class Beside(Desk):
        concurrent_calls: ClassVar[bool] = True

    with pytest.raises(InfrastructureError, match="down"):
        await Beside().play(QUESTION, Talk([call("hang") + call("fail", how="machine")]))


async def test_what_the_policy_gets_wrong_it_is_told_and_the_dialogue_goes_on():
    wrong = [
        call("sub", a=1),
        call("add", a="x", b=1),
        "<tool_call>{</tool_call>",
        call("fail", how="tool"),
        call("fail", how="exit"),
    ]
    reward, talk = await played(*wrong, "5")
    assert [talk.results(at)[0].partition(" (")[0] for at in range(1, 6)] == [
        "Error: there is no tool 'sub'",
        "Error: add: `a`='x': input should be a valid integer, unable to parse string as an integer",
        talk.results(3)[0].partition(" (")[0],
        "Error: 'k'",
        "Error: 3",
    ]
    assert talk.results(3)[0].startswith("Error: this is not JSON")
    assert "To call a tool, write <tool_call>" in talk.results(3)[0]
    metrics = reward.metrics
    assert (metrics["total_tool_calls"], metrics["tool_error_count"], metrics["malformed_tool_calls"]) == (4, 4, 1)
    assert (metrics["tool_success_rate"], metrics["unique_tools_used"], reward.total) == (0, 2, 1)
    assert "sub_calls" not in metrics


async def test_a_tool_that_takes_too_long_is_told_to_the_policy():
    reward, talk = await played(call("hang"), "5", tool_timeout_s=0.05)
    assert talk.results(1) == ["Error: hang took longer than 0.05 s"]
    assert reward.metrics["tool_error_count"] == 1


async def test_what_a_tool_raises_reaches_the_policy_without_secrets(monkeypatch: pytest.MonkeyPatch):
    class Leaky(Desk):
        def look(self, url: str) -> str:
            raise ValueError(f"401 for {url}?key=s3cr3t-value&user=other-value")

        tools: ClassVar[tuple[Any, ...]] = (look,)

    asked = (call("look", url="a"), "5")
    monkeypatch.setenv("SEARCH_API_KEY", "s3cr3t-value")
    talk = Talk(asked)
    await Leaky().play(QUESTION, talk)
    assert talk.results(1) == ["Error: 401 for a?key=<redacted>&user=other-value"]
    talk = Talk(asked)
    with declare_secrets({"other-value", "s3cr3t-value"}):  # as a worker says it
        await Leaky().play(QUESTION, talk)
    assert talk.results(1) == ["Error: 401 for a?key=<redacted>&user=<redacted>"]


async def test_a_tool_whose_machinery_is_down_fails_the_rollout_and_a_policy_error_ends_it():
    with pytest.raises(InfrastructureError, match="down"):
        await played(call("fail", how="machine"))
    with pytest.raises(PolicyError, match="no"):
        await played(call("fail", how="policy"))


async def test_a_plain_function_runs_off_the_event_loop():
    threads: list[int] = []

    def where() -> None:
        threads.append(threading.get_ident())

    class Elsewhere(Desk):
        tools: ClassVar[tuple[Any, ...]] = (where,)

    await Elsewhere().play(QUESTION, Talk([call("where"), "5"]))
    assert threads != [threading.get_ident()]


async def test_too_many_calls_are_not_run():
    reward, talk = await played(call("note", text="a") * 5 + "<tool_call>{</tool_call>", "5", max_calls_per_answer=2)
    assert talk.results(1) == ["hello: 1", "hello: 2", "Error: 4 more calls were not run: an answer may have 2"]
    assert (reward.metrics["notes"], reward.metrics["tool_error_count"], reward.metrics["malformed_tool_calls"]) == (2, 3, 1)
    _, talk = await played(call("note", text="a"), call("note", text="b"), "5", max_tool_calls=1)
    assert talk.results(2) == ["Error: no more than 1 calls are run in one dialogue"]


async def test_long_results_are_cut_and_say_so():
    _, talk = await played(call("later", text="x" * 300), "5", max_result_characters=100)
    assert talk.results(1) == ["x" * 100 + "… (300 characters, cut at 100)"]


async def test_the_template_s_own_way_is_taken_where_it_writes_tools_else_a_listing_stands_in_the_system_turn():
    _, talk = await played("5")
    assert [tool["function"]["name"] for tool in talk.tools] == ["add", "later", "note", "fail", "hang"]
    assert list(talk.tools[2]["function"]["parameters"]["properties"]) == ["text"]
    assert talk.said[0] == QUESTION.turns
    _, talk = await played("5", chat={"shows_tools": False})
    assert talk.tools == []
    system = talk.said[0][0]
    assert system["role"] == "system"
    assert '{"name": "add", "description": "Add two numbers."' in system["content"]
    assert "<tool_call>" in system["content"]
    _, talk = await played("5", tool_prompt="none")
    assert (talk.tools, talk.said[0]) == ([], QUESTION.turns)
    _, talk = await played("5", call_format="python")
    assert '<tool_call>tool_name(parameter="value")</tool_call>' in talk.said[0][0]["content"]


async def test_results_are_user_turns_where_the_template_has_no_tool_role():
    _, talk = await played(call("add", a=1, b=1) + call("add", a=2, b=2), "5", chat={"has_tool_role": False})
    (turn,) = talk.said[1]
    assert turn == {"role": "user", "content": "<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response>"}


async def test_an_answer_is_restated_with_its_calls_for_templates_that_want_that():
    _, talk = await played("so " + call("add", a=1, b=1), call("add", a=2, b=2), "5")
    said, result = talk.said[1]
    assert said["role"] == "assistant"
    assert said["content"] == "so"
    assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 1}}
    assert said["tool_calls"][0]["id"] == result["tool_call_id"]
    assert len(result["tool_call_id"]) == 9
    assert talk.said[2][1]["tool_call_id"] != result["tool_call_id"]


async def test_two_tools_of_one_name_are_refused():
    class Twice(Desk):
        tools: ClassVar[tuple[Any, ...]] = (add, add)

    with pytest.raises(ValueError, match="two tools called add: rename one"):
        await Twice().play(QUESTION, Talk(["5"]))


def template_of(text: str) -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "tiny")
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], chat_template=text)


QWEN_LIKE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}" + CHATML
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}{% elif m.role == 'assistant' %}[A]{{ m.content }}"
    "{% elif m.role == 'tool' and messages[loop.index0 - 1].tool_calls %}[T]{{ m.content }}{% elif m.role == 'tool' %}"
    "{{ raise_exception('no') }}{% endif %}{% endfor %}[A]"
)
ONE_EACH = (
    "{% set ns = namespace(due=0) %}{% for m in messages %}{% if m.role == 'tool' %}{% set ns.due = ns.due - 1 %}"
    "{% if ns.due < 0 %}{{ raise_exception('no call') }}{% endif %}[T]{{ m.content }}{% else %}"
    "{% if ns.due %}{{ raise_exception('no result') }}{% endif %}[{{ m.role[0] | upper }}]{{ m.content }}"
    "{% set ns.due = m.tool_calls | default([]) | length %}{% endif %}{% endfor %}[A]"
)
"""Each call of a spelled-out answer has its result, and each result its call."""
ONLY_TWO = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "shows", "role"), [(CHATML, False, True), (QWEN_LIKE, True, True), (STRICT, False, True), (ONLY_TWO, False, False)]
)
def test_what_a_template_writes_is_found_out_by_trying(text: str, shows: bool, role: bool):
    template = template_of(text)
    assert (template.shows_tools, template.has_tool_role) == (shows, role)


async def test_token_by_token_results_are_prompt_and_calls_are_trained(tiny: ChatTemplate):
    ids = lambda text: [*tiny.encode(text).tolist(), 1]  # noqa: E731
    first = call("add", a=2, b=3)
    chat = TokenChat(tiny, Script((ids(first), "stop"), (ids("5"), "stop")), 4000)
    reward = await Desk(tool_prompt="none").play(QUESTION, chat)
    recording = chat.recording()
    assert reward.total == 1
    assert len(recording.branches) == 1
    branch = recording.branches[0]
    assert tiny.decode(branch.ids.tolist()) == f"<|user|>2 + 3?<|assistant|>{first}<eos><|tool|>5<|assistant|>5<eos>"
    assert tiny.decode(branch.ids[branch.mask == 1].tolist()) == f"{first}<eos>5<eos>"


BROKEN, OPEN = "<tool_call>{</tool_call>", '<tool_call>{"name": "add"'


@pytest.mark.parametrize("role", ["auto", "tool"])
@pytest.mark.parametrize("text", [STRICT, ONE_EACH])
@pytest.mark.parametrize(
    ("answer", "told", "counts"),
    [
        (BROKEN, ["this is not JSON"], (0, 0, 0, 1)),
        (OPEN, ["opened and never closed"], (0, 0, 0, 1)),
        ("so " + call("later", text="abc") + BROKEN, ["cba", "this is not JSON"], (1, 1, 0, 1)),
        (BROKEN + call("later", text="abc") + call("add", a=2, b=5), ["this is not JSON", "cba", "7"], (2, 2, 0, 1)),
        (call("note", text="a") * 17, ["hello: 1", "hello: 16", "1 more calls were not run"], (17, 16, 1, 0)),
        (call("sub") * 2, ["there is no tool 'sub'"], (2, 0, 2, 0)),
    ],
    ids=["malformed", "truncated", "good_and_malformed", "malformed_and_two_good", "17", "two_unknown"],
)
async def test_a_template_that_wants_a_call_before_each_result_refuses_nothing_that_the_policy_is_told(
    text: str, answer: str, told: list[str], counts: tuple[int, ...], role: Any
) -> None:
    template = template_of(text)
    ids = lambda said: [*template.encode(said).tolist(), template.tokenizer.eos_token_id]  # type: ignore[attr-defined] # noqa: E731
    policy = Script((ids(answer), "stop"), (ids(answer), "stop"), (ids("5"), "stop"))
    chat = TokenChat(template, policy, 20000)
    reward = await Desk(tool_prompt="none", result_role=role).play(QUESTION, chat)
    assert (chat.failure, reward.total, chat.recording().turns) == (None, 1.0, 3)
    names = ("total_tool_calls", "tool_success_count", "tool_error_count", "malformed_tool_calls")
    assert tuple(reward.metrics[name] for name in names) == tuple(2.0 * count for count in counts)
    said = template.decode(policy.prompts[1])
    assert [text for text in told if text not in said] == []
    assert said.startswith("[U]2 + 3?[A]")


async def test_results_keep_the_tool_role_where_the_template_takes_calls_alone_before_them() -> None:
    template = template_of(ONE_EACH)
    ids = lambda said: [*template.encode(said).tolist(), template.tokenizer.eos_token_id]  # type: ignore[attr-defined] # noqa: E731
    policy = Script((ids(BROKEN + call("later", text="abc") + call("add", a=2, b=5)), "stop"), (ids("5"), "stop"))
    await Desk(tool_prompt="none").play(QUESTION, TokenChat(template, policy, 4000))
    assert template.decode(policy.prompts[1]).startswith("[U]2 + 3?[A][T]cba[T]7\nError: this is not JSON")
    policy = Script((ids(BROKEN), "stop"), (ids("5"), "stop"))
    await Desk(tool_prompt="none").play(QUESTION, TokenChat(template, policy, 4000))
    assert f"[A]{BROKEN}" in template.decode(policy.prompts[1])
    assert "[U]<tool_response>\nError: this is not JSON" in template.decode(policy.prompts[1])


def test_the_module_is_no_environment_of_its_own():
    names = set(find(ENVIRONMENTS))
    assert {"look_up", "tau"} <= names
    assert not {"tool_environment", "tools"} & names


async def test_the_example_of_the_documentation_plays():
    page = (EMBEDDED.parents[1] / "docs" / "tools.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    module = types.ModuleType("secretary")
    sys.modules["secretary"] = module  # where dataclasses and pydantic look names up
    try:
        exec(compile(code, "tools.md", "exec"), module.__dict__)
        example = module.Secretary()
        talk = Talk([call("note", line="milk") + call("note", line="eggs"), "done"])
        reward = await example.play(example.prompts("train")[0], talk)
    finally:
        del sys.modules["secretary"]
    assert (reward.total, talk.results(1), reward.metrics["note_calls"]) == (1, ["1 lines", "2 lines"], 2)
