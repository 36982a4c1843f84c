"""Calls written as Python: `add(a=1, b=[2, 3.5], note="x")`, several behind one another or in a list.

Reads literals only: texts, numbers, True, False, None, lists, tuples, dicts (JSON's true, false, null too). Refuses to evaluate
anything, and nesting beyond `MAX_DEPTH`: neither an answer of brackets nor one of minus signs can exhaust the stack.
"""

from __future__ import annotations

import ast
import math
import re
from typing import Any

MAX_DEPTH = 32
MAX_NUMBER = 64
_SPACE = re.compile(r"[\s;]*")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*)?\.?\d[\d_]*(?:[eE][+-]?\d+)?")
_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'', re.DOTALL)
_LONG_TEXT = re.compile(r'"""(?:[^"\\]|\\.|"(?!""))*"""|\'\'\'(?:[^\'\\]|\\.|\'(?!\'\'))*\'\'\'', re.DOTALL)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class BadLiteral(ValueError):
    """The text is no call; the message says at which character."""


def read_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of every call. Raises `BadLiteral`; linear in the length of the text."""
    reader = _Reader(text)
    listed = reader.skip("[")
    calls = []
    while not (reader.skip("]") if listed else reader.ended()):
        calls.append(reader.call())
        if not reader.skip(",") and listed and not reader.peek("]"):
            raise reader.error("a comma or ] is missing")
    if not reader.ended():
        raise reader.error("there is more behind the calls")
    if not calls:
        raise BadLiteral("there is no call in it")
    return calls


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._space()

    def error(self, what: str) -> BadLiteral:
        return BadLiteral(f"{what} at character {self._at}")

    def ended(self) -> bool:
        return self._at >= len(self._text)

    def peek(self, mark: str) -> bool:
        return self._text.startswith(mark, self._at)

    def skip(self, mark: str) -> bool:
        if not self.peek(mark):
            return False
        self._at += len(mark)
        self._space()
        return True

    def call(self) -> tuple[str, dict[str, Any]]:
        name = self._name()
        if not self.skip("("):
            raise self.error("a ( is missing")
        arguments: dict[str, Any] = {}
        while not self.skip(")"):
            key = self._name()
            if not self.skip("="):
                raise self.error("arguments are written name=value; a = is missing")
            if key in arguments:
                raise self.error(f"{key} is given twice")
            arguments[key] = self._value(0)
            if not self.skip(",") and not self.peek(")"):
                raise self.error("a comma or ) is missing")
        return name, arguments

    def _space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _token(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        self._space()
        return match[0]

    def _name(self) -> str:
        name = self._token(_NAME)
        if not name:
            raise self.error("a name is missing")
        return name

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.error(f"nesting deeper than {MAX_DEPTH}")
        for opening, closing in (("[", "]"), ("(", ")")):
            if self.skip(opening):
                return self._items(closing, depth)
        if self.skip("{"):
            return self._dict(depth)
        if text := self._token(_LONG_TEXT) or self._token(_TEXT):
            return self._text_of(text)
        if number := self._token(_NUMBER):
            return self._number_of(number)
        word = self._token(_NAME)
        if word not in _WORDS:
            raise self.error("a value must be a text, number, list, dict, True, False or None: one is missing")
        return _WORDS[word]

    def _items(self, closing: str, depth: int) -> list[Any]:
        items = []
        while not self.skip(closing):
            items.append(self._value(depth + 1))
            if not self.skip(",") and not self.peek(closing):
                raise self.error(f"a comma or {closing} is missing")
        return items

    def _dict(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        while not self.skip("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str) or not self.skip(":"):
                raise self.error("a dict has texts for keys, and a : behind each")
            made[key] = self._value(depth + 1)
            if not self.skip(",") and not self.peek("}"):
                raise self.error("a comma or } is missing")
        return made

    def _text_of(self, token: str) -> str:
        try:
            text = str(ast.literal_eval(token))  # one string token: no nesting, nothing to evaluate but its escapes
            text.encode()  # raises for one half of a surrogate pair, which no JSON and no tokenizer takes
        except (SyntaxError, ValueError) as error:
            raise self.error(f"a text has a broken escape ({error})") from error
        return text

    def _number_of(self, token: str) -> int | float:
        if len(token) > MAX_NUMBER:
            raise self.error(f"a number has more than {MAX_NUMBER} characters")
        try:
            return int(token)
        except ValueError:
            pass
        try:
            number = float(token)
        except ValueError as error:
            raise self.error(f"{token} is no number") from error
        if not math.isfinite(number):
            raise self.error(f"{token} is too large for a number")
        return number
