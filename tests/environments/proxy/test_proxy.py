"""An agent behind OpenAI's interface is recorded token by token: the real SDK, real HTTP, a policy that is told what to say."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from typing import Any

import openai
import pytest

from telescope.environments.proxy import http_server
from telescope.environments.proxy.chat_completions import ChatRefused, ChatRequest, read_request
from telescope.environments.proxy.sessions import Session
from telescope.environments.tools.call_parsers import CallFormat
from tests.environments.proxy.conftest import Rollout

LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


DEEP: Any = functools.reduce(lambda inner, _: {"a": inner}, range(200), 1)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def test_a_conversation_that_goes_on_stays_in_its_exact_tokens(rollout: Rollout) -> None:
    client = rollout.client()
    messages = [{"role": "system", "content": "s"}, user("a")]
    for text in ("b", "c"):
        done = await client.chat.completions.create(model="any", messages=messages)
        assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("ok", "stop")
        messages += [done.choices[0].message.model_dump(), user(text)]
    assert rollout.texts() == ["<|system|>s<|user|>a<|assistant|>ok<eos><|user|>b<|assistant|>ok<eos>"]
    assert rollout.trained() == ["ok<eos>ok<eos>"]
    (branch,) = rollout.chat.recording().branches
    assert branch.versions[branch.mask == 1].tolist() == [0, 0, 0, 1, 1, 1]


async def test_usage_counts_the_tokens_of_the_request(rollout: Rollout) -> None:
    done = await rollout.client().chat.completions.create(model="any", messages=[user("abc")])
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (5, 3, 8)


async def test_a_tool_call_is_given_out_as_such_and_its_result_goes_on_behind_the_raw_text(rollout: Rollout) -> None:
    rollout.policy.answer = lambda prompt: "done" if "cat" in prompt else f"I look. {CALL}"
    client = rollout.client()
    messages = [user("a")]
    first = await client.chat.completions.create(model="any", messages=messages, tools=[LOOK])
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": 1})
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "a cat"}]
    second = await client.chat.completions.create(model="any", messages=messages, tools=[LOOK])
    assert second.choices[0].message.content == "done"
    assert rollout.texts() == [f"<|system|>look<|user|>a<|assistant|>I look. {CALL}<eos><|user|>a cat<|assistant|>done<eos>"]


async def test_a_call_gone_wrong_stays_text(rollout: Rollout) -> None:
    rollout.policy.answer = lambda prompt: "<tool_call>look(</tool_call>"
    done = await rollout.client().chat.completions.create(model="any", messages=[user("a")], tools=[LOOK])
    assert done.choices[0].message.content == "<tool_call>look(</tool_call>"
    assert done.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("form", "written"),
    [
        ("json", json.dumps({"name": "look", "arguments": {"at": DEEP}})),
        ("python", r'look(at="\ud800")'),
        ("python", "look(at=1e999)"),
    ],
)
async def test_a_call_that_no_json_can_carry_stays_text(rollout: Rollout, form: CallFormat, written: str) -> None:
    text = f"<tool_call>{written}</tool_call>"
    rollout.policy.answer = lambda prompt: text
    session = Session(rollout.chat, call_format=form, max_requests=2)
    answer = await session.complete(read_request(json.dumps({"messages": [user("a")], "tools": [LOOK]}).encode()))
    assert (answer.content, answer.calls) == (text, ())


async def test_a_call_with_a_number_of_more_than_64_bits_is_carried(rollout: Rollout) -> None:
    rollout.policy.answer = lambda prompt: f"<tool_call>look(at={10**30})</tool_call>"
    session = Session(rollout.chat, call_format="python", max_requests=2)
    answer = await session.complete(read_request(json.dumps({"messages": [user("a")], "tools": [LOOK]}).encode()))
    assert json.loads(answer.calls[0]["function"]["arguments"]) == {"at": 10**30}


async def test_streams_give_the_same_in_pieces(rollout: Rollout) -> None:
    rollout.policy.answer = lambda prompt: f"I look. {CALL}"
    client = rollout.client()
    said, called, ends, usage = "", [], [], None
    stream = await client.chat.completions.create(
        model="any", messages=[user("a")], tools=[LOOK], stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said += choice.delta.content or ""
            called += [call.function.name for call in choice.delta.tool_calls or [] if call.function]
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert (said, called, ends) == ("I look.", ["look"], ["tool_calls"])
    assert usage is not None
    assert usage.completion_tokens == len(f"I look. {CALL}") + 1


async def test_subagents_at_the_same_time_are_branches_and_the_main_line_goes_on(rollout: Rollout) -> None:
    client = rollout.client()
    release = asyncio.Event()
    rollout.policy.held = {f"<|user|>{name}<|assistant|>": release for name in "xyz"}
    rollout.policy.answer = lambda prompt: prompt[-14]
    main = [user("a")]
    done = await client.chat.completions.create(model="any", messages=main)
    main += [done.choices[0].message.model_dump(), user("b")]
    subs = [asyncio.create_task(client.chat.completions.create(model="any", messages=[user(name)])) for name in "xyz"]
    done = await client.chat.completions.create(model="any", messages=main)
    release.set()
    assert [answer.choices[0].message.content for answer in await asyncio.gather(*subs)] == ["x", "y", "z"]
    assert rollout.texts()[0] == "<|user|>a<|assistant|>a<eos><|user|>b<|assistant|>b<eos>"
    assert sorted(rollout.texts()[1:]) == [f"<|user|>{name}<|assistant|>{name}<eos>" for name in "xyz"]
    assert rollout.chat.recording().turns == 5


async def test_a_second_try_of_the_same_conversation_is_a_branch_with_the_first_answers_as_prompt(rollout: Rollout) -> None:
    client = rollout.client()
    numbers = iter("123")
    rollout.policy.answer = lambda prompt: next(numbers)
    opening = [user("a")]
    first = await client.chat.completions.create(model="any", messages=opening)
    again = await client.chat.completions.create(model="any", messages=opening)
    shortened = [user("so far"), first.choices[0].message.model_dump(), user("b")]
    await client.chat.completions.create(model="any", messages=shortened)
    assert again.choices[0].message.content == "2"
    assert rollout.texts() == [
        "<|user|>a<|assistant|>1<eos>",
        "<|user|>a<|assistant|>2<eos>",
        "<|user|>so far<|assistant|>1<eos><|user|>b<|assistant|>3<eos>",
    ]
    assert rollout.trained() == ["1<eos>", "2<eos>", "3<eos>"]


async def test_a_limit_of_tokens_is_kept_and_the_cut_is_told(rollout: Rollout) -> None:
    rollout.policy.answer = lambda prompt: "a long answer"
    done = await rollout.client().chat.completions.create(model="any", messages=[user("a")], max_completion_tokens=6)
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("a long", "length")
    assert rollout.policy.limits == [6]


async def test_a_client_that_leaves_takes_its_answer_with_it(rollout: Rollout) -> None:
    rollout.policy.held = {"<|user|>slow<|assistant|>": asyncio.Event()}
    client = rollout.client()
    await client.chat.completions.create(model="any", messages=[user("a")])
    rollout.policy.asked.clear()
    leaving = asyncio.create_task(client.chat.completions.create(model="any", messages=[user("slow")]))
    await asyncio.wait_for(rollout.policy.asked.wait(), 60)
    leaving.cancel()
    await asyncio.wait_for(rollout.policy.cancelled.wait(), 60)
    await rollout.proxy.shut(rollout.session)
    assert rollout.texts() == ["<|user|>a<|assistant|>ok<eos>"]


def asking(*texts: str) -> ChatRequest:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return read_request(json.dumps({"messages": messages}).encode())


async def test_an_answer_that_comes_as_its_client_leaves_is_gone_on_from_by_nobody(rollout: Rollout) -> None:
    """The policy's answer is there, and the client's task is cancelled before it has taken it."""
    session, policy = rollout.session, rollout.policy
    assert (await session.complete(asking("a"))).content == "ok"
    leaving = asyncio.create_task(session.complete(asking("a", "ok", "b")))
    policy.answer = lambda prompt: "unseen" if leaving.cancel() else "seen"
    await asyncio.wait({leaving}, timeout=60)
    assert leaving.cancelled()
    assert rollout.texts() == ["<|user|>a<|assistant|>ok<eos><|user|>b<|assistant|>unseen<eos>"]
    assert (await session.complete(asking("a", "ok", "b"))).content == "seen"
    assert (await session.complete(asking("a", "ok", "b", "seen", "c"))).content == "seen"
    head = "<|user|>a<|assistant|>ok<eos><|user|>b<|assistant|>"
    assert rollout.texts()[-1] == f"{head}seen<eos><|user|>c<|assistant|>seen<eos>"
    assert all(text.count("<|user|>b") == 1 for text in rollout.texts()[1:])


async def test_a_policy_that_answers_although_it_is_cancelled_is_gone_on_from_by_nobody(rollout: Rollout) -> None:
    session, policy = rollout.session, rollout.policy
    await session.complete(asking("a"))
    stubborn, sample = asyncio.Event(), policy.sample

    async def deaf(*arguments: Any) -> Any:
        stubborn.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await sample(*arguments)

    policy.sample = deaf  # type: ignore[method-assign,assignment]
    leaving = asyncio.create_task(session.complete(asking("a", "ok", "b")))
    await asyncio.wait_for(stubborn.wait(), 60)
    leaving.cancel()
    await asyncio.wait({leaving}, timeout=60)
    assert leaving.done()
    policy.sample = sample  # type: ignore[method-assign]
    assert (await session.complete(asking("a", "ok", "b"))).content == "ok"
    assert rollout.texts() == ["<|user|>a<|assistant|>ok<eos><|user|>b<|assistant|>ok<eos>"] * 2


async def test_a_question_is_given_up_until_another_try_of_it_is_answered(rollout: Rollout) -> None:
    session, policy = rollout.session, rollout.policy
    policy.held = {"a<|assistant|>": asyncio.Event()}
    leaving = asyncio.create_task(session.complete(asking("a")))
    await asyncio.wait_for(policy.asked.wait(), 60)
    assert not session.given_up
    leaving.cancel()
    await asyncio.wait({leaving}, timeout=60)
    assert session.given_up
    policy.held = {}
    await session.complete(asking("b"))
    assert session.given_up
    await session.complete(asking("a"))
    assert not session.given_up
    policy.held = {"c<|assistant|>": asyncio.Event()}
    policy.asked.clear()
    pending = asyncio.create_task(session.complete(asking("c")))
    await asyncio.wait_for(policy.asked.wait(), 60)
    await rollout.proxy.shut(session)
    assert session.given_up
    with pytest.raises(ChatRefused, match="this rollout is over"):
        await pending


async def test_time_that_the_policy_takes_is_counted_once_where_questions_overlap(rollout: Rollout) -> None:
    now, policy = [0.0], rollout.policy
    session = Session(rollout.chat, call_format="json", max_requests=9, clock=lambda: now[0])
    policy.held = {f"{name}<|assistant|>": asyncio.Event() for name in "ab"}
    tasks = {}
    for name, at in (("a", 10.0), ("b", 15.0)):
        now[0] = at
        policy.asked.clear()
        tasks[name] = asyncio.create_task(session.complete(asking(name)))
        await asyncio.wait_for(policy.asked.wait(), 60)
    now[0] = 20.0
    assert session.waited_s() == 10.0
    for name, at in (("a", 30.0), ("b", 40.0)):
        now[0] = at
        policy.held[f"{name}<|assistant|>"].set()
        await asyncio.wait_for(tasks[name], 60)
    now[0] = 100.0
    assert session.waited_s() == 30.0


async def test_a_conversation_that_is_too_long_is_told_in_openais_words_and_fails_nothing(rollout: Rollout) -> None:
    client = rollout.client()
    await client.chat.completions.create(model="any", messages=[user("a")])
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="any", messages=[user("a" * 400)])
    assert refused.value.code == "context_length_exceeded"
    assert rollout.trained() == ["ok<eos>"]


async def test_a_server_that_fails_ends_the_rollout(rollout: Rollout) -> None:
    client = rollout.client()
    rollout.policy.broken = True
    for status in (500, 410):
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(model="any", messages=[user("a")])
        assert refused.value.status_code == status
    assert rollout.session.failed.is_set()
    assert len(rollout.policy.prompts) == 1  # the SDK was told not to try again


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"n": 2}, "n: one answer at a time"),
        ({"stop": ["x"]}, "set rollout.stop"),
        ({"response_format": {"type": "json_object"}}, "the policy writes text"),
        ({"tools": [LOOK], "tool_choice": "required"}, "free to call a tool or not"),
        ({"logprobs": True}, "kept for training"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, r"messages\[0\] has the role \['user'\]"),
        ({"tools": [{"type": "function"}]}, "tools must be a list of"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "nested more than 64 deep"),
        ({"messages": [{"role": "boss", "content": "a"}]}, r"messages\[0\] has the role 'boss'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "only text"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_the_reason(rollout: Rollout, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why):
        await rollout.client().chat.completions.create(**{"model": "any", "messages": [user("a")], **changes})
    assert rollout.policy.prompts == []


async def test_requests_beyond_the_limit_are_turned_away_once_each(rollout: Rollout) -> None:
    client = rollout.client()
    for _ in range(20):
        await client.chat.completions.create(model="any", messages=[user("a")])
    with pytest.raises(openai.RateLimitError, match="max_requests=20"):
        await client.chat.completions.create(model="any", messages=[user("a")])
    assert len(rollout.policy.prompts) == 20


async def test_rollouts_have_addresses_of_their_own_that_end_with_them(rollout: Rollout) -> None:
    client = rollout.client()
    assert [model.id async for model in client.models.list()] == ["policy"]
    with pytest.raises(openai.NotFoundError, match="chat/completions and models"):
        await client.embeddings.create(model="any", input="a")
    guessed = openai.AsyncOpenAI(base_url=rollout.base_url.replace(rollout.base_url.split("/")[3], "guess"), api_key="any")
    with pytest.raises(openai.NotFoundError, match="no rollout at this address"):
        await guessed.chat.completions.create(model="any", messages=[user("a")])
    await rollout.proxy.shut(rollout.session)
    with pytest.raises(openai.NotFoundError, match="no rollout at this address"):
        await client.chat.completions.create(model="any", messages=[user("a")])


async def test_texts_in_parts_and_developers_are_understood(rollout: Rollout) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: Any = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    await rollout.client().chat.completions.create(model="any", messages=messages, temperature=0.1, top_p=0.5, seed=3)
    assert rollout.policy.prompts == ["<|system|>s<|user|>ab<|assistant|>"]


async def raw(rollout: Rollout, text: bytes) -> bytes:
    """What the server says to bytes of any kind, up to its end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rollout.base_url.split(":")[2].split("/")[0]))
    writer.write(text)
    writer.write_eof()
    said = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return said


async def test_bytes_that_are_no_http_or_no_json_end_their_connection_alone(rollout: Rollout) -> None:
    await raw(rollout, b"\x00\x01\x02 nonsense\r\n\r\n")
    await raw(rollout, b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: " + b"y" * 100_000)
    path = "/" + rollout.base_url.split("/", 3)[3] + "/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 1\r\n\r\n"
    assert b"the body is not JSON" in await raw(rollout, head.encode() + b"{")
    huge = head.replace("content-length: 1", "content-length: 99999999").encode() + b"x" * (33 * 1024 * 1024)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rollout.base_url.split(":")[2].split("/")[0]))
    writer.write(huge)
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 60)
    writer.close()
    done = await rollout.client().chat.completions.create(model="any", messages=[user("a")])
    assert done.choices[0].message.content == "ok"


async def test_a_question_for_the_head_alone_gets_no_body(rollout: Rollout, caplog: pytest.LogCaptureFixture) -> None:
    path = "/" + rollout.base_url.split("/", 3)[3]
    for asked in (f"{path}/models", f"{path}/chat/completions", "/nobody"):
        said = await raw(rollout, f"HEAD {asked} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
        assert said.startswith(b"HTTP/1.1 ")
        assert said.endswith(b"\r\n\r\n")
    assert caplog.text == ""


async def connect(rollout: Rollout) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(rollout.base_url.split(":")[2].split("/")[0]))


async def test_a_body_for_an_address_of_no_rollout_is_not_read(rollout: Rollout) -> None:
    """40 strangers with 32 MiB each had cost a worker 1.3 GB."""
    reader, writer = await connect(rollout)
    writer.write(b"POST /nobody/v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 33554431\r\n\r\nxx")
    said = await asyncio.wait_for(reader.read(), 30)  # to the end of the connection: more of the body is not waited for
    writer.close()
    assert said.startswith(b"HTTP/1.1 404 ")
    assert b"there is no rollout at this address" in said


async def test_a_connection_that_asks_for_nothing_is_closed(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "FIRST_HEAD_S", 0.2)
    idle, slow = await connect(rollout), await connect(rollout)
    slow[1].write(b"GET / HTTP/1.1\r\n")
    for reader, writer in (idle, slow):
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_connections_that_ask_for_nothing_are_few_and_hold_up_no_program(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,500 of them had left a worker with no file descriptor."""
    monkeypatch.setattr(http_server, "MAX_STRANGERS", 4)
    async with rollout.client() as client:
        for _ in range(2):
            strangers = [await connect(rollout) for _ in range(6)]
            done = await client.chat.completions.create(model="any", messages=[user("a")])  # by a connection that it keeps
            assert done.choices[0].message.content == "ok"
            closed = [asyncio.create_task(reader.read()) for reader, _ in strangers]
            assert await asyncio.wait_for(asyncio.gather(*closed[:2]), 30) == [b"", b""]  # the oldest
            for _, writer in strangers:
                writer.close()
            await asyncio.wait_for(asyncio.gather(*closed), 30)
