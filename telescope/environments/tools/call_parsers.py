"""Tool calls in the text of an answer.

Owns how a call is written and what is a call gone wrong; refuses to know tools. Answers are hostile input: each reader passes
over the text a fixed number of times, nothing is evaluated (a call written as Python holds literals only), and nesting is
limited: neither an answer of brackets nor one of minus signs can exhaust the stack. A text that was meant as a call but is not
one comes back as `MalformedCall`, so that it is never taken for a final answer.

    json       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      the default (Qwen 2.5 and 3, Hermes)
    function   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>  (Qwen 3 Coder; tags may be missing)
    python     <tool_call>add(a=1)</tool_call>, an answer that is nothing but [add(a=1)], or the same between
               <|python_start|>…<|python_end|> (Llama 4) or <|tool_call_start|>…<|tool_call_end|> (LFM)
    bare       {"name": "add", "parameters": {"a": 1}}, several divided by ";" or in a list, behind <|python_tag|> or not
               (Llama 3); [TOOL_CALLS] and a list of these, or [TOOL_CALLS]add[ARGS]{"a": 1} (Mistral)
    harmony    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|> (gpt-oss)

An answer without a call of its format that holds the mark of another one is a call gone wrong, too.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from telescope.environments.answer_parsers import HARMONY_TO, is_analysis, split_channels, strip_thought

CallFormat = Literal["json", "function", "python", "bare", "harmony"]

MAX_DEPTH = 64
"""Of what a policy writes into a call, and of what an agent program sends."""
MAX_SHOWN = 200
_PYTHON_MARKS = (("<|python_start|>", "<|python_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>"))
_MISTRAL_MARK = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]{1,256})\s*(?:\[CALL_ID\][^\s\[\]{}]{0,256}\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_MARKS = (
    "<|python_tag|>", "<|python_start|>", "<|tool_call_start|>", "[TOOL_CALLS]", "<tool_call>", "<|tool_call|>", "<tool_calls>",
    "<|tool_calls|>", "<|tool_call:begin|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<TOOLCALL>",
    "<|START_ACTION|>", "<|tool_call>", "<minimax:tool_call>", "<seed:tool_call>", "<|channel|>commentary to=",
    "<|function_call|>", "<|tools_prefix|>",
)  # fmt: skip
"""With what models begin calls, in the formats read here and in others."""
_CALL_KEYS = {"name", "arguments", "parameters", "id", "type"}
_OPENS_A_CALL = re.compile(r'\{\s*"(?:name|arguments|parameters|id|type|function|tool_calls)"')
_OPENS_AN_OBJECT = re.compile(r'\{\s*"')
MAX_UNCLOSED = 16
"""Braces that never close behind which a call is still looked for."""
_DIVIDED = re.compile(r"[\s,;]*")
_ANY_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*("?)|[\[{]|[\]}]', re.DOTALL)
MAX_LITERAL_DEPTH = 32
MAX_NUMBER_CHARACTERS = 64
_SPACE = re.compile(r"[\s;]*")
_ONLY_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*)?\.?\d[\d_]*(?:[eE][+-]?\d+)?")
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'', re.DOTALL)
_LONG_TEXT = re.compile(r'"""(?:[^"\\]|\\.|"(?!""))*"""|\'\'\'(?:[^\'\\]|\\.|\'(?!\'\'))*\'\'\'', re.DOTALL)
_ESCAPE_OR_BREAK = re.compile(r"\\(?:\r\n|.)|\r\n|\r|\n", re.DOTALL)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


@dataclass(frozen=True)
class ParsedCall:
    """One call as it was written. `textual`: the arguments are plain texts that the tool's parameters give a type."""

    name: str
    arguments: Mapping[str, Any]
    textual: bool = False


@dataclass(frozen=True)
class MalformedCall:
    """Something that was meant to be a call. `reason` is a sentence for the policy."""

    text: str
    reason: str


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer taken apart: what it says beside its calls, and the calls in their order."""

    text: str
    calls: tuple[ParsedCall | MalformedCall, ...] = ()


@dataclass
class _Found:
    said: list[str] = field(default_factory=list)
    calls: list[ParsedCall | MalformedCall] = field(default_factory=list)

    def parsed(self) -> ParsedAnswer:
        return ParsedAnswer("".join(self.said).strip(), tuple(self.calls))


def parse_calls(answer: str, form: CallFormat = "json", tag: str = "tool_call") -> ParsedAnswer:
    """Calls of an answer, with its thought taken off first. Never raises."""
    text = strip_thought(answer, channels=form != "harmony")
    parsed = _read_format(text, form, tag)
    if not parsed.calls and (mark := _ANY_MARK.search(text)):
        reason = f"{mark[0]} begins a call, and none could be read"
        return ParsedAnswer("", (MalformedCall(_shorten(text[mark.start() :]), reason),))
    return parsed


def _read_format(text: str, form: CallFormat, tag: str) -> ParsedAnswer:
    if form == "bare":
        return _read_mistral(text) if _MISTRAL_MARK in text else _read_bare(text)
    if form == "harmony":
        return _read_harmony(text)
    found = _Found()
    if form == "python":
        for opening, closing in _PYTHON_MARKS:
            if opening in text:
                return _read_python_marks(text, opening, closing)
        if text.strip().startswith("[") and text.strip().endswith("]"):
            found.calls.extend(_read_python_body(text.strip()))
            return found.parsed()
    if form == "function" and f"<{tag}>" not in text:
        for kind, piece in _split_blocks(text, "<function=", "</function>", keep=True):
            _take(found, kind, piece, _read_function_body, "<function=name>")
        return found.parsed()
    bodies = {"json": _read_json_body, "function": _read_function_bodies, "python": _read_python_body}
    for kind, piece in _split_blocks(text, f"<{tag}>", f"</{tag}>"):
        _take(found, kind, piece, bodies[form], f"<{tag}>")
    if not found.calls and form == "json" and _looks_like_a_call(text):
        found.calls.append(MalformedCall(_shorten(text), f"a call must stand between <{tag}> and </{tag}>"))
        found.said.clear()
    return found.parsed()


def explain_format(form: CallFormat, tag: str = "tool_call") -> str:
    """The format in words, for a listing of tools in a system text and for error messages."""
    example = {
        "json": f'<{tag}>{{"name": "tool_name", "arguments": {{"parameter": "value"}}}}</{tag}>',
        "function": f"<{tag}><function=tool_name><parameter=parameter>value</parameter></function></{tag}>",
        "python": f'<{tag}>tool_name(parameter="value")</{tag}>',
        "bare": '{"name": "tool_name", "parameters": {"parameter": "value"}}',
        "harmony": '<|channel|>commentary to=functions.tool_name <|constrain|>json<|message|>{"parameter": "value"}<|call|>',
    }[form]
    return f"write {example}"


def _take(
    found: _Found, kind: str, piece: str, body: Callable[[str], Iterator[ParsedCall | MalformedCall]], opening: str
) -> None:
    match kind:
        case "said":
            found.said.append(piece)
        case "inside":
            found.calls.extend(body(piece))
        case "unclosed":
            found.calls.append(MalformedCall(_shorten(piece), f"{opening} is opened and never closed"))
        case _:
            found.calls.append(MalformedCall(_shorten(piece), f"{opening} is closed but was never opened"))


def _split_blocks(text: str, opening: str, closing: str, *, keep: bool = False) -> Iterator[tuple[str, str]]:
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


def _read_json_body(body: str) -> Iterator[ParsedCall | MalformedCall]:
    try:
        read = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        yield MalformedCall(_shorten(body), f"this is not JSON: {error}")
        return
    yield _read_call(read, body)


def _read_call(read: Any, body: str) -> ParsedCall | MalformedCall:
    if not isinstance(read, dict):
        return MalformedCall(_shorten(body), "a call is a JSON object with a name and arguments")
    name = read.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall(_shorten(body), 'a call needs "name", the tool to be called')
    arguments = read.get("arguments", read.get("parameters", {}))
    if isinstance(arguments, str):  # the OpenAI API sends arguments as a JSON text, and models have seen it
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return MalformedCall(_shorten(body), '"arguments" must be a JSON object')
    if not isinstance(arguments, dict):
        return MalformedCall(_shorten(body), '"arguments" must be a JSON object')
    if is_deeper_than(arguments):
        return MalformedCall(_shorten(body), f'"arguments" are nested more than {MAX_DEPTH} deep')
    return ParsedCall(name, arguments)


def _read_function_bodies(body: str) -> Iterator[ParsedCall | MalformedCall]:
    any_call = False
    for kind, piece in _split_blocks(body, "<function=", "</function>", keep=True):
        if kind == "inside":
            any_call = True
            yield from _read_function_body(piece)
        elif kind != "said":
            any_call = True
            yield MalformedCall(_shorten(piece), "<function=name> and </function> must come in pairs")
    if not any_call:
        yield MalformedCall(_shorten(body), "a call is <function=name>, its parameters, </function>")


def _read_function_body(body: str) -> Iterator[ParsedCall | MalformedCall]:
    """`<function=name><parameter=x>…</parameter>…`, without the closing tag."""
    name, closed, rest = body.removeprefix("<function=").partition(">")
    if not closed or not name.strip():
        yield MalformedCall(_shorten(body), "<function=name> needs a name")
        return
    arguments: dict[str, str] = {}
    for kind, piece in _split_blocks(rest, "<parameter=", "</parameter>"):
        if kind == "said" and not piece.strip():
            continue
        key, ended, value = piece.partition(">")
        if kind != "inside" or not ended or not key.strip():
            yield MalformedCall(
                _shorten(body), "between <function=name> and </function> stand <parameter=name>value</parameter>"
            )
            return
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    yield ParsedCall(name.strip(), arguments, textual=True)


def _read_python_body(body: str) -> Iterator[ParsedCall | MalformedCall]:
    try:
        calls = read_calls(body)
    except BadLiteral as error:
        yield MalformedCall(_shorten(body), f"this is not a call: {error}")
        return
    yield from (ParsedCall(name, arguments) for name, arguments in calls)


def _read_python_marks(text: str, opening: str, closing: str) -> ParsedAnswer:
    """Blocks of calls; the last may lack its closing mark, and what repeats a block up to another closing mark is no text."""
    found = _Found()
    for kind, piece in _split_blocks(text, opening, closing):
        if kind == "stray" and found.calls:
            found.said.pop()
        elif kind == "unclosed":
            found.calls.extend(_read_python_body(piece.removeprefix(opening).strip()))
        else:
            _take(found, kind, piece.strip() if kind == "inside" else piece, _read_python_body, opening)
    return found.parsed()


def _read_bare(text: str) -> ParsedAnswer:
    """JSON objects that name a tool and give arguments, behind <|python_tag|> or anywhere in the text."""
    before, marked, body = text.partition("<|python_tag|>")
    if not marked:
        before, body = "", text
    found = _Found([before])
    at = unclosed = 0
    listed = False  # within a list that a call began
    start = body.find("{")
    while start >= 0:
        end = _find_end(body, start)
        if end < 0 and not (_OPENS_A_CALL.match(body, start) and _names_a_call(body[start:])):
            unclosed += 1
            later = _OPENS_A_CALL.search(body, start + 1) if unclosed < MAX_UNCLOSED else None
            if later is not None or not (_OPENS_AN_OBJECT.match(body, start) and _names_a_call(body[start:])):
                start = later.start() if later is not None else -1
                continue
        piece = body[start:end] if end >= 0 else body[start:]
        calls = _read_bare_object(piece, whole=end >= 0)
        between, at = body[at:start], start + len(piece)
        if listed:
            between, listed = _take_from_list(found, between)
        if listed and not calls:
            calls = [MalformedCall(_shorten(piece), "a list of calls holds calls alone")]
        found.said.extend([between] if calls else [between, piece])
        found.calls.extend(calls)
        listed = listed or (bool(calls) and between.rstrip().endswith("["))
        start = body.find("{", at)
    if marked and not found.calls:
        found.calls.extend(_read_json_body(body.strip()))
        return ParsedAnswer(before.strip(), tuple(found.calls))
    if not found.calls:
        return ParsedAnswer(text.strip())
    rest = _take_from_list(found, body[at:])[0] if listed else body[at:]
    said = [piece for piece in (*found.said, rest) if piece.strip(" \n\t;,[]")]
    return ParsedAnswer("".join(said).strip(), tuple(found.calls))


def _take_from_list(found: _Found, text: str) -> tuple[str, bool]:
    """What stands behind a list's call, without what is in the list, a call gone wrong; and whether the list goes on."""
    inside, closed, outside = text.partition("]")
    item = inside.strip(" \n\t;,")
    if item and inside.lstrip()[:1] not in (",", ";"):
        return text, not closed
    if item:
        found.calls.append(MalformedCall(_shorten(item), "a list of calls holds calls alone"))
    return outside, not closed


def _names_a_call(piece: str) -> bool:
    return '"name"' in piece and ('"arguments"' in piece or '"parameters"' in piece)


def _read_bare_object(piece: str, *, whole: bool) -> list[ParsedCall | MalformedCall]:
    """Its call, or those of its `tool_calls`, or one gone wrong; none for braces of another kind and a tool's description."""
    if not _names_a_call(piece):
        return []
    try:
        read = orjson.loads(piece)
    except orjson.JSONDecodeError as error:
        end = "" if whole else " (it never ends)"
        return [MalformedCall(_shorten(piece), f"this is not JSON: {error}{end}")]
    listed = read.get("tool_calls")
    calls = listed if isinstance(listed, list) and listed else [read]
    calls = [each["function"] if isinstance(each, dict) and isinstance(each.get("function"), dict) else each for each in calls]
    return [_read_bare_call(each, piece) for each in calls if not _describes_a_tool(each, piece)]


def _describes_a_tool(read: Any, piece: str) -> bool:
    """Whether it tells what a tool takes: an answer may quote that."""
    return isinstance(read, dict) and (
        ("description" in read and "arguments" not in read and "parameters" in read)
        or (not read.keys() & _CALL_KEYS and '"properties"' in piece)
    )


def _read_bare_call(read: Any, piece: str) -> ParsedCall | MalformedCall:
    if isinstance(read, dict) and (more := read.keys() - _CALL_KEYS):
        return MalformedCall(_shorten(piece), f'a call has "name" and "arguments", and no {_shorten(min(more))!r}')
    return _read_call(read, piece)


def _read_mistral(text: str) -> ParsedAnswer:
    """[TOOL_CALLS] before a list of objects (the older form), or before each call's name, [ARGS] or nothing, and arguments."""
    found = _Found()
    at = text.find(_MISTRAL_MARK)
    found.said.append(text[:at])
    while at >= 0:
        start = at + len(_MISTRAL_MARK)
        named = _MISTRAL_NAME.match(text, start)
        opening = named.end() if named else _skip_space(text, start)
        end = _find_end(text, opening) if text[opening : opening + 1] in ("{", "[") else -1
        if end < 0:
            body = text[start:].strip()
            found.calls.extend(_read_json_body(body))
            break
        found.calls.extend(_read_mistral_calls(text[opening:end], named[1] if named else ""))
        at = text.find(_MISTRAL_MARK, end)
        _go_on_with_mistral(found, text[end:at] if at >= 0 else text[end:])
    return found.parsed()


def _read_mistral_calls(piece: str, name: str) -> list[ParsedCall | MalformedCall]:
    """Those of an object or a list; with a name, of the arguments alone."""
    try:
        read = orjson.loads(piece)
    except orjson.JSONDecodeError as error:
        return [MalformedCall(_shorten(name + piece), f"this is not JSON: {error}")]
    if name:
        read = {"name": name, "arguments": read}
    return [_read_call(each, piece) for each in (read if isinstance(read, list) and read else [read])]


def _go_on_with_mistral(found: _Found, rest: str) -> None:
    """What follows a call up to the next mark: more calls, whatever divides them, and then what is said."""
    at = 0
    while (divided := _DIVIDED.match(rest, at)) is not None:
        named = _MISTRAL_NAME.match(rest, divided.end())
        named = named if named and "[ARGS]" in named[0] else None
        opening = named.end() if named else divided.end()
        end = _find_end(rest, opening) if rest[opening : opening + 1] in ("{", "[") else -1
        piece = rest[opening:end]
        if end < 0 or not (named or '"name"' in piece):
            break
        found.calls.extend(_read_mistral_calls(piece, named[1] if named else ""))
        at = end
    rest = rest[at:]
    if _names_a_call(rest) or "[ARGS]" in rest:
        found.calls.append(MalformedCall(_shorten(rest.strip()), "what follows a call looks like one, and can't be read"))
    else:
        found.said.append(rest)


def _read_harmony(text: str) -> ParsedAnswer:
    """Messages to channels: analysis is thought, a recipient makes a call, and the rest is said."""
    found = _Found()
    if "<|message|>" not in text and "<|channel|>" not in text:
        return ParsedAnswer(text.strip())
    for message, head, body in split_channels(text):
        to = HARMONY_TO.search(head)
        if to and body is None:
            found.calls.append(MalformedCall(_shorten(message), f"a call to {to[1]} has no <|message|> with its arguments"))
        elif to:
            found.calls.append(_read_harmony_call(to[1], body or ""))
        elif body is not None and not is_analysis(head):
            found.said.append(body)
    return found.parsed()


def _read_harmony_call(name: str, body: str) -> ParsedCall | MalformedCall:
    try:
        read = orjson.loads(body.strip() or "{}")
    except orjson.JSONDecodeError as error:
        return MalformedCall(_shorten(body), f"the arguments of {name[:MAX_SHOWN]} are not JSON: {error}")
    return _read_call({"name": name, "arguments": read}, body)


def _skip_space(text: str, at: int) -> int:
    match = _ONLY_SPACE.match(text, at)
    return match.end() if match else at


def _find_end(text: str, at: int) -> int:
    """Behind the bracket that closes the one at `at`, brackets in texts not counted; -1 where none does."""
    depth = 0
    for token in _NESTING.finditer(text, at):
        if token[0][0] == '"':
            if not token[1]:  # a text that never ends
                return -1
        elif token[0] in "[{":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return token.end()
    return -1


def _looks_like_a_call(text: str) -> bool:
    """Whether a text is, from its first to its last character, an object or list that names a tool and gives arguments."""
    body = text.strip()
    return (
        body[:1] in ("{", "[")
        and body[-1:] in ("}", "]")
        and '"name"' in body
        and ('"arguments"' in body or '"parameters"' in body)
    )


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def is_deeper_than(value: Any, most: int = MAX_DEPTH) -> bool:
    """Whether lists and dicts stand in each other more than `most` times; without recursion."""
    level = [value]
    for _ in range(most + 1):
        inner = [each for each in level if isinstance(each, list | tuple | Mapping)]
        if not inner:
            return False
        level = [part for each in inner for part in (each.values() if isinstance(each, Mapping) else each)]
    return True


def _write_line_breaks(token: str) -> str:
    """A quoted text with its line breaks as escapes: Python takes them in triple quotes alone, policies write them anywhere."""
    if token.startswith(('"""', "'''")):
        return token
    return _ESCAPE_OR_BREAK.sub(_write_line_break, token)


def _write_line_break(match: re.Match[str]) -> str:
    """An escape as it is, one of a line break as nothing: it joins two lines."""
    if match[0][0] != "\\":
        return "\\n"
    return "" if match[0][1] in "\r\n" else match[0]


class BadLiteral(ValueError):
    """The text is not a call; the message says at which character."""


def read_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of every call. Raises `BadLiteral`; linear in the length of the text."""
    reader = CallReader(text)
    listed = reader.skip("[")
    calls = []
    while not (reader.skip("]") if listed else reader.is_at_end()):
        calls.append(reader.read_call())
        if not reader.skip(",") and listed and not reader.peek("]"):
            raise reader.make_error("a comma or ] is missing")
    if not reader.is_at_end():
        raise reader.make_error("there is more behind the calls")
    if not calls:
        raise BadLiteral("there is no call in it")
    return calls


class CallReader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._skip_space()

    def make_error(self, what: str) -> BadLiteral:
        return BadLiteral(f"{what} at character {self._at}")

    def is_at_end(self) -> bool:
        return self._at >= len(self._text)

    def peek(self, mark: str) -> bool:
        return self._text.startswith(mark, self._at)

    def skip(self, mark: str) -> bool:
        if not self.peek(mark):
            return False
        self._at += len(mark)
        self._skip_space()
        return True

    def read_call(self) -> tuple[str, dict[str, Any]]:
        name = self._read_name()
        if not self.skip("("):
            raise self.make_error("a ( is missing")
        arguments: dict[str, Any] = {}
        while not self.skip(")"):
            key = self._read_name()
            if not self.skip("="):
                raise self.make_error("arguments are written name=value; a = is missing")
            if key in arguments:
                raise self.make_error(f"{key} is given twice")
            arguments[key] = self._read_value(0)
            if not self.skip(",") and not self.peek(")"):
                raise self.make_error("a comma or ) is missing")
        return name, arguments

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _take_token(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        self._skip_space()
        return match[0]

    def _read_name(self) -> str:
        name = self._take_token(_NAME)
        if not name:
            raise self.make_error("a name is missing")
        return name

    def _read_value(self, depth: int) -> Any:
        if depth > MAX_LITERAL_DEPTH:
            raise self.make_error(f"nesting deeper than {MAX_LITERAL_DEPTH}")
        for opening, closing in (("[", "]"), ("(", ")")):
            if self.skip(opening):
                return self._read_items(closing, depth)
        if self.skip("{"):
            return self._read_dict(depth)
        if text := self._take_token(_LONG_TEXT) or self._take_token(_TEXT):
            return self._read_text(text)
        if number := self._take_token(_NUMBER):
            return self._read_number(number)
        word = self._take_token(_NAME)
        if word not in _WORDS:
            raise self.make_error("a value must be a text, number, list, dict, True, False or None: one is missing")
        return _WORDS[word]

    def _read_items(self, closing: str, depth: int) -> list[Any]:
        items = []
        while not self.skip(closing):
            items.append(self._read_value(depth + 1))
            if not self.skip(",") and not self.peek(closing):
                raise self.make_error(f"a comma or {closing} is missing")
        return items

    def _read_dict(self, depth: int) -> dict[str, Any] | list[Any]:
        """A dict, or a set as a list."""
        made: dict[str, Any] = {}
        while not self.skip("}"):
            key = self._read_value(depth + 1)
            if not made and (self.peek(",") or self.peek("}")):
                self.skip(",")
                return [key, *self._read_items("}", depth)]
            if not isinstance(key, str) or not self.skip(":"):
                raise self.make_error("a dict has texts for keys, and a : behind each")
            made[key] = self._read_value(depth + 1)
            if not self.skip(",") and not self.peek("}"):
                raise self.make_error("a comma or } is missing")
        return made

    def _read_text(self, token: str) -> str:
        try:
            text = str(
                ast.literal_eval(_write_line_breaks(token))
            )  # one string token: no nesting, nothing to evaluate but its escapes
            text.encode()  # raises for one half of a surrogate pair, which no JSON and no tokenizer takes
        except (SyntaxError, ValueError) as error:
            raise self.make_error(f"a text has a broken escape ({error})") from error
        return text

    def _read_number(self, token: str) -> int | float:
        if len(token) > MAX_NUMBER_CHARACTERS:
            raise self.make_error(f"a number has more than {MAX_NUMBER_CHARACTERS} characters")
        try:
            return int(token)
        except ValueError:
            pass
        try:
            number = float(token)
        except ValueError as error:
            raise self.make_error(f"{token} is not a number") from error
        if not math.isfinite(number):
            raise self.make_error(f"{token} is too large for a number")
        return number
