"""Tests of programs in the forms that data sets have them in, and when what a program gives is right.

Three kinds. A `StdinTest` gives a program an input and wants an output; a `CallTest` calls a function and wants a value: both
are compared here, outside the sandbox, so that no program can forge them. An `AssertTest` is Python code that runs beside the
program. Owns reading and comparing; refuses to run anything (code_answers.py does).
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FLOAT_TOLERANCE = 1e-6
"""Of floats that a function returns: data sets hold them with fewer digits than Python computes."""
LONGEST_NUMBER = 40
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_BROKEN = (ValueError, SyntaxError, RecursionError, MemoryError)


@dataclass(frozen=True)
class StdinTest:
    """`StdinTest("3 4\\n", "7\\n")`: what the program reads, and what it must print."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """`CallTest("add", "(3, 4)", "7")`: a function (of the class `Solution`, where the program has one), its arguments as a
    Python literal, and the JSON of what it must return."""

    function: str
    arguments: str
    expected: str


@dataclass(frozen=True)
class AssertTest:
    """`AssertTest("assert add(3, 4) == 7")`: Python code that runs where the
    answer's names are, and raises unless they are right."""

    code: str


Test = StdinTest | CallTest | AssertTest


def read_tests(value: Any, entry_point: str = "") -> tuple[Test, ...]:
    """Tests in any of the forms that data sets have them in; JSON text is read first.

    `"def check(candidate): ..."` with an entry point (HumanEval); a text or a list of texts of assertions (MBPP);
    `{"inputs": [...], "outputs": [...]}`, with a `fn_name` where a function is called (APPS, TACO, INTELLECT-3); a list of
    `{"input": ..., "output": ...}`, of the `testtype` "functional" where the entry point is called (LiveCodeBench).
    Raises `ValueError` for anything else, and where there is no test.
    """
    if isinstance(value, str) and value.lstrip()[:1] in {"[", "{"}:
        value = json.loads(value)
    if isinstance(value, str):
        tests: list[Test] = [AssertTest(f"{value}\ncheck({entry_point})\n" if entry_point else value)]
    elif isinstance(value, Mapping) and {"inputs", "outputs"} <= value.keys():
        function = str(value.get("fn_name") or "")
        tests = [_one(given, out, function) for given, out in zip(value["inputs"], value["outputs"], strict=True)]
    elif isinstance(value, Sequence) and all(isinstance(one, str) for one in value):
        tests = [AssertTest(one) for one in value]
    elif isinstance(value, Sequence) and all(isinstance(one, Mapping) and {"input", "output"} <= one.keys() for one in value):
        tests = [_one(one["input"], one["output"], _called(one, entry_point)) for one in value]
    else:
        raise ValueError(f"tests of the form {type(value).__name__} are not known: {str(value)[:80]}")
    if not tests or any(isinstance(test, AssertTest) and not test.code.strip() for test in tests):
        raise ValueError("there is no test, or an empty one: everything would pass")
    return tuple(tests)


def printed_alike(printed: str, wanted: str, tolerance: float = 0.0) -> bool:
    """Whether the two are the same, trailing spaces and empty last lines aside. With a tolerance it is words that are compared,
    and numbers of which one is no integer may be that far apart, or that share of the wanted one."""
    if _lines(printed) == _lines(wanted):
        return True
    if tolerance == 0:
        return False
    given, right = printed.split(), wanted.split()
    return len(given) == len(right) and all(
        one == other or _close(one, other, tolerance) for one, other in zip(given, right, strict=True)
    )


def returned_alike(returned: str, wanted: str) -> bool:
    """Whether two JSON texts hold the same value. Some data sets put what is wanted into a list of one: that one counts too."""
    try:
        given, right = json.loads(returned), json.loads(wanted)
    except _BROKEN:
        return False
    return _same(given, right) or (isinstance(right, list) and len(right) == 1 and _same(given, right[0]))


def _one(given: Any, out: Any, function: str) -> Test:
    if not function:
        return StdinTest(_text(given), _text(out))
    arguments = tuple(map(_literal, given.splitlines())) if isinstance(given, str) else tuple(given)
    return CallTest(function, repr(arguments), json.dumps(_literal(out) if isinstance(out, str) else out, default=list))


def _called(test: Mapping[str, Any], entry_point: str) -> str:
    """The function that the test calls; "" for a program that reads and prints."""
    kind = test.get("testtype") or "stdin"
    if kind == "stdin":
        return ""
    if kind != "functional":
        raise ValueError(f"tests of the testtype {str(kind)[:80]!r} are not known")
    if not entry_point:
        raise ValueError("a functional test calls a function, and the row names none (entry_point_field)")
    return entry_point


def _literal(text: str) -> Any:
    """A value written as JSON, or else as Python writes it. Raises `ValueError`."""
    try:
        return json.loads(text)
    except _BROKEN:
        pass
    try:
        return ast.literal_eval(text.strip())
    except _BROKEN as error:
        raise ValueError(f"an argument or a value of a test is neither JSON nor a literal of Python: {text[:80]!r}") from error


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and not any(isinstance(line, list | dict) for line in value):
        return "\n".join(map(str, value))
    return str(value)


def _lines(text: str) -> list[str]:
    """Trailing spaces and empty last lines don't count."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _close(one: str, other: str, tolerance: float) -> bool:
    if not all(len(text) <= LONGEST_NUMBER and _FLOAT.fullmatch(text) for text in (one, other)):
        return False
    if one.lstrip("+-").isdecimal() and other.lstrip("+-").isdecimal():
        return False  # whole numbers are right or wrong
    given, right = float(one), float(other)
    return math.isfinite(given) and math.isclose(given, right, rel_tol=0, abs_tol=tolerance * max(1.0, abs(right)))


def _same(given: Any, right: Any) -> bool:
    """As `==`, but that floats need not have all their digits. As deep as `right` is, however deep the other goes."""
    if isinstance(right, list):
        return (
            isinstance(given, list)
            and len(given) == len(right)
            and all(_same(*pair) for pair in zip(given, right, strict=True))
        )
    if isinstance(right, dict):
        return isinstance(given, dict) and given.keys() == right.keys() and all(_same(given[key], right[key]) for key in right)
    if isinstance(right, float) or isinstance(given, float):
        if not (isinstance(given, int | float) and isinstance(right, int | float)):
            return False
        try:
            return math.isclose(given, right, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
        except OverflowError:  # a whole number beyond all floats
            return False
    return bool(given == right)
