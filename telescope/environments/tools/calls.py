"""Tool calls in the text of an answer.

Owns how a call is written and what is a call gone wrong; refuses to know tools. Answers are hostile input: each reader passes
over the text a fixed number of times, nothing is evaluated, and nesting is limited. A text that was meant as a call but is none
comes back as `Malformed`, so that it is never taken for a final answer.

    json       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      the default (Qwen 2.5 and 3, Hermes)
    function   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>  (Qwen 3 Coder; tags may be missing)
    python     <tool_call>add(a=1)</tool_call>, or an answer that is nothing but [add(a=1)] (Llama 4, LFM)
    bare       {"name": "add", "parameters": {"a": 1}} or a list of these, nothing else (Llama 3, Mistral)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from telescope.environments.tools.depth import MAX_DEPTH, deeper_than
from telescope.environments.tools.literals import BadLiteral, read_calls

CallFormat = Literal["json", "function", "python", "bare"]

MAX_SHOWN = 200
_BARE_MARKS = ("<|python_tag|>", "[TOOL_CALLS]")


@dataclass(frozen=True)
class Call:
    """One call as it was written. `textual`: the arguments are plain texts that the tool's parameters give a type."""

    name: str
    arguments: Mapping[str, Any]
    textual: bool = False


@dataclass(frozen=True)
class Malformed:
    """Something that was meant to be a call. `reason` is a sentence for the policy."""

    text: str
    reason: str


@dataclass(frozen=True)
class Parsed:
    """An answer taken apart: what it says beside its calls, and the calls in their order."""

    text: str
    calls: tuple[Call | Malformed, ...] = ()


@dataclass
class _Found:
    said: list[str] = field(default_factory=list)
    calls: list[Call | Malformed] = field(default_factory=list)

    def parsed(self) -> Parsed:
        return Parsed("".join(self.said).strip(), tuple(self.calls))


def parse_calls(answer: str, form: CallFormat = "json", tag: str = "tool_call") -> Parsed:
    """Calls of an answer, with its thought taken off first. Never raises."""
    text = without_thought(answer)
    if form == "bare":
        return _bare(text)
    found = _Found()
    if form == "python" and text.strip().startswith("[") and text.strip().endswith("]"):
        found.calls.extend(_python_body(text.strip()))
        return found.parsed()
    if form == "function" and f"<{tag}>" not in text:
        for kind, piece in _blocks(text, "<function=", "</function>", keep=True):
            _take(found, kind, piece, _function_body, "<function=name>")
        return found.parsed()
    body = {"json": _json_body, "function": _function_bodies, "python": _python_body}[form]
    for kind, piece in _blocks(text, f"<{tag}>", f"</{tag}>"):
        _take(found, kind, piece, body, f"<{tag}>")
    if not found.calls and form == "json" and _looks_like_a_call(text):
        found.calls.append(Malformed(_shown(text), f"a call must stand between <{tag}> and </{tag}>"))
        found.said.clear()
    return found.parsed()


def without_thought(answer: str) -> str:
    """The answer behind its thought: `<think>…</think>` at its start, or all up to `</think>` where the prompt opened it.

    A thought that never ends is all thought: "".
    """
    opened = answer.lstrip().startswith("<think>")
    end = answer.find("</think>")
    if end >= 0 and (opened or "<think>" not in answer[:end]):
        return answer[end + len("</think>") :]
    return "" if opened else answer


def how_to_call(form: CallFormat, tag: str = "tool_call") -> str:
    """The format in words, for a listing of tools in a system text and for error messages."""
    example = {
        "json": f'<{tag}>{{"name": "tool_name", "arguments": {{"parameter": "value"}}}}</{tag}>',
        "function": f"<{tag}><function=tool_name><parameter=parameter>value</parameter></function></{tag}>",
        "python": f'<{tag}>tool_name(parameter="value")</{tag}>',
        "bare": '{"name": "tool_name", "parameters": {"parameter": "value"}}',
    }[form]
    return f"write {example}"


def _take(found: _Found, kind: str, piece: str, body: Callable[[str], Iterator[Call | Malformed]], opening: str) -> None:
    match kind:
        case "said":
            found.said.append(piece)
        case "inside":
            found.calls.extend(body(piece))
        case "unclosed":
            found.calls.append(Malformed(_shown(piece), f"{opening} is opened and never closed"))
        case _:
            found.calls.append(Malformed(_shown(piece), f"{opening} is closed but was never opened"))


def _blocks(text: str, opening: str, closing: str, *, keep: bool = False) -> Iterator[tuple[str, str]]:
    """("said" | "inside" | "unclosed" | "stray", piece) in order; one pass. `keep`: the opening belongs to what is inside."""
    at, start, end = 0, -2, -2  # a mark that is not there is looked for once: -1 stays
    while at < len(text):
        start = text.find(opening, at) if start != -1 and start < at else start
        end = text.find(closing, at) if end != -1 and end < at else end
        if end >= 0 and (start < 0 or end < start):
            yield "said", text[at:end]
            yield "stray", closing
            at = end + len(closing)
            continue
        if start < 0:
            yield "said", text[at:]
            return
        yield "said", text[at:start]
        inner = start + len(opening)
        if end < 0:
            yield "unclosed", text[start:]
            return
        yield "inside", text[start if keep else inner : end]
        at = end + len(closing)


def _json_body(body: str) -> Iterator[Call | Malformed]:
    try:
        read = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        yield Malformed(_shown(body), f"this is no JSON: {error}")
        return
    yield _from_json(read, body)


def _from_json(read: Any, body: str) -> Call | Malformed:
    if not isinstance(read, dict):
        return Malformed(_shown(body), "a call is a JSON object with a name and arguments")
    name = read.get("name")
    if not isinstance(name, str) or not name:
        return Malformed(_shown(body), 'a call needs "name", the tool to be called')
    arguments = read.get("arguments", read.get("parameters", {}))
    if isinstance(arguments, str):  # the OpenAI API sends arguments as a JSON text, and models have seen it
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return Malformed(_shown(body), '"arguments" must be a JSON object')
    if not isinstance(arguments, dict):
        return Malformed(_shown(body), '"arguments" must be a JSON object')
    if deeper_than(arguments):
        return Malformed(_shown(body), f'"arguments" are nested more than {MAX_DEPTH} deep')
    return Call(name, arguments)


def _function_bodies(body: str) -> Iterator[Call | Malformed]:
    any_call = False
    for kind, piece in _blocks(body, "<function=", "</function>", keep=True):
        if kind == "inside":
            any_call = True
            yield from _function_body(piece)
        elif kind != "said":
            any_call = True
            yield Malformed(_shown(piece), "<function=name> and </function> must come in pairs")
    if not any_call:
        yield Malformed(_shown(body), "a call is <function=name>, its parameters, </function>")


def _function_body(body: str) -> Iterator[Call | Malformed]:
    """`<function=name><parameter=x>…</parameter>…`, without the closing tag."""
    name, closed, rest = body.removeprefix("<function=").partition(">")
    if not closed or not name.strip():
        yield Malformed(_shown(body), "<function=name> needs a name")
        return
    arguments: dict[str, str] = {}
    for kind, piece in _blocks(rest, "<parameter=", "</parameter>"):
        if kind == "said" and not piece.strip():
            continue
        key, ended, value = piece.partition(">")
        if kind != "inside" or not ended or not key.strip():
            yield Malformed(_shown(body), "between <function=name> and </function> stand <parameter=name>value</parameter>")
            return
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    yield Call(name.strip(), arguments, textual=True)


def _python_body(body: str) -> Iterator[Call | Malformed]:
    try:
        calls = read_calls(body)
    except BadLiteral as error:
        yield Malformed(_shown(body), f"this is no call: {error}")
        return
    yield from (Call(name, arguments) for name, arguments in calls)


def _bare(text: str) -> Parsed:
    """The whole answer is one JSON object, a list of them, or objects divided by semicolons; a mark may come first."""
    body, marked = text.strip(), False
    for mark in _BARE_MARKS:
        if mark in body:
            _, _, body = body.partition(mark)
            marked = True
    body = body.strip()
    if not marked and not _looks_like_a_call(body):
        return Parsed(text.strip())
    try:
        read = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return Parsed("", (Malformed(_shown(body), f"this is no JSON: {error}"),))
    each = read if isinstance(read, list) and read else [read]
    return Parsed("", tuple(_from_json(one, body) for one in each))


def _looks_like_a_call(text: str) -> bool:
    """Whether a text is, from its first to its last character, an object or list that names a tool and gives arguments."""
    body = text.strip()
    return (
        body[:1] in ("{", "[")
        and body[-1:] in ("}", "]")
        and '"name"' in body
        and ('"arguments"' in body or '"parameters"' in body)
    )


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"
