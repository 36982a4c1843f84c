"""A dialogue with a model that somebody else serves: chat completions over HTTP, text in and text out.

What the server does not tell stays unknown: token ids, log-probs and weight versions. Nothing of such a rollout can be trained
on; evals alone play it. A server that turns a request away for now (429, 503) is asked again while the rollout has time; of
other failures whoever ordered the rollout tries again. Refuses to know the environment.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

import httpx

from telescope.config.secrets import parse_reference, reveal
from telescope.config.sections import RemoteServer
from telescope.environments.answer_parsers import Answer
from telescope.environments.base import ToolSchema, Turn
from telescope.environments.chat import ChatError, DialogueRecord, Recording
from telescope.environments.http_client import BodyRefused, open_client, read_body
from telescope.environments.validate import find_message_mistake
from telescope.maths.support import Support
from telescope.records import FinishReason, Sampling

CAUSE_CHARACTERS = 500
"""Of a refusal, as many are told."""
UNLIMITED = 1 << 30
"""Tokens left in a context whose size nobody tells."""
LONGEST_CONTEXT = 100_000_000
"""Tokens of a prompt: what `inference.max_model_len` may be at most."""
CONNECT_S = 30.0
BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
"""The request is turned away for now, and is none the worse for it."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Before asking a busy server again that does not say when; doubled each time."""
REFUSED_LIMIT = (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY)
LIMIT, OTHER_LIMIT = "max_tokens", "max_completion_tokens"
"""What servers call the most tokens of an answer: all but a few take the first."""


class RemoteFailed(ChatError):
    """The server did not answer, or not with an answer."""


@dataclass(frozen=True)
class _RemoteAnswer:
    status_code: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


class ChatCompletions:
    """The client of one worker. `timeout_s`: of one answer. Raises `SecretMissing`."""

    def __init__(self, server: RemoteServer, timeout_s: float) -> None:
        self._server = server
        self._limit_name = LIMIT
        self._has_answered = False
        self.refusal = ""
        """Why the server takes no request with this key; empty as long as it does."""
        key: str | None = reveal(server.api_key)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))
        self._client = open_client(server.url, key, timeout=timeout, limits=limits)

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, deadline: float = math.inf
    ) -> tuple[str, FinishReason, int, int]:
        """(text, why it ended, prompt tokens, completion tokens); 0 tokens where the server does not count them, or says what
        can't be. A busy server is asked again up to `deadline`, of `time.monotonic`. Raises `RemoteFailed`."""
        url = f"{self._server.url.rstrip('/')}/chat/completions"
        body = self._make_body(messages, sampling)
        answer, wait_s = await self._post(url, body), FIRST_WAIT_S
        while answer.status_code in BUSY:
            pause_s, wait_s = _read_retry_after(answer) or wait_s, min(2 * wait_s, LONGEST_WAIT_S)
            if time.monotonic() + pause_s >= deadline:
                raise RemoteFailed(
                    f"{_describe_refusal(url, answer)} (the next try, in {pause_s:g} s, is beyond rollout.timeout_s: lower "
                    "orchestrator.max_concurrent_prompts_per_server, or raise rollout.timeout_s)"
                )
            await asyncio.sleep(pause_s)
            answer = await self._post(url, body)
        if answer.status_code != httpx.codes.OK:
            self._note_refusal(url, answer)
            raise RemoteFailed(_describe_refusal(url, answer))
        self._has_answered = True
        return _read(url, answer, sampling.max_tokens)

    def _make_body(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._server.model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            self._limit_name: sampling.max_tokens,
        }
        whole = Support()
        if sampling.top_p != whole.top_p:
            body["top_p"] = sampling.top_p
        if self._server.send_seed:
            body["seed"] = sampling.seed % (1 << 31)
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        return body

    async def _post(self, url: str, body: dict[str, Any]) -> _RemoteAnswer:
        """Where the server wants the limit under its other name, the body has that from then on, and so have later ones."""
        try:
            answer = await self._post_once(url, body)
            if LIMIT in body and answer.status_code in REFUSED_LIMIT and OTHER_LIMIT in answer.text:
                renamed = {OTHER_LIMIT if name == LIMIT else name: value for name, value in body.items()}
                again = await self._post_once(url, renamed)
                if again.status_code not in REFUSED_LIMIT:
                    self._limit_name, answer = OTHER_LIMIT, again
                    body[OTHER_LIMIT] = body.pop(LIMIT)
        except (httpx.HTTPError, BodyRefused) as error:
            raise RemoteFailed(f"{url}: {str(error) or type(error).__name__}") from error
        return answer

    async def _post_once(self, url: str, body: Mapping[str, Any]) -> _RemoteAnswer:
        async with self._client.stream("POST", url, json=body) as response:
            said = await read_body(response)
            return _RemoteAnswer(response.status_code, response.headers, said)

    def _note_refusal(self, url: str, answer: _RemoteAnswer) -> None:
        """401 is of the key; 403 too, unless others were answered: some servers refuse single requests with it."""
        refused = answer.status_code == httpx.codes.UNAUTHORIZED
        if refused or (answer.status_code == httpx.codes.FORBIDDEN and not self._has_answered):
            name = parse_reference(self._server.api_key)
            key = "no key was sent" if name is None else f"it does not take the key in {name}"
            self.refusal = f"{_describe_refusal(url, answer)}: {key}; --key-env VARIABLE names what holds the right one"


def _describe_refusal(url: str, answer: _RemoteAnswer) -> str:
    return f"{url} answered {answer.status_code}: {answer.text[:CAUSE_CHARACTERS]}"


def _read_retry_after(answer: _RemoteAnswer) -> float:
    """Seconds until it may be asked again; 0 where it does not say, or says at once."""
    said = answer.headers.get("Retry-After", "").strip()
    try:
        seconds = float(said)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(said) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):  # no date; one without its zone
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _read(url: str, answer: _RemoteAnswer, max_tokens: int) -> tuple[str, FinishReason, int, int]:
    try:
        body = json.loads(answer.body)
        choice, usage = body["choices"][0], body.get("usage") or {}
        text, reason = choice["message"].get("content"), choice.get("finish_reason")
        prompt = _take_count(usage.get("prompt_tokens"), LONGEST_CONTEXT)
        completion = _take_count(usage.get("completion_tokens"), max_tokens)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise RemoteFailed(f"{url}: its answer is not a chat completion: {answer.text[:CAUSE_CHARACTERS]}") from error
    if text is None:
        raise RemoteFailed(f"{url}: its answer has no text: {_explain_absence(choice['message'], reason)}")
    if not isinstance(text, str):
        raise RemoteFailed(f"{url}: the content of its answer is not text: {answer.text[:CAUSE_CHARACTERS]}")
    return text, "length" if reason == "length" else "stop", prompt, completion


def _take_count(said: object, most: int) -> int:
    """What a server counted; 0, as where it does not count, for what no count of at most `most` tokens is."""
    return said if type(said) is int and 0 <= said <= most else 0


def _explain_absence(message: Mapping[str, Any], reason: object) -> str:
    """Why the content is null."""
    if reason == "content_filter":
        return "its content filter took it (finish_reason content_filter)"
    if message.get("tool_calls"):
        return "it called tools, which nobody offered it; calls are read from the text"
    if reason == "length":
        return "its tokens were used up before it (finish_reason length): raise rollout.max_tokens, or let it think less"
    if message.get("refusal"):
        return f"it refuses: {str(message['refusal'])[:CAUSE_CHARACTERS]}"
    return f"its content is null (finish_reason {reason})"


class TextServer(Protocol):
    """Who answers a text dialogue; see `ChatCompletions.ask`."""

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, deadline: float = math.inf
    ) -> tuple[str, FinishReason, int, int]: ...


MakeSampling = Callable[[int, int | None], Sampling]
"""(turn, lower limit of this answer) -> how it is sampled."""


class _TextRecord(DialogueRecord):
    """With the server that is asked, and until when."""

    def __init__(self, server: TextServer, make_sampling: MakeSampling, closed: Callable[[], None], timeout_s: float) -> None:
        super().__init__(closed)
        self.server, self.make_sampling = server, make_sampling
        self.deadline = time.monotonic() + timeout_s
        self.completion_tokens = self.prompt_tokens = 0
        self.last: TextDialogue | None = None


class TextDialogue:
    """One line of messages. See `Dialogue` of environments/base.py. The tools that `say` is given are not sent: the environment
    lists them in its text, as for a template without tools, and reads calls out of the answer's."""

    shows_tools = False
    has_tool_role = False
    tokenizer = None

    def __init__(self, record: _TextRecord, *, forgives_cancelling: bool = False) -> None:
        self._record = record
        self._forgives_cancelling = forgives_cancelling
        self._history: list[dict[str, Any]] = []
        self._transcript: list[str] = []
        self._reason: FinishReason = "abort"
        self._busy = False
        self.last_prompt_tokens = self.last_answer_tokens = 0

    @property
    def truncated(self) -> bool:
        return self._reason == "length"

    @property
    def tokens_left(self) -> int:
        return UNLIMITED

    @property
    def transcript(self) -> str:
        return "".join(self._transcript)

    @property
    def finish_reason(self) -> FinishReason:
        return self._reason

    def takes(self, *turns: Turn) -> bool:
        """Plain turns of text alone."""
        return all(turn.get("role") != "tool" and not turn.get("tool_calls") for turn in turns)

    async def say(self, *turns: Turn, tools: Sequence[ToolSchema] = (), max_tokens: int | None = None) -> str:
        """See `Dialogue.say`. Raises `RemoteFailed`; the dialogue is then as it was."""
        record = self._record
        if self._busy:
            raise RuntimeError("say was called while the policy was still answering: a dialogue has one answer at a time")
        record.refuse_closed("say")
        if not turns and not self._history:
            raise ValueError("the first say of a dialogue needs at least one turn")
        for turn in turns:
            if mistake := find_message_mistake(turn):
                raise TypeError(mistake)
        if turns and self._history and turns[0].get("role") == "assistant" == self._history[-1]["role"]:
            turns = turns[1:]  # how the answer reads as a message, which text needs no other form of
        added = [dict(turn) for turn in turns]
        self._busy, turn_number = True, record.asked
        record.asked += 1
        record.asking += 1
        try:
            sampling = record.make_sampling(turn_number, max_tokens)
            text, reason, prompt, completion = await record.server.ask([*self._history, *added], sampling, record.deadline)
        except BaseException as error:
            if not (self._forgives_cancelling and isinstance(error, asyncio.CancelledError)):
                record.failure = record.failure or error
            raise
        finally:
            self._busy = False
            record.asking -= 1
        if not record.answers:
            record.opening_text, record.prompt_tokens = _write(added), prompt
        else:
            self._transcript.append(_write(added))
        record.answers += 1
        record.generated_ns = time.time_ns()
        record.completion_tokens += completion
        record.last = self
        self._history += [*added, {"role": "assistant", "content": text}]
        self._transcript.append(text)
        self._reason, self.last_prompt_tokens, self.last_answer_tokens = reason, prompt, completion
        return Answer(text)

    def restart(self, *turns: Turn) -> None:
        """See `Dialogue.restart`."""
        if self._busy:
            raise RuntimeError("restart was called while the policy was still answering")
        if self._history:
            self._transcript.append("\n[context restarted]\n")
        self._history = [dict(turn) for turn in turns]


class TextChat(TextDialogue):
    """The `Chat` that an environment is given; `recording` and `failure` as of `TokenChat`. `timeout_s`: of the rollout."""

    def __init__(
        self,
        server: TextServer,
        make_sampling: MakeSampling,
        closed: Callable[[], None] = lambda: None,
        timeout_s: float = math.inf,
    ) -> None:
        super().__init__(_TextRecord(server, make_sampling, closed, timeout_s))
        self._dialogues: list[TextDialogue] = [self]

    @property
    def failure(self) -> BaseException | None:
        return self._record.failure

    def dialogue(self) -> TextDialogue:
        """Another line of messages in this rollout."""
        self._record.refuse_closed("dialogue")
        other = TextDialogue(self._record, forgives_cancelling=True)
        self._dialogues.append(other)
        return other

    def close(self) -> None:
        """See `Chat`; a second call is none."""
        self._record.close()

    def recording(self) -> Recording:
        """Without branches: no token of it is known. Raises `ChatError` where the model was never asked or `say` failed."""
        record = self._record
        if record.failure is not None:
            raise ChatError(f"a turn of the dialogue failed: {record.failure}") from record.failure
        if record.last is None:
            raise ChatError("the environment returned a reward without asking the policy anything")
        return Recording(
            branches=(),
            branch_turns=(),
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            turns=record.answers,
            reasons=(),
            finish_reason=record.last.finish_reason,
            prompt_text=record.opening_text,
            completion_text="".join(dialogue.transcript for dialogue in self._dialogues),
            generated_ns=record.generated_ns,
        )


def _write(turns: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"[{turn.get('role', '')}] {turn.get('content', '')}\n" for turn in turns)
