"""The dialogues behind an OpenAI-compatible address: each request brings its whole conversation, and goes on in the dialogue
that holds the beginning of it, or begins another.

    POST <base_url>/chat/completions ─▶ longest dialogue whose messages begin the conversation ─▶ say(the rest)
                                        └ none, or it is answering already ─▶ chat.dialogue(): a new branch

What an agent sends back of an answer is what it was given (text and calls read out of it); what stands in the dialogue is the
policy's own text. So the next prompt goes on from the exact tokens. Owns one secret address a rollout. Refuses HTTP
(http_server.py) and OpenAI's shapes (chat_completions.py).
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from telescope.environments.base import Chat, Dialogue
from telescope.environments.chat import ChatError, PromptTooLong
from telescope.environments.failures import ContextFull
from telescope.environments.proxy import chat_completions
from telescope.environments.proxy.chat_completions import ChatAnswer, ChatRefused, ChatRequest, Message
from telescope.environments.proxy.http_server import HttpRequest, HttpResponse, HttpServer
from telescope.environments.template import TemplateError
from telescope.environments.tools.call_parsers import CallFormat, ParsedCall, is_deeper_than, parse_calls

log = logging.getLogger(__name__)

OVER = "there is no rollout at this address: it may be over"


@dataclass
class _Conversation:
    """A dialogue with the messages that the agent knows of it, in a form that can be compared."""

    dialogue: Dialogue
    tools: bytes
    known: list[bytes] = field(default_factory=list)
    busy: bool = False
    unseen: bool = False
    """The dialogue holds an answer that the agent has not been given: where its client left as it came, nothing goes on."""


class Session:
    """One rollout's address. `failed` is set with the first error that the agent cannot help; it is answered no more then."""

    def __init__(
        self, chat: Chat, *, call_format: CallFormat, max_requests: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._chat, self._call_format, self._max_requests = chat, call_format, max_requests
        self._lines: list[_Conversation] = []
        self._own: dict[bytes, str] = {}
        self._answering: dict[asyncio.Task[str], bytes] = {}
        self._given_up: set[bytes] = set()
        self._clock, self._waited, self._since = clock, 0.0, 0.0
        self._closed = False
        self.requests = 0
        self.overlong = False
        """Whether a conversation was refused because it left no room for an answer."""
        self.failure: Exception | None = None
        self.failed = asyncio.Event()

    @property
    def given_up(self) -> bool:
        """Whether the agent left a question, or ended with it, before the answer was there, and had it answered by no other
        try."""
        return bool(self._given_up)

    def waited_s(self) -> float:
        """Seconds in which the policy owed one answer or several: they are not the agent's."""
        return self._waited + (self._clock() - self._since if self._answering else 0.0)

    async def close(self) -> None:
        """Answer nothing any more. What is being answered is given up, and leaves no trace in the rollout."""
        self._closed = True
        self._given_up.update(self._answering.values())
        for task in tuple(self._answering):
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    async def complete(self, request: ChatRequest) -> ChatAnswer:
        """The policy's next message. Raises `ChatRefused`."""
        if self._closed or self.failure is not None:
            raise ChatRefused(410, f"this rollout is over: {self.failure or 'its time or its program has ended'}")
        if self.requests >= self._max_requests:
            raise ChatRefused(429, f"max_requests={self._max_requests} of this rollout are spent", code="max_requests")
        self.requests += 1
        line, begun = self._find_conversation(request)
        turns = self._list_turns(request.messages, begun)
        asked = orjson.dumps([request.tools, *(_fingerprint(message).decode() for message in request.messages)])
        task = asyncio.create_task(_say(line, turns, request))
        self._mark_begun(line, task, asked)
        try:
            text = await task
        except (PromptTooLong, ContextFull) as error:
            self.overlong = True
            raise ChatRefused(400, str(error), param="messages", code="context_length_exceeded") from error
        except (ChatError, TemplateError) as error:
            self.failure = self.failure or error
            self.failed.set()
            raise ChatRefused(500, f"the policy could not answer: {error}") from error
        except asyncio.CancelledError:
            self._mark_left(line, task, asked)
            if self._closed:
                raise ChatRefused(410, "this rollout is over") from None
            raise
        finally:
            if task.done():
                self._mark_ended(line, task)
        self._given_up.discard(asked)
        return self._make_answer(line, request, text)

    def _mark_begun(self, line: _Conversation, task: asyncio.Task[str], asked: bytes) -> None:
        if not self._answering:
            self._since = self._clock()
        self._answering[task] = asked
        line.busy = True

    def _mark_left(self, line: _Conversation, task: asyncio.Task[str], asked: bytes) -> None:
        """The client has gone. The line is free once its task has ended: a policy that is being cancelled still holds it."""
        self._given_up.add(asked)
        task.cancel()
        task.add_done_callback(functools.partial(self._mark_ended, line))

    def _mark_ended(self, line: _Conversation, task: asyncio.Task[str]) -> None:
        line.busy = False
        if self._answering.pop(task, None) is not None and not self._answering:
            self._waited += self._clock() - self._since

    def _find_conversation(self, request: ChatRequest) -> tuple[_Conversation, int]:
        """Where the conversation goes on, and how many of its messages are there already."""
        tools, asked = orjson.dumps(request.tools), [_fingerprint(message) for message in request.messages]
        begun = [
            line
            for line in self._lines
            if not (line.busy or line.unseen)
            and line.tools == tools
            and len(line.known) < len(asked)
            and line.known == asked[: len(line.known)]
            and request.messages[len(line.known)]["role"] != "assistant"
        ]
        if begun:
            best = max(begun, key=lambda line: len(line.known))
            return best, len(best.known)
        return _Conversation(self._chat.dialogue(), tools), 0

    def _list_turns(self, messages: Sequence[Message], begun: int) -> list[Mapping[str, Any]]:
        """What is to be said. In front the last answer as the agent has it, where that had calls: some templates take a tool's
        result only behind a call that is spelled out. In a new dialogue the policy's earlier answers stand as it wrote them."""
        turns: list[Mapping[str, Any]] = []
        if begun and messages[begun - 1].get("tool_calls"):
            turns.append(_prepare_for_template(messages[begun - 1]))
        for message in messages[begun:]:
            own = self._own.get(_fingerprint(message)) if message["role"] == "assistant" else None
            turns.append({"role": "assistant", "content": own} if own is not None else _prepare_for_template(message))
        return turns

    def _make_answer(self, line: _Conversation, request: ChatRequest, text: str) -> ChatAnswer:
        content, calls = text, tuple[Message, ...]()
        if request.tools:
            parsed = parse_calls(text, self._call_format)
            found = tuple(_write_call(call) for call in parsed.calls if isinstance(call, ParsedCall))
            if found and len(found) == len(parsed.calls):  # a call gone wrong stays text: the agent sees what was written
                content, calls = parsed.text, found
        cut = line.dialogue.truncated
        answer = ChatAnswer(
            content=content,
            calls=calls,
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
            prompt_tokens=line.dialogue.last_prompt_tokens,
            completion_tokens=line.dialogue.last_answer_tokens,
        )
        said, line.unseen = _fingerprint(answer.message()), False
        self._own[said] = text
        line.known = [*map(_fingerprint, request.messages), said]
        if line not in self._lines:
            self._lines.append(line)
        return answer


class Proxy:
    """The server of a worker process: `open` gives a rollout its address."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._server: HttpServer | None = None
        self._common = secrets.token_urlsafe(24)

    async def start(self) -> None:
        """Listen. Raises OSError where no port can be had."""
        self._server = await HttpServer.start(self._answer, self._turn_away)

    async def close(self) -> None:
        for session in tuple(self._sessions.values()):
            await session.close()
        self._sessions.clear()
        if self._server is not None:
            await self._server.close()
            self._server = None

    def open(self, chat: Chat, *, call_format: CallFormat = "json", max_requests: int = 1000) -> tuple[str, Session]:
        """The `base_url` of a rollout, which nobody else can guess, and its session."""
        if self._server is None:
            raise RuntimeError("the proxy does not listen: start it in the environment's set_up")
        secret = secrets.token_urlsafe(24)
        session = self._sessions[secret] = Session(chat, call_format=call_format, max_requests=max_requests)
        return f"http://127.0.0.1:{self._server.port}/{secret}/v1", session

    def open_by_model(
        self, chat: Chat, *, call_format: CallFormat = "json", max_requests: int = 1000
    ) -> tuple[str, str, Session]:
        """The same for agents that keep a client for every address: one `base_url` for all rollouts, and the name of the model
        by which this rollout's requests are known."""
        base_url, session = self.open(chat, call_format=call_format, max_requests=max_requests)
        before, secret, after = base_url.rsplit("/", 2)
        return f"{before}/{self._common}/{after}", secret, session

    async def shut(self, session: Session) -> None:
        """The rollout is over: its address leads nowhere."""
        self._sessions = {secret: other for secret, other in self._sessions.items() if other is not session}
        await session.close()

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        try:
            return await self._route(request)
        except ChatRefused as refused:
            return chat_completions.write_error(refused)
        except Exception as error:  # the agent gets a sentence, and its connection lives on
            log.exception("a request of an agent program failed")
            return chat_completions.write_error(ChatRefused(500, f"{type(error).__name__}: {error}"))

    def _turn_away(self, path: str) -> HttpResponse | None:
        secret, _ = _split_path(path)
        if secret == self._common or secret in self._sessions:
            return None
        return chat_completions.write_error(ChatRefused(404, OVER))

    async def _route(self, request: HttpRequest) -> HttpResponse:
        secret, route = _split_path(request.path)
        match request.method, route:
            case "POST", "v1/chat/completions":
                asked = chat_completions.read_request(request.body)
                common = secret == self._common
                session = self._sessions.get(asked.model if common else secret)
                if session is None and common:
                    raise ChatRefused(404, f"there is no rollout of the model {asked.model!r}: it may be over", param="model")
                if session is None:  # it ended while the request came
                    raise ChatRefused(404, OVER)
                answer = await session.complete(asked)
                number = secrets.token_hex(8)
                if asked.stream:
                    return chat_completions.write_stream(answer, number, include_usage=asked.include_usage)
                return chat_completions.write_completion(answer, number)
            case "GET", "v1/models":
                return chat_completions.write_models()
            case _:
                raise ChatRefused(404, f"{request.method} /{route} is not served: chat/completions and models are")


def _split_path(path: str) -> tuple[str, str]:
    """The secret and the route behind it."""
    secret, _, route = path.partition("?")[0].strip("/").partition("/")
    return secret, route


async def _say(line: _Conversation, turns: Sequence[Mapping[str, Any]], request: ChatRequest) -> str:
    """Notes that the answer came: a task cancelled in its last step counts as cancelled, though its dialogue has grown."""
    text = await line.dialogue.say(*turns, tools=request.tools, max_tokens=request.max_tokens)
    line.unseen = True
    return text


def _fingerprint(message: Message) -> bytes:
    """What of a message tells it from others: agents send answers back with fields dropped, added and in another order."""
    calls = [
        (call["id"], call["function"]["name"], _read_arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    content = message.get("content") or ""
    said = content.strip() if message["role"] == "assistant" else content
    return orjson.dumps([message["role"], said, message.get("tool_call_id"), calls], option=orjson.OPT_SORT_KEYS)


def _read_arguments(arguments: Any) -> Any:
    """Arguments as values: OpenAI's interface carries them as JSON text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        read = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return arguments if is_deeper_than(read) else read


def _prepare_for_template(message: Message) -> Mapping[str, Any]:
    """Templates write arguments as JSON themselves."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _read_arguments(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _write_call(call: ParsedCall) -> Message:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False, separators=(",", ":"))}
    return {"id": f"call_{secrets.token_hex(5)[:9]}", "type": "function", "function": function}
