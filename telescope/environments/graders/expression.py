"""Arithmetic expressions in model-written text: whole numbers, + - * /, parentheses. A parser, never `eval`.

Refuses powers, names, calls and anything long, so that no text can hang or crash a worker: the work is linear in at most
`MAX_CHARACTERS`, without recursion, and values stay exact (`Fraction`) with at most that many digits.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

MAX_CHARACTERS = 256
MAX_DIGITS = 12

Apply: TypeAlias = Callable[[Fraction, Fraction], Fraction]
_APPLY: dict[str, Apply] = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_PRECEDENCE = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2}
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))")


class NotAnExpression(ValueError):
    """The text is not an arithmetic expression of the allowed kind; the message says why."""


@dataclass(frozen=True)
class Expression:
    value: Fraction
    numbers: tuple[int, ...]
    """The numbers as written, left to right."""


def parse_expression(text: str, operators: str = "+-*/") -> Expression:
    """The value and the numbers of `text`, e.g. `parse("3*(8-1)")` has value 21 and numbers (3, 8, 1).

    A minus sign may open the text or a bracket. Raises `NotAnExpression`, for a division by zero and an operator that is
    not in `operators` too.
    """
    if len(text) > MAX_CHARACTERS:
        raise NotAnExpression(f"{len(text)} characters are more than {MAX_CHARACTERS}")
    machine = _ShuntingYard(operators)
    for token in _tokenize(text.translate(_SPELLINGS).strip()):
        machine.take(token)
    return machine.finish()


def _tokenize(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise NotAnExpression(f"{text[at : at + 10]!r} is not a number, an operator or a bracket")
        if match[1] and len(match[1]) > MAX_DIGITS:
            raise NotAnExpression(f"a number of {len(match[1])} digits")
        yield match[1] or match[2]
        at = match.end()


class _ShuntingYard:
    """Shunting-yard: operators wait on a stack until one of lower precedence, a bracket or the end comes."""

    def __init__(self, operators: str) -> None:
        self._allowed = operators
        self._values: list[Fraction] = []
        self._waiting: list[str] = []
        self._numbers: list[int] = []
        self._before = "("  # the token before this one; the start of the text behaves like a bracket

    def take(self, token: str) -> None:
        after_value = self._before == ")" or self._before.isdigit()
        if token.isdigit():
            self._expect(not after_value, token)
            self._numbers.append(int(token))
            self._values.append(Fraction(int(token)))
        elif token == "(":
            self._expect(not after_value, token)
            self._waiting.append(token)
        elif token == ")":
            self._expect(after_value, token)
            self._close_bracket()
        else:
            self._take_operator(token, after_value)
        self._before = token

    def finish(self) -> Expression:
        self._expect(self._before == ")" or self._before.isdigit(), "the end")
        self._reduce(1)
        if self._waiting:
            raise NotAnExpression("a bracket is never closed")
        return Expression(self._values[0], tuple(self._numbers))

    def _take_operator(self, token: str, after_value: bool) -> None:
        if token not in self._allowed:
            raise NotAnExpression(f"{token!r} is not one of the operators {self._allowed!r}")
        if not after_value:
            self._expect(token == "-" and self._before == "(", token)
            self._values.append(Fraction(0))  # -3 is 0 - 3
        self._reduce(_PRECEDENCE[token])
        self._waiting.append(token)

    def _close_bracket(self) -> None:
        self._reduce(1)
        if not self._waiting:
            raise NotAnExpression("a bracket is closed that was never opened")
        self._waiting.pop()

    def _reduce(self, precedence: int) -> None:
        while self._waiting and _PRECEDENCE[self._waiting[-1]] >= precedence:
            sign = self._waiting.pop()
            right, left = self._values.pop(), self._values.pop()
            if sign == "/" and right == 0:
                raise NotAnExpression("a division by zero")
            self._values.append(_APPLY[sign](left, right))

    def _expect(self, fits: bool, token: str) -> None:
        if not fits:
            raise NotAnExpression(f"{token!r} cannot follow {self._before!r}")
