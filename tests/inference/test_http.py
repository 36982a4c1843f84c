"""vLLM's HTTP application over the same engine as the link."""

from __future__ import annotations

import asyncio
import socket

import httpx
import numpy as np
import pytest

from telescope.config.parts import ModelSettings
from telescope.inference.http import PortTaken, bind, http_beside
from tests.inference.conftest import Served

vllm = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]


def marked(test):
    for mark in vllm:
        test = mark(test)
    return test


@marked
async def test_models_health_and_completions_are_the_engines(served: Served):
    prompt = np.arange(2, 12, dtype=np.int32)
    async with (
        http_beside(served.engine.client, bind(None, 0, 0), ModelSettings(name="old")) as url,
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
async def test_the_link_is_served_while_http_requests_run(served: Served):
    async with (
        http_beside(served.engine.client, bind(None, 0, 0), ModelSettings(name="old")) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        ask = {"model": "old", "prompt": "abc", "max_tokens": 50, "temperature": 0.3}
        others = [asyncio.create_task(client.post("/v1/completions", json=ask)) for _ in range(8)]
        answers = await asyncio.gather(*(served.generate(np.arange(2, 12, dtype=np.int32), 6, seed=i) for i in range(32)))
        assert len(answers) == 32
        assert [answer.status_code for answer in await asyncio.gather(*others)] == [200] * 8


def test_server_3_gets_the_base_port_plus_3():
    with socket.create_server(("127.0.0.1", 0)) as free:
        base = free.getsockname()[1]
    with bind(None, base - 3, 3) as listener:
        assert listener.getsockname() == ("127.0.0.1", base)


def test_a_taken_port_and_one_beyond_the_last_are_told_in_words():
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortTaken, match=r"is taken: set inference.base_port="):
        bind(None, other.getsockname()[1], 0)
    with pytest.raises(PortTaken, match=r"inference.base_port=65535 leaves no port for server 1: 65536 is above 65535"):
        bind(None, 65535, 1)
