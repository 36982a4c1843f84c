"""A dialogue with a server of somebody else's: messages in, text out, and what goes wrong is a failure and no score."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from telescope.cli.chat_stream import ServerUnreachable, StreamingClient
from telescope.config.redaction import REDACTED
from telescope.config.run import RunConfig
from telescope.config.sections import RemoteServer
from telescope.environments.base import KnowsTemplate
from telescope.environments.chat import ChatError
from telescope.environments.http_client import MAX_BODY_BYTES, open_client
from telescope.records import PromptRef, RolloutOrder, Sampling
from telescope.wire.messages import RolloutResult
from telescope.workers import text_chat
from telescope.workers.loading import load_environments
from telescope.workers.play import PlayLimits, play
from telescope.workers.prompt_cache import PromptCache
from telescope.workers.text_chat import ChatCompletions, RemoteFailed, TextChat

SERVER = RemoteServer(url="http://host/v1/", model="some/model")


def answer(text: Any, reason: str = "stop", usage: dict[str, Any] | None = None) -> httpx.Response:
    body = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}], "usage": usage}
    return httpx.Response(200, json=body)


def client_with(reply: Callable[[httpx.Request], httpx.Response], server: RemoteServer = SERVER) -> ChatCompletions:
    client = ChatCompletions(server, 5.0)
    client._client = httpx.AsyncClient(transport=httpx.MockTransport(reply), headers=client._client.headers)
    return client


def chat_of(client: ChatCompletions, timeout_s: float = 5.0) -> TextChat:
    def sampling(turn: int, most: int | None) -> Sampling:
        return Sampling(0.5, most or 16, 2**40 + turn, top_p=0.9, stop=("END",))

    return TextChat(client, sampling, timeout_s=timeout_s)


def chat_with(reply: Callable[[httpx.Request], httpx.Response], server: RemoteServer = SERVER) -> TextChat:
    return chat_of(client_with(reply, server))


def ask(chat: TextChat) -> str:
    return asyncio.run(chat.say({"role": "user", "content": "a"}))


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
        (httpx.Response(500, text="broken"), "answered 500: broken"),
        (httpx.Response(200, text="<html>"), "is not a chat completion: <html>"),
        (httpx.Response(200, json={"choices": []}), "is not a chat completion"),
        (answer(["parts"]), "is not text"),
        (answer(None), "has no text: its content is null"),
        (answer(None, "length"), "its tokens were used up before it .*rollout.max_tokens"),
        (answer(None, "content_filter"), "content filter"),
        (httpx.Response(200, json={"choices": [{"message": {"tool_calls": [{"id": "1"}]}}]}), "it called tools"),
    ],
)
def test_what_is_no_answer_is_a_failure(response: httpx.Response, sentence: str):
    chat = chat_with(lambda request: response)
    with pytest.raises(RemoteFailed, match=sentence):
        asyncio.run(chat.say({"role": "user", "content": "a"}))
    assert isinstance(chat.failure, RemoteFailed)
    with pytest.raises(ChatError, match="a turn of the dialogue failed"):
        chat.recording()


def test_an_empty_text_is_an_answer():
    assert ask(chat_with(lambda request: answer(""))) == ""


class Replies:
    """These, one a request, and the last one for ever."""

    def __init__(self, *replies: httpx.Response) -> None:
        self.left, self.bodies = list(replies), list[dict[str, Any]]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


def busy(after: str = "", status: int = 429) -> httpx.Response:
    return httpx.Response(status, text="too many", headers={"Retry-After": after} if after else {})


def test_a_busy_server_is_asked_again_when_it_says():
    replies = Replies(busy("0.01"), busy("0.01", 503), busy("0.01"), busy("0.01"), answer("x"))
    chat = chat_with(replies)
    assert ask(chat) == "x"
    assert len(replies.bodies) == 5
    assert chat.failure is None


def test_one_that_does_not_say_when_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_chat, "FIRST_WAIT_S", 0.01)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert ask(chat_with(Replies(busy(), busy("soon"), busy("Mon, 01 Jan 2001 00:00:00 GMT"), answer("x")))) == "x"
    assert waits == [0.01, 0.02, 0.04]


def test_no_rollout_waits_beyond_its_time():
    replies = Replies(busy("3600"))
    with pytest.raises(RemoteFailed, match=r"answered 429: too many .*in 3600 s, is beyond rollout\.timeout_s"):
        ask(chat_with(replies))
    assert len(replies.bodies) == 1
    replies = Replies(busy("0.02"))
    with pytest.raises(RemoteFailed, match="answered 429"):
        ask(chat_of(client_with(replies), 0.1))
    assert 1 < len(replies.bodies) <= 6


def test_a_server_that_wants_the_other_name_of_the_limit_has_it():
    refusal = httpx.Response(400, text="'max_tokens' is not supported. Use 'max_completion_tokens' instead.")
    replies = Replies(refusal, answer("x"))
    client = client_with(replies)
    assert [ask(chat_of(client)), ask(chat_of(client))] == ["x", "x"]
    assert [[name for name in body if name.startswith("max_")] for body in replies.bodies] == [
        ["max_tokens"],
        ["max_completion_tokens"],
        ["max_completion_tokens"],
    ]
    assert replies.bodies[2]["max_completion_tokens"] == 16
    both = Replies(httpx.Response(400, text="max_tokens or max_completion_tokens is too large"))
    with pytest.raises(RemoteFailed, match="answered 400"):
        ask(chat_with(both))
    assert len(both.bodies) == 2


def test_a_refused_key_is_told_apart_from_a_refused_request(monkeypatch: pytest.MonkeyPatch):
    def refusal_of(server: RemoteServer, *replies: httpx.Response) -> str:
        client = client_with(Replies(*replies), server)
        for _ in replies:
            with contextlib.suppress(RemoteFailed):
                ask(chat_of(client))
        return client.refusal

    monkeypatch.setenv("A_KEY", "k-1")
    with_key = RemoteServer(url="http://host/v1", model="m", api_key="${oc.env:A_KEY}")
    told = refusal_of(with_key, httpx.Response(401, text="bad key"))
    assert "answered 401: bad key: it does not take the key in A_KEY; --key-env VARIABLE" in told
    assert "no key was sent; --key-env VARIABLE" in refusal_of(SERVER, httpx.Response(403))
    assert refusal_of(SERVER, answer("x"), httpx.Response(403), httpx.Response(404)) == ""


def test_no_request_has_a_line_in_the_log():
    ChatCompletions(SERVER, 5.0)
    assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)


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


@pytest.mark.parametrize("said", [1e30, 9223372036854775813, -5, 17, True, 3.0, "3", None, [3]])
def test_a_count_that_can_not_be_is_none(said: Any):
    usage = {"prompt_tokens": 10**9 if said == 17 else said, "completion_tokens": said}
    chat = chat_with(lambda request: answer("x", usage=usage))  # of 16 tokens
    assert ask(chat) == "x"
    recording = chat.recording()
    assert (recording.prompt_tokens, recording.completion_tokens) == (0, 0)


def test_an_answer_without_end_and_one_that_unpacks_are_failures():
    long = chat_with(lambda request: answer("x" * MAX_BODY_BYTES))
    with pytest.raises(RemoteFailed, match=f"the answer has more than {MAX_BODY_BYTES} bytes"):
        ask(long)
    packed = gzip.compress(answer("x" * 3_000_000).content)
    bomb = chat_with(lambda request: httpx.Response(200, content=packed, headers={"content-encoding": "gzip"}))
    with pytest.raises(RemoteFailed, match=r"compressed \(gzip\)"):
        ask(bomb)
    nested = chat_with(lambda request: httpx.Response(200, content=b"[" * 100_000))
    with pytest.raises(RemoteFailed, match="not a chat completion"):
        ask(nested)


async def test_no_proxy_sees_a_key_in_plain_text(monkeypatch: pytest.MonkeyPatch):
    heads: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    proxy = await asyncio.start_server(listen, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, address)
    monkeypatch.setenv("A_KEY", "k-9f8e7d6c5b")
    for url in ("http://127.0.0.1:9/v1", "HTTP://localhost:9/v1", "https://127.0.0.1:9/v1"):
        client = open_client(url, "k-9f8e7d6c5b", timeout=5.0)
        with pytest.raises(httpx.HTTPError):
            await client.post(url)
        await client.aclose()
    assert [head.split()[0] for head in heads] == [b"CONNECT"]  # of https alone, and without what is sent through it
    assert b"k-9f8e7d6c5b" not in heads[0]
    remote = RemoteServer(url="http://127.0.0.1:9/v1", model="m", api_key="${oc.env:A_KEY}")
    asked = ChatCompletions(remote, 5.0)
    with pytest.raises(RemoteFailed):
        await asked.ask([], Sampling(0.5, 16, 1))
    await asked.close()
    talked = StreamingClient("http://127.0.0.1:9/v1", "k-9f8e7d6c5b", print)
    with pytest.raises(ServerUnreachable):
        await talked.list_models()
    await talked.close()
    proxy.close()
    assert len(heads) == 1


async def test_a_key_that_the_server_quotes_is_in_no_row(monkeypatch: pytest.MonkeyPatch):
    key = 'S3CRET"VALUE-three'
    monkeypatch.setenv("WHERE_IT_IS", key)  # not a secret by its name
    remote = {"url": "http://host/v1", "model": "m", "api_key": "${oc.env:WHERE_IT_IS}"}
    content = {
        "environments": {"countdown": {"name": "countdown"}},
        "evals": {"countdown": {}},
        "inference": {"engine": "remote", "remote": remote},
        "cluster": {"trainer_num_workers": 0},
        "algorithm": {"name": "grpo"},
        "backend": {"name": "fsdp"},
    }
    config = RunConfig.model_validate_json(json.dumps(content), context={"resolved": True})
    forms = key, json.dumps({"k": key}), base64.b64encode(f"Bearer {key}".encode()).decode()

    def quote(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == f"Bearer {key}"
        return answer(" ".join(forms))

    assert config.inference.remote is not None
    client, environment = client_with(quote, config.inference.remote), load_environments(config)["countdown"]
    order = RolloutOrder(0, 0, 0, 0, PromptRef("countdown", "eval", 0), 11)
    limits = PlayLimits.from_config(config)
    result, _ = await play(order, environment, PromptCache(None), limits, None, remote=client)  # type: ignore[arg-type]
    assert isinstance(result, RolloutResult)
    row = msgspec.json.encode(result).decode()
    assert REDACTED in result.completion_text
    assert not any(part in row for part in ("S3CRET", "VALUE-three", forms[2][12:-4]))
