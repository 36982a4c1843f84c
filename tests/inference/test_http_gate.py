"""The gate before vLLM's HTTP application: who comes in, with what, and how many at once."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest

from telescope.inference.vllm import http_gate
from telescope.inference.vllm.http_gate import LAST_PRIORITY, GateRules, HttpGate, count_sequences


class Inside:
    """An application that keeps what reaches it, and answers when it is let."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.let = asyncio.Event()
        self.let.set()
        self.most = self.now = 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["method"] == "POST":
            message = await receive()
            length = dict(scope["headers"])[b"content-length"]
            assert int(length) == len(message["body"])
            self.bodies.append(json.loads(message["body"]))
            self.now += 1
            self.most = max(self.most, self.now)
            await self.let.wait()
            self.now -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"inside"})


def client_of(
    inside: Inside,
    *,
    key: str | None = None,
    sequences: int = 4,
    last: bool = True,
    adapters: bool = False,
    alone: bool = False,
):
    gate = HttpGate(inside, GateRules(key, sequences, last, adapters, alone))
    return httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://localhost")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "path",
    [
        "/invocations",
        "/tokenize",
        "/v1/completions/",
        "//v1/completions",
        "/V1/completions",
        "/version",
    ],
)
async def test_what_is_not_on_the_list_is_not_there(path: str):
    inside = Inside()
    async with client_of(inside, key="sesame") as client:
        for headers in ({}, {"Authorization": "Bearer sesame"}):
            request = client.build_request("POST", "http://localhost", json={}, headers=headers)
            request.url = request.url.copy_with(raw_path=path.encode())
            assert (await client.send(request)).status_code == 404
    assert inside.bodies == []


async def test_another_method_of_an_allowed_route_is_not_there():
    async with client_of(Inside()) as client:
        assert (await client.options("/v1/completions")).status_code == 404
        assert (await client.get("/v1/completions")).status_code == 404
        assert (await client.post("/v1/models", json={})).status_code == 404


@pytest.mark.parametrize("given", [None, "Bearer barley", "Bearer", "sesame", "Basic sesame"])
async def test_all_but_health_asks_for_the_key(given: str | None):
    headers = {} if given is None else {"Authorization": given}
    async with client_of(Inside(), key="sesame") as client:
        for path in ("/metrics", "/telescope/status", "/v1/models"):
            assert (await client.get(path, headers=headers)).status_code == 401
        assert (await client.post("/v1/completions", json={}, headers=headers)).status_code == 401
        assert (await client.get("/health", headers=headers)).status_code == 200
        assert (await client.get("/metrics", headers={"Authorization": "Bearer sesame"})).status_code == 200


async def test_a_web_page_needs_a_key():
    async with client_of(Inside()) as client:
        page = {"Origin": "https://page.example"}
        assert (await client.post("/v1/completions", json={}, headers=page)).status_code == 403


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1:8100", 200), ("[::1]:8100", 200), ("10.0.0.7", 200), (socket.gethostname(), 200), ("LOCALHOST:1", 200),
        ("evil.example", 403), ("evil.example:8100", 403), ("localhost.evil.example", 403), ("[::1", 403),
    ],
)  # fmt: skip
async def test_a_page_whose_name_points_here_needs_a_key(host: str, answer: int):
    """DNS rebinding: such a GET has no Origin."""
    async with client_of(Inside()) as client:
        assert (await client.get("/v1/models", headers={"Host": host})).status_code == answer
    async with client_of(Inside(), key="sesame") as client:
        named = {"Host": host, "Authorization": "Bearer sesame"}
        assert (await client.get("/v1/models", headers=named)).status_code == 200


async def test_the_callers_priority_is_not_theirs_to_choose():
    inside = Inside()
    async with client_of(inside) as client:
        await client.post("/v1/completions", json={"prompt": "a", "priority": -1})
    async with client_of(inside, last=False) as client:
        await client.post("/v1/completions", json={"prompt": "a", "priority": -1})
    assert inside.bodies == [{"prompt": "a", "priority": LAST_PRIORITY}, {"prompt": "a"}]


@pytest.mark.parametrize("trap", [
    {"echo": True, "logprobs": 0}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": True}, {"echo": True, "logprobs": False},
    {"echo": "yes", "logprobs": 1}, {"echo": 1}, {"prompt_logprobs": "0"}, {"prompt_logprobs": False},
])  # fmt: skip
async def test_log_probs_of_a_prompt_are_refused_where_adapters_are_served(trap: dict):
    inside = Inside()
    async with client_of(inside, adapters=True) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", **trap})
        assert answer.status_code == 400
        assert "export a checkpoint" in answer.json()["error"]["message"]
        assert (await client.post("/v1/completions", json={"prompt": "a", "echo": False})).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "a", "logprobs": 1})).status_code == 200
    async with client_of(inside) as client:
        assert (await client.post("/v1/completions", json={"prompt": "a", **trap})).status_code == 200


@pytest.mark.parametrize(("asked", "named"), [
    ({"structured_outputs": {"grammar": 'root ::= root root | "a"'}}, "structured_outputs"),
    ({"guided_json": {}}, "guided_json"),
    ({"response_format": {"type": "json_object"}}, "response_format"), ({"response_format": []}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools"),
    ({"use_beam_search": True}, "use_beam_search"), ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ({"of_a_later_vllm": 0}, "of_a_later_vllm"), ({"bad_words": ["a"] * 9}, "bad_words"),
    ({"stop": [str(i) for i in range(65)]}, "stop"), ({"logit_bias": {str(i): 1 for i in range(65)}}, "logit_bias"),
])  # fmt: skip
async def test_what_costs_more_than_the_tokens_sampled_is_refused_by_name(asked: dict, named: str):
    inside = Inside()
    async with client_of(inside) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", **asked})
        assert (answer.status_code, inside.bodies) == (400, [])
        assert answer.json()["error"]["message"].startswith(f"{named}: ")


@pytest.mark.parametrize("asked", [
    {"structured_outputs": None, "response_format": {"type": "text"}, "tool_choice": "auto", "tools": [{"type": "function"}]},
    {"stop": ["\n"], "logit_bias": {"5": -100}, "chat_template_kwargs": {"enable_thinking": False}, "user": "me"},
    {"response_format": None, "tools": None, "stop": "a text of one", "stream": True, "stream_options": {}},
])  # fmt: skip
async def test_what_clients_usually_send_comes_in(asked: dict):
    inside = Inside()
    async with client_of(inside) as client:
        assert (await client.post("/v1/completions", json={"prompt": "a", **asked})).status_code == 200
    assert inside.bodies == [{"prompt": "a", **asked, "priority": LAST_PRIORITY}]


async def test_where_no_rollout_waits_a_request_may_cost_what_it_likes():
    inside, shaped = Inside(), {"structured_outputs": {"choice": ["yes", "no"]}, "tool_choice": "required"}
    async with client_of(inside, alone=True, key="sesame", adapters=True) as client:
        client.headers["Authorization"] = "Bearer sesame"
        assert (await client.post("/v1/completions", json={"prompt": "a", **shaped})).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "a", "echo": True})).status_code == 400
        greedy = await client.post("/v1/completions", json={"prompt": "a", "n": 5})
        assert (greedy.status_code, "rollouts" in greedy.text) == (400, False)
        assert (await client.post("/tokenize", json={})).status_code == 404
        del client.headers["Authorization"]
        assert "the variable that --key-env named has it" in (await client.get("/v1/models")).text
    assert inside.bodies == [{"prompt": "a", **shaped, "priority": LAST_PRIORITY}]


async def test_requests_wait_for_a_place_and_a_greedy_one_is_refused():
    inside = Inside()
    inside.let.clear()
    async with client_of(inside, sequences=3) as client:
        asked = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"})) for _ in range(8)]
        while inside.now < 3:
            await asyncio.sleep(0)
        greedy = await client.post("/v1/completions", json={"prompt": "a", "n": 256})
        assert greedy.status_code == 400
        assert "inference.http_sequences" in greedy.json()["error"]["message"]
        for written in ("256", 256.0, True, [256], {}):
            answer = await client.post("/v1/completions", json={"prompt": "a", "n": written})
            assert (answer.status_code, "is not a whole number" in answer.text) == (400, True)
        inside.let.set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 8
    assert inside.most == 3


async def test_who_gets_no_place_in_time_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_gate, "WAIT_S", 0.05)
    inside = Inside()
    inside.let.clear()
    async with client_of(inside, sequences=1) as client:
        first = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        while not inside.now:
            await asyncio.sleep(0)
        late = await client.post("/v1/completions", json={"prompt": "a"})
        assert (late.status_code, late.headers["retry-after"]) == (429, "1")
        inside.let.set()
        assert (await first).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize(("body", "status"), [(b"{", 400), (b"[]", 400), (b"[" * 100_000, 400), (b"\xff", 400)])
async def test_a_body_that_is_not_an_object_is_refused(body: bytes, status: int):
    async with client_of(Inside()) as client:
        assert (await client.post("/v1/completions", content=body)).status_code == status


async def test_a_body_without_end_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_gate, "BODY_BYTES", 1000)
    monkeypatch.setattr(http_gate, "BODY_S", 0.05)

    async def slow():
        yield b"{"
        await asyncio.sleep(5)

    async with client_of(Inside()) as client:
        assert (await client.post("/v1/completions", content=b" " * 1001)).status_code == 413
    gate = HttpGate(Inside(), GateRules(None, 1, True, False))
    sent = []

    async def keep(message) -> None:
        sent.append(message)

    async def never():
        await asyncio.Event().wait()

    await gate({"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}, never, keep)
    assert sent[0]["status"] == 408


async def test_bodies_that_are_held_back_cost_no_more_than_a_few(monkeypatch: pytest.MonkeyPatch):
    """60 strangers who each keep the last byte of 4 MiB to themselves."""
    monkeypatch.setattr(http_gate, "BODIES_S", 0.0)
    gate, reading, over = HttpGate(Inside(), GateRules(None, 4, True, False)), 0, asyncio.Event()

    async def held_back():
        nonlocal reading
        reading += 1
        await over.wait()
        return {"type": "http.disconnect"}

    async def drop(message) -> None:
        pass

    length = str(http_gate.BODY_BYTES).encode()
    for headers in ([(b"content-length", length)], []):  # told, or in chunks
        scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": [(b"host", b"localhost"), *headers]}
        strangers = [asyncio.create_task(gate(dict(scope), held_back, drop)) for _ in range(60)]
        for _ in range(200):
            await asyncio.sleep(0)
        assert reading == http_gate.BODIES_BYTES // http_gate.BODY_BYTES == 2
        over.set()
        await asyncio.gather(*strangers)
        assert reading == 60, "the others had their turn"
        reading = 0
        over.clear()


async def test_what_was_read_counts_for_a_while(monkeypatch: pytest.MonkeyPatch):
    """Else a stranger keeps the engine's event loop busy with bodies that are refused."""
    monkeypatch.setattr(http_gate, "BODIES_BYTES", 1000)
    monkeypatch.setattr(http_gate, "BODIES_S", 60.0)
    monkeypatch.setattr(http_gate, "WAIT_S", 0.05)
    async with client_of(Inside()) as client:
        asked = {"prompt": "a" * 700, "n": 1_000_000}
        assert (await client.post("/v1/completions", json=asked)).status_code == 400
        late = await client.post("/v1/completions", json=asked)
        assert (late.status_code, late.json()["error"]["message"]) == (429, "others send long requests: come again")
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_a_websocket_is_closed():
    sent = []

    async def keep(message) -> None:
        sent.append(message)

    await HttpGate(Inside(), GateRules(None, 1, True, False))({"type": "websocket", "path": "/v1/realtime"}, keep, keep)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [[1], [2]], "best_of": 4, "n": 2}, 8),
        ({"messages": [], "n": 5}, 5),
        ({"prompt": [], "n": None}, 1),
        ({"n": -7}, 1),
    ],
)
def test_the_answers_that_a_request_makes_are_counted(body: dict, sequences: int):
    assert count_sequences(body) == sequences
