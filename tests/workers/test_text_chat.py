"""A dialogue with a server of somebody else's: messages in, text out, and what goes wrong is a failure and no score."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from telescope.config.sections import RemoteServer
from telescope.environments.base import KnowsTemplate
from telescope.environments.chat import ChatError
from telescope.records import Sampling
from telescope.workers.text_chat import ChatCompletions, RemoteFailed, TextChat

SERVER = RemoteServer(url="http://host/v1/", model="some/model")


def answer(text: Any, reason: str = "stop", usage: dict[str, int] | None = None) -> httpx.Response:
    body = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}], "usage": usage}
    return httpx.Response(200, json=body)


def chat_with(reply: Callable[[httpx.Request], httpx.Response], server: RemoteServer = SERVER) -> TextChat:
    client = ChatCompletions(server, 5.0)
    client._client = httpx.AsyncClient(transport=httpx.MockTransport(reply), headers=client._client.headers)
    return TextChat(client, lambda turn, most: Sampling(0.5, most or 16, 2**40 + turn, top_p=0.9, stop=("END",)))


def test_each_turn_brings_the_whole_dialogue_and_its_own_seed():
    asked: list[dict[str, Any]] = []

    def reply(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://host/v1/chat/completions"
        assert "Authorization" not in request.headers
        asked.append(json.loads(request.content))
        return answer(f"answer {len(asked)}", usage={"prompt_tokens": 7 * len(asked), "completion_tokens": 3})

    async def talk() -> TextChat:
        chat = chat_with(reply)
        assert await chat.say({"role": "system", "content": "s"}, {"role": "user", "content": "a"}) == "answer 1"
        assert await chat.say({"role": "user", "content": "b"}, max_tokens=4) == "answer 2"
        return chat

    chat = asyncio.run(talk())
    first, second = asked
    assert (first["model"], first["temperature"], first["top_p"], first["stop"]) == ("some/model", 0.5, 0.9, ["END"])
    assert (first["max_tokens"], second["max_tokens"]) == (16, 4)
    assert (first["seed"], second["seed"]) == (0, 1)  # of 2^31, which is as much as servers take
    assert [turn["role"] for turn in second["messages"]] == ["system", "user", "assistant", "user"]
    recorded = chat.recording()
    assert (recorded.branches, recorded.prompt_tokens, recorded.completion_tokens, recorded.turns) == ((), 7, 6, 2)
    assert recorded.prompt_text == "[system] s\n[user] a\n"
    assert recorded.completion_text == "answer 1[user] b\nanswer 2"
    assert (recorded.finish_reason, chat.truncated) == ("stop", False)


def test_a_key_is_sent_and_no_seed_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_KEY", "k-1")
    seen: list[httpx.Request] = []

    def reply(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answer("x", "length")

    server = RemoteServer(url="http://host/v1", model="m", api_key="${oc.env:A_KEY}", send_seed=False)
    chat = chat_with(reply, server)
    asyncio.run(chat.say({"role": "user", "content": "a"}))
    assert seen[0].headers["Authorization"] == "Bearer k-1"
    assert "seed" not in json.loads(seen[0].content)
    assert chat.truncated
    assert chat.recording().completion_tokens == 0


@pytest.mark.parametrize(
    ("response", "sentence"),
    [
        (httpx.Response(503, text="busy"), "answered 503: busy"),
        (httpx.Response(200, text="<html>"), "is not a chat completion: <html>"),
        (httpx.Response(200, json={"choices": []}), "is not a chat completion"),
        (answer(["parts"]), "is not text"),
    ],
)
def test_what_is_no_answer_is_a_failure(response: httpx.Response, sentence: str):
    chat = chat_with(lambda request: response)
    with pytest.raises(RemoteFailed, match=sentence):
        asyncio.run(chat.say({"role": "user", "content": "a"}))
    assert isinstance(chat.failure, RemoteFailed)
    with pytest.raises(ChatError, match="a turn of the dialogue failed"):
        chat.recording()


def test_no_content_is_an_empty_answer():
    chat = chat_with(lambda request: answer(None))
    assert asyncio.run(chat.say({"role": "user", "content": "a"})) == ""


def test_a_rollout_that_asked_nothing_has_no_score_and_a_closed_one_asks_no_more():
    chat = chat_with(lambda request: answer("x"))
    with pytest.raises(ChatError, match="without asking"):
        chat.recording()
    chat.close()
    with pytest.raises(RuntimeError, match="after close"):
        asyncio.run(chat.say({"role": "user", "content": "a"}))


def test_tools_are_the_environments_own_text():
    chat = chat_with(lambda request: answer("x"))
    assert isinstance(chat, KnowsTemplate)
    assert (chat.shows_tools, chat.has_tool_role) == (False, False)
    assert not chat.takes({"role": "tool", "content": "4"})
    assert chat.takes({"role": "user", "content": "4"})


def test_dialogues_side_by_side_are_one_rollout():
    asked: list[Any] = []

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["messages"])
        return answer("x")

    async def talk() -> TextChat:
        chat = chat_with(reply)
        await chat.say({"role": "user", "content": "a"})
        await chat.dialogue().say({"role": "user", "content": "b"})
        return chat

    chat = asyncio.run(talk())
    assert [len(messages) for messages in asked] == [1, 1]
    assert chat.recording().turns == 2
