"""Answers of an OpenAI-compatible server as they come, piece by piece: what `telescope chat` asks.

Owns the requests, the stream of an answer and its stop. Refuses to know dialogues: a `Sampler` for those of tokens and a
`TextServer` for those of text are handed to environments/chat.py and workers/text_chat.py, which keep them.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from telescope.environments.chat import Sampled
from telescope.environments.http_client import BodyRefused, open_client, read_body, read_lines
from telescope.records import FinishReason, Sampling

CONNECT_S = 10.0
SILENT_S = 600.0
"""Without a piece of the answer: a long prompt, or a busy server."""
CAUSE_CHARACTERS = 500
LIMIT, OTHER_LIMIT = "max_tokens", "max_completion_tokens"
"""What servers call the most tokens of an answer: all but a few take the first."""
REFUSED_LIMIT = (400, 422)


class AnswerRefused(RuntimeError):
    """The server does not take the request, or its answer can't be read; the text says why."""


class ServerUnreachable(RuntimeError):
    """No server answers there, or it broke off."""


class AnswerStopped(RuntimeError):
    """The answer was stopped before its first piece."""


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are drawn; None: as the server has it."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def spell(self, max_tokens: int | None = None) -> dict[str, Any]:
        """Fields of a request; `max_tokens` lowers the limit of this answer."""
        most = self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens)
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        given = {name: value for name, value in {**drawn, "seed": self.seed}.items() if value is not None}
        return {LIMIT: most, **given, **({"stop": list(self.stop)} if self.stop else {})}


@dataclass
class StreamedAnswer:
    """What has come of an answer."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    """Empty where it was stopped."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, choice: Mapping[str, Any]) -> str:
        """Take one piece in; its text."""
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content")
        self.ids += choice.get("token_ids") or ()
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if text:
            self.texts.append(text)
        return text or ""

    @property
    def reason(self) -> FinishReason:
        """`length` where the answer has no end of its own: it was cut off, or stopped."""
        return "stop" if self.finish_reason == "stop" else "length"


class StreamingClient:
    """One server, for one event loop. `show` gets each piece of an answer as it comes; `key` is sent as a bearer token."""

    def __init__(self, url: str, key: str | None, show: Callable[[str], None]) -> None:
        import httpx

        self.url, self.show = url.rstrip("/"), show
        self._http = open_client(url, key, timeout=httpx.Timeout(SILENT_S, connect=CONNECT_S))
        self._reading: asyncio.Task[None] | None = None
        self._stopped = False
        self._limit_name = LIMIT

    async def close(self) -> None:
        await self._http.aclose()

    def stop(self) -> bool:
        """End the answer that is coming: what is there of it is all of it. False where none is."""
        if self._reading is None or self._reading.done():
            return False
        self._stopped = True
        self._reading.cancel()
        return True

    @property
    def is_stopped(self) -> bool:
        """Whether the latest answer was."""
        return self._stopped

    async def list_models(self) -> dict[str, int | None]:
        """By name, how many tokens each has room for, where the server says that, as vLLM does. Raises `ServerUnreachable` and
        `AnswerRefused`."""
        import httpx

        try:
            async with self._http.stream("GET", f"{self.url}/models", timeout=CONNECT_S) as response:
                status, body = response.status_code, await read_body(response)
        except BodyRefused as error:
            raise AnswerRefused(f"{self.url}/models: {error}") from error
        except httpx.HTTPError as error:
            raise ServerUnreachable(f"{self.url} does not answer ({str(error) or type(error).__name__})") from error
        said = body.decode("utf-8", "replace")
        if status != httpx.codes.OK:
            raise AnswerRefused(_describe_refusal(f"{self.url}/models", status, said))
        try:
            return {str(model["id"]): model.get("max_model_len") for model in json.loads(said)["data"]}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise AnswerRefused(f"{self.url}/models gave no list of models: {said[:CAUSE_CHARACTERS]}") from error

    async def read(self, path: str, body: Mapping[str, Any]) -> StreamedAnswer:
        """The whole answer to a request, or what had come when it was stopped. Raises `AnswerRefused`, `ServerUnreachable`, and
        `AnswerStopped` where nothing had."""
        answer = StreamedAnswer()
        self._stopped = False
        self._reading = asyncio.create_task(self._read_into(answer, path, body))
        try:
            await self._reading
        except asyncio.CancelledError:
            if not self._stopped:
                self._reading.cancel()
                raise
            if not answer.texts and not answer.ids:
                raise AnswerStopped("nothing had been said") from None
            answer.finish_reason = ""
        return answer

    async def _read_into(self, answer: StreamedAnswer, path: str, body: Mapping[str, Any]) -> None:
        import httpx

        try:
            async for choice in self._stream(path, body):
                if text := answer.add(choice):
                    self.show(text)
        except BodyRefused as error:
            raise AnswerRefused(f"{self.url}{path}: {error}") from error
        except httpx.HTTPError as error:
            raise ServerUnreachable(f"{self.url} does not answer ({str(error) or type(error).__name__})") from error

    async def _stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """The choices of an answer's events, again with the limit's other name where the server wants that."""
        url = f"{self.url}{path}"
        while True:
            asked = {self._limit_name if name == LIMIT else name: value for name, value in body.items()}
            async with self._http.stream("POST", url, json={**asked, "stream": True}) as response:
                if response.status_code == 200:
                    async for choice in _read_events(url, read_lines(response)):
                        yield choice
                    return
                said = (await read_body(response)).decode("utf-8", "replace")
                renames = response.status_code in REFUSED_LIMIT and OTHER_LIMIT in said
                if self._limit_name == OTHER_LIMIT or not renames:
                    raise AnswerRefused(_describe_refusal(url, response.status_code, said))
                self._limit_name = OTHER_LIMIT


async def _read_events(url: str, lines: AsyncIterator[str]) -> AsyncIterator[Mapping[str, Any]]:
    """The first choice of each server-sent event, up to `[DONE]`. Raises `AnswerRefused` for what is not one."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
            choices = event.get("choices", ())
        except (ValueError, AttributeError) as error:
            raise AnswerRefused(f"{url}: its answer is not a stream of events: {data[:CAUSE_CHARACTERS]}") from error
        if "error" in event:
            raise AnswerRefused(f"{url}: {str(event['error'])[:CAUSE_CHARACTERS]}")
        if choices:
            yield choices[0]


def _describe_refusal(url: str, status: int, text: str) -> str:
    """With the server's own sentence where it has one."""
    try:
        said = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = text
    key = "; --key-env VARIABLE names what holds its key" if status == 401 else ""
    return f"{url} answered {status}: {said[:CAUSE_CHARACTERS]}{key}"


class StreamedTokens:
    """A `Sampler` (environments/chat.py): token ids in, token ids out, the text shown meanwhile. What nobody trains on has no
    log-probs: they are 0."""

    def __init__(self, client: StreamingClient, model: str, options: SamplingOptions, end_ids: Sequence[int]) -> None:
        self._client, self._model, self._options, self._end_ids = client, model, options, list(end_ids)

    async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None) -> Sampled:
        body = {
            "model": self._model,
            "prompt": ids.tolist(),
            "return_token_ids": True,
            "skip_special_tokens": False,  # a call may stand between some
            "stop_token_ids": self._end_ids,
            **self._options.spell(max_tokens),
        }
        answer = await self._client.read("/completions", body)
        if not answer.ids:
            raise AnswerRefused(f"{self._client.url} gave no token ids")
        kept = np.array(answer.ids, np.int32)
        return Sampled(kept, np.zeros(len(kept), np.float32), np.zeros(len(kept), np.int32), answer.reason)


class StreamedText:
    """A `TextServer` (workers/text_chat.py): messages in, text out, shown meanwhile."""

    def __init__(self, client: StreamingClient, model: str, options: SamplingOptions) -> None:
        self._client, self._model, self._options = client, model, options

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, deadline: float = math.inf
    ) -> tuple[str, FinishReason, int, int]:
        body = {"model": self._model, "messages": list(messages), **self._options.spell(sampling.max_tokens)}
        answer = await self._client.read("/chat/completions", body)
        return answer.text, answer.reason, 0, 0
