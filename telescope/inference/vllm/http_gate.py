"""What of vLLM's HTTP application others may use: an allow-list of routes behind the key, and a share of the engine.

Owns which requests reach the application, and what of their bodies is changed or refused. Refuses to know what they ask: that
is vLLM's. An ASGI application around another.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

ALLOWED = {
    "/health": "GET",
    "/metrics": "GET",
    "/telescope/status": "GET",
    "/v1/models": "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
}
"""The routes of docs/inference.md with their methods. vLLM has dozens more, and each version adds some."""
OPEN = frozenset({"/health"})
"""Asked without the key, by whatever watches a machine; it says nothing but that the process lives."""
FIELDS = frozenset({
    "add_generation_prompt", "add_special_tokens", "best_of", "chat_template_kwargs", "continue_final_message", "echo",
    "frequency_penalty", "ignore_eos", "include_reasoning", "include_stop_str_in_output", "logit_bias", "logprobs",
    "max_completion_tokens", "max_tokens", "messages", "metadata", "min_p", "min_tokens", "model", "n",
    "parallel_tool_calls", "presence_penalty", "priority", "prompt", "prompt_logprobs", "reasoning_effort",
    "repetition_penalty", "request_id", "response_format", "return_token_ids", "return_tokens_as_token_ids", "seed",
    "service_tier", "skip_special_tokens", "stop", "stop_token_ids", "store", "stream", "stream_options", "temperature",
    "tool_choice", "tools", "top_k", "top_logprobs", "top_p", "truncate_prompt_tokens", "user",
})  # fmt: skip
"""What a body may ask for. Anything else of vLLM's might cost more than the tokens that are sampled: a grammar of one line
holds each step of the engine, and so each rollout, for tenths of a second."""
STOPS = 64
"""Each is looked for in each token's text."""
BODY_BYTES = 4 * 2**20
"""Some 16 prompts of 64,000 token ids."""
BODIES_BYTES, BODIES_S = 8 * 2**20, 8.0
"""Of all bodies that are read, or have been within so many seconds: strangers hold no more memory than that, and no more than
the one by the other, 1 MiB a second, is parsed on the event loop that the engine answers rollouts on."""
BODY_S = 30.0
"""From a request's head to the end of its body."""
WAIT_S = 120.0
"""For a place beside other requests; then the client is told to come again."""
LAST_PRIORITY = 2**30
"""vLLM takes the smallest first. A rollout's is its turn, so every rollout comes before a request of somebody else."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class Refused(Exception):
    """The request goes no further; the text is the answer."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class GateRules:
    """`key`: null: none is asked for. `sequences`: that requests from outside may have in the engine at once. `last`: whether
    the engine takes priorities, and theirs is the last. `adapters`: whether it serves adapters. `alone`: no rollout shares the
    engine, so that a request may cost what it likes."""

    key: str | None
    sequences: int
    last: bool
    adapters: bool
    alone: bool = False


class HttpGate:
    """Use it as the application of one event loop."""

    def __init__(self, application: Application, rules: GateRules) -> None:
        self._application, self._rules = application, rules
        self._free = rules.sequences
        self._bytes_free = BODIES_BYTES
        self._freed = asyncio.Condition()
        self._beside = "" if rules.alone else "beside the rollouts "

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            self._check_head(scope)
            if scope["method"] == "GET":
                await self._application(scope, receive, send)
                return
            body = self._check_body(await self._read_body(scope, receive))
            data = json.dumps(body).encode()
            async with self._places(count_sequences(body)):
                await self._application(_with_length(scope, len(data)), _replay(data, receive), send)
        except Refused as refused:
            await _answer(send, refused)

    def _check_head(self, scope: Message) -> None:
        path = scope["path"]
        if ALLOWED.get(path) != scope["method"]:
            raise Refused(404, f"{scope['method']} {path} is not served: there are {', '.join(sorted(ALLOWED))}")
        headers = dict(scope["headers"])
        if self._rules.key is None:
            if b"origin" in headers or not _is_own_name(headers.get(b"host", b"")):  # a page in a browser, whoever wrote it
                raise Refused(
                    403, "requests of web pages, and for other names than this host's, need a key: set inference.api_key"
                )
            return
        given = headers.get(b"authorization", b"")
        if path not in OPEN and not hmac.compare_digest(given, f"Bearer {self._rules.key}".encode()):
            where = "the variable that --key-env named has it" if self._rules.alone else "`telescope servers RUN_DIR` says how"
            raise Refused(401, f"this server asks for its key, as a bearer token: {where}")

    def _check_body(self, data: bytes) -> dict[str, Any]:
        """What is passed on."""
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refused(400, "the body is not a JSON object")
        if not self._rules.alone:
            _check_fields({name: value for name, value in body.items() if value is not None})
        # by what is not given, since vLLM reads "1", 1.0 and even false as numbers
        if self._rules.adapters and (body.get("prompt_logprobs") is not None or body.get("echo") not in (None, False)):
            raise Refused(
                400,
                "log-probs of a prompt (prompt_logprobs, echo) are not served with adapters: vLLM ends its engine over them; "
                "export a checkpoint with --merge and ask that",
            )
        if (asked := count_sequences(body)) > self._rules.sequences:
            raise Refused(
                400,
                f"the request asks for {asked} answers at once, and {self._rules.sequences} are served "
                f"{self._beside}(inference.http_sequences)",
            )
        if self._rules.last:
            body["priority"] = LAST_PRIORITY
        else:
            body.pop("priority", None)
        return body

    async def _read_body(self, scope: Message, receive: Receive) -> bytes:
        length = dict(scope["headers"]).get(b"content-length", b"")
        asked = int(length) if length.isdigit() else BODY_BYTES
        if asked > BODY_BYTES:
            raise Refused(413, f"the body has more than {BODY_BYTES} bytes")
        await self._wait_for(lambda: self._bytes_free >= asked, "others send long requests: come again")
        self._bytes_free -= asked
        try:
            return await _read(receive)
        finally:
            asyncio.get_running_loop().call_later(BODIES_S, self._give_bytes, asked)

    def _give_bytes(self, count: int) -> None:
        self._bytes_free += count
        self._tell = asyncio.create_task(self._tell_waiting())  # held, or it might be collected

    async def _tell_waiting(self) -> None:
        async with self._freed:
            self._freed.notify_all()

    async def _wait_for(self, there: Callable[[], bool], sentence: str) -> None:
        try:
            async with asyncio.timeout(WAIT_S), self._freed:
                await self._freed.wait_for(there)
        except TimeoutError:
            raise Refused(429, sentence) from None

    @asynccontextmanager
    async def _places(self, wanted: int) -> AsyncIterator[None]:
        full = f"{self._rules.sequences} answers are under way {self._beside}(inference.http_sequences): come again"
        await self._wait_for(lambda: self._free >= wanted, full)
        self._free -= wanted
        try:
            yield
        finally:
            self._free += wanted
            await self._tell_waiting()


def _check_fields(asked: Mapping[str, Any]) -> None:
    """Raises `Refused` for what could hold the engine up."""
    if unknown := sorted(set(asked) - FIELDS):
        raise Refused(
            400,
            f"{', '.join(unknown)[:200]}: a run does not serve this beside its rollouts, which would wait for it; export a "
            "checkpoint and ask that",
        )
    form = asked.get("response_format", {})
    if not isinstance(form, dict) or form.get("type", "text") != "text":
        raise Refused(400, "response_format: rollouts would wait for its grammar; export a checkpoint and ask that")
    if asked.get("tool_choice", "auto") not in ("auto", "none"):
        raise Refused(400, "tool_choice: a run serves auto and none; rollouts would wait for the grammar of a forced one")
    for tool in asked.get("tools") or ():
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict) and tool["function"].get("strict"):
            raise Refused(400, "tools: rollouts would wait for the grammar of a strict one; leave `strict` out")
    for name in ("stop", "stop_token_ids", "logit_bias"):
        given = asked.get(name, ())
        if isinstance(given, list | dict) and len(given) > STOPS:
            raise Refused(400, f"{name}: {len(given)} entries, and a run takes {STOPS} beside its rollouts")


def count_sequences(body: MutableMapping[str, Any]) -> int:
    """Sequences that a request makes the engine sample: answers a prompt, times prompts. Raises `Refused` for a number of
    answers that is written in another way than as a whole number: vLLM would read it."""
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    most = 1
    for name in ("n", "best_of"):
        value = body.get(name, 1)
        if value is not None and type(value) is not int:
            raise Refused(400, f"{name}={json.dumps(value)} is not a whole number")
        most = max(most, value or 1)
    return most * prompts


def _is_own_name(host: bytes) -> bool:
    """Whether a `Host` header names this machine: by an address, as localhost, or by its name. A page that had its own name
    point here would send that one."""
    try:
        name = urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:
        return False
    own = socket.gethostname().lower()
    if name in ("", "localhost", own, own.partition(".")[0]):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _read(receive: Receive) -> bytes:
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the body broke off")
                part = message.get("body", b"")
                size += len(part)
                if size > BODY_BYTES:
                    raise Refused(413, f"the body has more than {BODY_BYTES} bytes")
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise Refused(408, f"the body has not come within {BODY_S:g} s") from None


def _with_length(scope: Message, size: int) -> Message:
    """The head of the request with the changed body's length."""
    length = str(size).encode()
    headers = [(name, value) for name, value in scope["headers"] if name not in (b"content-length", b"transfer-encoding")]
    return {**scope, "headers": [*headers, (b"content-length", length)]}


def _replay(data: bytes, receive: Receive) -> Receive:
    """Gives the body once, then what else comes: that the client has gone."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": data, "more_body": False}

    return next_message


async def _answer(send: Send, refused: Refused) -> None:
    """In the form of OpenAI's API, which its clients show."""
    error = {"message": str(refused), "type": "invalid_request_error", "code": refused.status}
    data = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.status == 429:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": refused.status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": data})
