"""OpenAI's shapes of chat completions: requests read and checked, answers and errors written.

Owns what of the interface is taken. What would change how tokens are drawn (`temperature`, `top_p`, `seed`) is the run's and is
passed over; what would need something else of the policy (`n`, `stop`, `response_format`, a forced tool) is refused with the
remedy, so that no agent trains on what it did not get.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from telescope.environments.proxy.http_server import HttpResponse
from telescope.environments.tools.call_parsers import MAX_DEPTH, is_deeper_than

MODEL = "policy"
"""The one model there is; any name is answered by it."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
FinishReason = Literal["stop", "length", "tool_calls"]
Message = dict[str, Any]


class ChatRefused(Exception):
    """The request gets an error of this status instead of an answer."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class ChatRequest:
    messages: tuple[Message, ...]
    """With texts as plain strings, `developer` as `system`, and the arguments of calls as they came."""
    tools: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    stream: bool
    include_usage: bool
    model: str = MODEL


@dataclass(frozen=True)
class ChatAnswer:
    content: str
    calls: tuple[Message, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int

    def message(self) -> Message:
        """As it stands in a response, and as an agent is expected to send it back."""
        said: Message = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        return {**said, "tool_calls": list(self.calls)} if self.calls else said


def read_request(body: bytes) -> ChatRequest:
    """Raises `ChatRefused`."""
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ChatRefused(400, f"the body is not JSON: {error}") from error
    if not isinstance(asked, dict):
        raise ChatRefused(400, "the body is not a JSON object")
    if is_deeper_than(asked):
        raise ChatRefused(400, f"the body is nested more than {MAX_DEPTH} deep")
    _refuse_unsupported(asked)
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ChatRefused(400, "messages must be a list with at least one message", param="messages")
    options = asked.get("stream_options")
    return ChatRequest(
        messages=tuple(_read_message(message, f"messages[{at}]") for at, message in enumerate(messages)),
        tools=_read_tools(asked),
        max_tokens=_read_max_tokens(asked),
        stream=asked.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        model=str(asked.get("model", MODEL)),
    )


def _refuse_unsupported(asked: Mapping[str, Any]) -> None:
    if asked.get("n") not in (None, 1):
        raise ChatRefused(400, "n: one answer at a time; send the request again for another", param="n")
    if asked.get("stop"):
        raise ChatRefused(400, "stop: texts that end an answer are the run's: set rollout.stop", param="stop")
    form = asked.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise ChatRefused(400, "response_format: the policy writes text, whatever it is asked for", param="response_format")
    if asked.get("functions"):
        raise ChatRefused(400, "functions: give tools instead", param="functions")
    if asked.get("tool_choice") not in (None, "auto", "none"):
        raise ChatRefused(400, "tool_choice: the policy is free to call a tool or not; give auto or none", param="tool_choice")
    if asked.get("logprobs"):
        raise ChatRefused(400, "logprobs: they are kept for training and not given out", param="logprobs")


def _read_tools(asked: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = asked.get("tools") or []
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise ChatRefused(400, 'tools must be a list of {"type": "function", "function": {"name": …, …}}', param="tools")
    return () if asked.get("tool_choice") == "none" else tuple(tools)


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _read_max_tokens(asked: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        given = asked.get(name)
        if given is None:
            continue
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise ChatRefused(400, f"{name}={given!r} must be a whole number above 0", param=name)
        return given
    return None


def _read_message(message: Any, place: str) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise ChatRefused(400, f"{place} has the role {role!r}; known are {', '.join(ROLES)}", param=place)
    read: Message = {"role": ROLES[role], "content": _read_text(message.get("content"), place)}
    if message.get("tool_call_id") is not None:
        read["tool_call_id"] = str(message["tool_call_id"])
    if message.get("name") is not None and role != "assistant":
        read["name"] = str(message["name"])
    if message.get("tool_calls"):
        read["tool_calls"] = [
            _read_call(call, f"{place}.tool_calls") for call in _check_list(message["tool_calls"], f"{place}.tool_calls")
        ]
    return read


def _read_text(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = _check_list(content, f"{place}.content")
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise ChatRefused(400, f"{place}.content: only text can be put to the policy", param=place)
    return "".join(part["text"] for part in parts)


def _read_call(call: Any, place: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatRefused(400, f"{place}: a call needs a function with a name", param=place)
    arguments = {"name": function["name"], "arguments": function.get("arguments") or "{}"}
    return {"id": str(call.get("id", "")), "type": "function", "function": arguments}


def _check_list(value: Any, place: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ChatRefused(400, f"{place} must be a list", param=place)
    return value


def write_completion(answer: ChatAnswer, request_id: str) -> HttpResponse:
    """A `chat.completion`."""
    choice = {"index": 0, "message": answer.message(), "finish_reason": answer.finish_reason, "logprobs": None}
    return _write_json(200, {**_make_head(request_id, "chat.completion"), "choices": [choice], "usage": _count_usage(answer)})


def write_stream(answer: ChatAnswer, request_id: str, *, include_usage: bool) -> HttpResponse:
    """The same as server-sent events. The answer is there before its first event: only what is whole is trained."""
    head = _make_head(request_id, "chat.completion.chunk")
    calls = [{"index": at, **call} for at, call in enumerate(answer.calls)]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": answer.content}]
    deltas += [{"tool_calls": calls}] if calls else []
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]})
    if include_usage:
        chunks.append({**head, "choices": [], "usage": _count_usage(answer)})
    lines = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
    return HttpResponse(200, b"".join([*lines, b"data: [DONE]\n\n"]), "text/event-stream")


def write_models() -> HttpResponse:
    return _write_json(
        200, {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "telescope"}]}
    )


def write_error(refused: ChatRefused) -> HttpResponse:
    """In OpenAI's shape. No SDK should try again: what is refused here is refused the next time too."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    shape = {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}
    response = _write_json(refused.status, {"error": shape})
    return HttpResponse(response.status, response.body, headers=(("x-should-retry", "false"),))


def _make_head(request_id: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{request_id}", "object": kind, "created": int(time.time()), "model": MODEL}


def _count_usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _write_json(status: int, body: Mapping[str, Any]) -> HttpResponse:
    return HttpResponse(status, orjson.dumps(body))
