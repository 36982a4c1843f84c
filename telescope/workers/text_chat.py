"""A dialogue with a model that somebody else serves: chat completions over HTTP, text in and text out.

What the server does not tell stays unknown: token ids, log-probs and weight versions. Nothing of such a rollout can be trained
on; evals alone play it. Refuses to know the environment, and to try again: whoever ordered the rollout does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from telescope.config.secrets import reveal
from telescope.config.sections import RemoteServer
from telescope.environments.answer_parsers import Answer
from telescope.environments.base import ToolSchema, Turn
from telescope.environments.chat import ChatError, Recording
from telescope.environments.validate import find_message_mistake
from telescope.maths.support import Support
from telescope.records import FinishReason, Sampling

CAUSE_CHARACTERS = 500
"""Of a refusal, as many are told."""
UNLIMITED = 1 << 30
"""Tokens left in a context whose size nobody tells."""
CONNECT_S = 30.0


class RemoteFailed(ChatError):
    """The server did not answer, or not with an answer."""


class ChatCompletions:
    """The client of one worker. `timeout_s`: of one answer. Raises `SecretMissing`."""

    def __init__(self, server: RemoteServer, timeout_s: float) -> None:
        self._server = server
        key: str | None = reveal(server.api_key)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        self._client = httpx.AsyncClient(
            headers=headers, timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)), limits=limits
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling) -> tuple[str, FinishReason, int, int]:
        """(text, why it ended, prompt tokens, completion tokens); 0 tokens where the server does not count them. Raises
        `RemoteFailed`."""
        url = f"{self._server.url.rstrip('/')}/chat/completions"
        body: dict[str, Any] = {
            "model": self._server.model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
        }
        whole = Support()
        if sampling.top_p != whole.top_p:
            body["top_p"] = sampling.top_p
        if self._server.send_seed:
            body["seed"] = sampling.seed % (1 << 31)
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        try:
            answer = await self._client.post(url, json=body)
        except httpx.HTTPError as error:
            raise RemoteFailed(f"{url}: {str(error) or type(error).__name__}") from error
        if answer.status_code != httpx.codes.OK:
            raise RemoteFailed(f"{url} answered {answer.status_code}: {answer.text[:CAUSE_CHARACTERS]}")
        return _read(url, answer)


def _read(url: str, answer: httpx.Response) -> tuple[str, FinishReason, int, int]:
    try:
        body = answer.json()
        choice, usage = body["choices"][0], body.get("usage") or {}
        text, reason = choice["message"].get("content") or "", choice.get("finish_reason")
        prompt, completion = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise RemoteFailed(f"{url}: its answer is not a chat completion: {answer.text[:CAUSE_CHARACTERS]}") from error
    if not isinstance(text, str):
        raise RemoteFailed(f"{url}: the content of its answer is not text: {answer.text[:CAUSE_CHARACTERS]}")
    return text, "length" if reason == "length" else "stop", prompt, completion


MakeSampling = Callable[[int, int | None], Sampling]
"""(turn, lower limit of this answer) -> how it is sampled."""


class _TextRecord:
    """What all dialogues of a rollout share."""

    def __init__(self, server: ChatCompletions, make_sampling: MakeSampling, closed: Callable[[], None]) -> None:
        self.server, self.make_sampling, self.tell_closed = server, make_sampling, closed
        self.asked = self.answers = self.completion_tokens = self.asking = 0
        self.opening_text, self.prompt_tokens = "", 0
        self.last: TextDialogue | None = None
        self.closed, self.generated_ns = False, 0
        self.failure: BaseException | None = None


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
        if record.closed:
            raise RuntimeError("say was called after close: the lane to generate in has been given away")
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
            text, reason, prompt, completion = await record.server.ask([*self._history, *added], sampling)
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
    """The `Chat` that an environment is given; `recording` and `failure` as of `TokenChat`."""

    def __init__(self, server: ChatCompletions, make_sampling: MakeSampling, closed: Callable[[], None] = lambda: None) -> None:
        super().__init__(_TextRecord(server, make_sampling, closed))
        self._dialogues: list[TextDialogue] = [self]

    @property
    def failure(self) -> BaseException | None:
        return self._record.failure

    def dialogue(self) -> TextDialogue:
        """Another line of messages in this rollout."""
        if self._record.closed:
            raise RuntimeError("dialogue was called after close: the lane to generate in has been given away")
        other = TextDialogue(self._record, forgives_cancelling=True)
        self._dialogues.append(other)
        return other

    def close(self) -> None:
        """See `Chat`; a second call is none."""
        if self._record.asking:
            raise RuntimeError("close was called while the policy was still answering")
        if not self._record.closed:
            self._record.closed = True
            self._record.tell_closed()

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
