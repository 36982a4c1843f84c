"""vLLM's HTTP application over the same engine as the link."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import httpx
import numpy as np
import pytest

from telescope.config.sections import DEFAULT_PORT, InferenceSettings, ModelSettings
from telescope.inference.status import Status
from telescope.inference.vllm import http
from telescope.inference.vllm.http import PortTaken, application, bind, http_beside, reachable_address, unknown_parsers
from telescope.inference.vllm.http_gate import ALLOWED, LAST_PRIORITY
from tests.inference.conftest import Served
from tests.ports import free_port

OLD = ModelSettings(name="old", chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}>")
vllm = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


def marked(test):
    for mark in vllm:
        test = mark(test)
    return test


@marked
async def test_models_health_and_completions_are_the_engines(served: Served):
    prompt = np.arange(2, 12, dtype=np.int32)
    async with (
        http_beside(served.engine.client, bind(None, 0, 0), OLD, InferenceSettings()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        assert (await client.get("/health")).status_code == 200
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["old"]
        ask = {"model": "old", "prompt": prompt.tolist(), "max_tokens": 8, "temperature": 0, "logprobs": 0}
        answer = (await client.post("/v1/completions", json=ask)).json()["choices"][0]
        mine = await served.generate(prompt, 8, temperature=0.0)
        assert np.abs(np.array(answer["logprobs"]["token_logprobs"]) - mine.logprobs).max() < 1e-3
        unknown = await client.post("/v1/completions", json=ask | {"model": "another"})
        assert unknown.status_code == 404
        assert (await client.post("/pause")).status_code == 404


@marked
async def test_after_an_update_http_requests_find_no_prefix_of_the_old_weights(served: Served):
    """The same prompt before and after; the first answer's blocks are still in the cache, under the old version's name."""
    async with (
        http_beside(served.engine.client, bind(None, 0, 0), OLD, InferenceSettings()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        prompt = (np.arange(300) % 80 + 3).astype(np.int32)
        ask = {"model": "old", "prompt": prompt.tolist(), "max_tokens": 8, "temperature": 0, "logprobs": 0}
        for which in ("old", "new"):
            await served.serve(which)
            for _ in range(2):
                answer = (await client.post("/v1/completions", json=ask)).json()["choices"][0]["logprobs"]
                ids = np.array(served.greedy(which, prompt, 8))
                expected = served.reference_logprobs(which, prompt, ids)
                assert np.abs(np.array(answer["token_logprobs"]) - expected).max() < 1e-3


@marked
async def test_the_status_says_what_the_server_does(served: Served):
    status = Status("server-3", running=2, answered=5, updating="PrepareWeights 8")
    async with (
        http_beside(served.engine.client, bind(None, 0, 0), OLD, InferenceSettings(), status=status) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        facts = (await client.get("/telescope/status")).json()
        assert (facts["server"], facts["doing"], facts["order"]) == ("server-3", "updating", "PrepareWeights 8")
        assert (facts["version"], facts["running"], facts["answered"]) == (0, 2, 5)
        status.updating = ""
        assert (await client.get("/telescope/status")).json()["doing"] == "serving"
    assert status.doing() == "serving version 0: 2 requests running, 5 answered"


@marked
async def test_the_link_is_served_while_http_requests_run(served: Served):
    async with (
        http_beside(served.engine.client, bind(None, 0, 0), OLD, InferenceSettings()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        ask = {"model": "old", "prompt": "abc", "max_tokens": 50, "temperature": 0.3}
        others = [asyncio.create_task(client.post("/v1/completions", json=ask)) for _ in range(8)]
        answers = await asyncio.gather(*(served.generate(np.arange(2, 12, dtype=np.int32), 6, seed=i) for i in range(32)))
        assert len(answers) == 32
        assert [answer.status_code for answer in await asyncio.gather(*others)] == [200] * 8


@marked
async def test_prompts_go_in_as_ids_and_ids_come_back_from_completions_and_chat(served: Served):
    prompt = np.arange(2, 12, dtype=np.int32)
    async with (
        http_beside(served.engine.client, bind(None, 0, 0), OLD, InferenceSettings()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        ask = {"model": "old", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answer = (await client.post("/v1/completions", json=ask | {"prompt": prompt.tolist()})).json()["choices"][0]
        mine = await served.generate(prompt, 8, temperature=0.0)
        assert answer["token_ids"] == mine.ids.tolist()
        assert answer["prompt_token_ids"] == prompt.tolist()
        chat = await client.post("/v1/chat/completions", json=ask | {"messages": [{"role": "user", "content": "abc"}]})
        said = chat.json()
        assert said["prompt_token_ids"] == [ord(letter) - 30 for letter in "abc>"]
        told = said["choices"][0]["token_ids"]
        again = await served.generate(np.array(said["prompt_token_ids"], dtype=np.int32), 8, temperature=0.0)
        assert told == again.ids.tolist()


@marked
async def test_metrics_count_the_engines_requests_whoever_asks(served: Served):
    async with (
        http_beside(served.engine.client, bind(None, 0, 0), OLD, InferenceSettings()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):

        async def tokens() -> float:
            lines = (await client.get("/metrics")).text.splitlines()
            return float(next(line for line in lines if line.startswith("vllm:generation_tokens_total{")).split()[-1])

        before = await tokens()
        answer = await served.generate(np.arange(2, 12, dtype=np.int32), 8, seed=4)
        assert await tokens() == before + len(answer.ids)


@marked
async def test_with_a_key_nobody_is_answered_who_does_not_bring_it(served: Served):
    async with (
        http_beside(served.engine.client, bind(None, 0, 0), OLD, InferenceSettings(), api_key="sesame") as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer barley"})).status_code == 401
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer sesame"})).status_code == 200
        assert (await client.get("/health")).status_code == 200


@marked
async def test_each_route_of_vllm_that_is_not_allowed_is_not_there(served: Served):
    """Asked of vLLM itself, so that what a later version adds is closed too."""
    routes = {
        (method, route.path.replace("{", "").replace("}", ""))
        for route in (await application(served.engine.client, OLD, InferenceSettings())).routes
        for method in getattr(route, "methods", None) or {"GET"}
    }
    closed = {(method, path) for method, path in routes if ALLOWED.get(path) != method}
    assert {("POST", "/invocations"), ("POST", "/tokenize"), ("GET", "/version")} <= closed
    async with (
        http_beside(served.engine.client, bind(None, 0, 0), OLD, InferenceSettings(), api_key="sesame") as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        for key in ({}, {"Authorization": "Bearer sesame"}):
            for method, path in sorted(closed):
                answer = await client.request(method, path, json={"model": "old", "prompt": "a"}, headers=key)
                assert answer.status_code == 404, (method, path, answer.status_code)
        for path, method in ALLOWED.items():
            status = (await client.request(method, path, json={})).status_code
            assert status == (200 if path == "/health" else 401), path


@marked
async def test_a_request_from_outside_comes_after_every_rollout(served: Served, monkeypatch: pytest.MonkeyPatch):
    client, seen = served.engine.client, []
    generate = client.generate
    monkeypatch.setattr(client, "generate", lambda *given, **named: seen.append(named["priority"]) or generate(*given, **named))
    async with (
        http_beside(client, bind(None, 0, 0), OLD, InferenceSettings()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as asking,
    ):
        ask = {"model": "old", "prompt": "abc", "max_tokens": 2, "priority": -5}
        assert (await asking.post("/v1/completions", json=ask)).status_code == 200
        chat = {"model": "old", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
        assert (await asking.post("/v1/chat/completions", json=chat)).status_code == 200
    assert seen == [LAST_PRIORITY] * 2


@marked
async def test_a_connection_that_never_asks_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "HEAD_S", 0.3)
    async with http_beside(served.engine.client, bind(None, 0, 0), OLD, InferenceSettings()) as url:
        host, port = url.removeprefix("http://").split(":")
        for said in (b"", b"GET /health HTTP/1.1\r\nx: "):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(said)
            async with asyncio.timeout(20):
                assert await reader.read() in (b"",) or said
            writer.close()


@marked
async def test_reasoning_and_tool_calls_are_parsed_as_configured(served: Served):
    """The test's model babbles: it never ends its thinking, so all that it says is reasoning where a parser looks for it."""
    settings = InferenceSettings(tool_call_parser="hermes", reasoning_parser="qwen3")
    thinking = OLD.model_copy(update={"enable_thinking": True})
    async with (
        http_beside(served.engine.client, bind(None, 0, 0), thinking, settings) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
        ask = {"model": "old", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 8, "temperature": 0}
        answered = await client.post("/v1/chat/completions", json=ask | {"tools": [tool], "tool_choice": "auto"})
        assert answered.status_code == 200
        message = (await client.post("/v1/chat/completions", json=ask)).json()["choices"][0]["message"]
        assert message["reasoning"]  # without an end of thinking all is reasoning
        assert not message["content"]
    async with (
        http_beside(served.engine.client, bind(None, 0, 0), OLD, InferenceSettings()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        refused = await client.post("/v1/chat/completions", json=ask | {"tools": [tool], "tool_choice": "auto"})
        assert refused.status_code == 400
        message = (await client.post("/v1/chat/completions", json=ask)).json()["choices"][0]["message"]
        assert message["content"]


def test_an_unknown_parser_is_told_with_the_known_ones():
    assert unknown_parsers(InferenceSettings()) == ""
    assert unknown_parsers(InferenceSettings(tool_call_parser="hermes", reasoning_parser="qwen3")) == ""
    said = unknown_parsers(InferenceSettings(tool_call_parser="hermse"))
    assert said.startswith("inference.tool_call_parser=hermse is not a parser of this vLLM, which has ")
    assert "hermes" in said


def test_the_default_port_is_a_wish_and_the_next_free_one_is_taken_where_another_run_listens():
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # some other process of this machine has it: as good
            held.enter_context(socket.create_server(("127.0.0.1", DEFAULT_PORT)))
        first = held.enter_context(bind(None, DEFAULT_PORT, 0)).getsockname()[1]
        second = held.enter_context(bind(None, DEFAULT_PORT, 0)).getsockname()[1]
        third = held.enter_context(bind(None, DEFAULT_PORT, 1)).getsockname()[1]
    # In which order is not told: servers of other tests take and leave ports there at the same time.
    assert len({first, second, third}) == 3
    assert all(DEFAULT_PORT <= port < DEFAULT_PORT + 100 for port in (first, second))
    assert DEFAULT_PORT < third < DEFAULT_PORT + 100


def test_server_3_gets_the_base_port_plus_3():
    base = free_port()
    with bind(None, base - 3, 3) as listener:
        assert listener.getsockname() == ("127.0.0.1", base)


def test_a_taken_port_and_one_beyond_the_last_are_told_in_words():
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortTaken, match=r"is taken: set inference.base_port="):
        bind(None, other.getsockname()[1], 0)
    with pytest.raises(PortTaken, match=r"inference.base_port=65535 leaves no port for server 1: 65536 is above 65535"):
        bind(None, 65535, 1)


@pytest.mark.parametrize("host", ["no-such-host.invalid.", "203.0.113.7", "a..b"])
def test_a_host_that_is_not_here_is_told_by_its_setting_and_not_by_the_port(host: str):
    with pytest.raises(PortTaken, match=rf"^inference.host={host} is not an address of this host \("):
        bind(host, DEFAULT_PORT, 0)


def test_all_addresses_are_told_as_one_that_can_be_typed():
    assert reachable_address("127.0.0.1") == "127.0.0.1"
    assert reachable_address("0.0.0.0") not in ("0.0.0.0", "")
