"""Reading arithmetic out of what a model wrote."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.environments.graders.expression import Expression, NotAnExpression, parse_expression


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("5+8-3", 10, (5, 8, 3)),
        ("2+3*4", 14, (2, 3, 4)),
        ("(2+3)*4", 20, (2, 3, 4)),
        ("8-3-2", 3, (8, 3, 2)),
        ("12/4/3", 1, (12, 4, 3)),
        ("7/2", Fraction(7, 2), (7, 2)),
        (" 1 + ( 2 * 3 )\n", 7, (1, 2, 3)),
        ("-3+8", 5, (3, 8)),
        ("2*(-3)", -6, (2, 3)),
        ("-(2+3)*2", -10, (2, 3, 2)),
        ("3×4÷2−1", 5, (3, 4, 2, 1)),
        ("007", 7, (7,)),
    ],
)
def test_values_follow_the_rules_of_school(text: str, value: int, numbers: tuple[int, ...]) -> None:
    assert parse_expression(text) == Expression(Fraction(value), numbers)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'the end' cannot follow"),
        ("5+8=13", "'=13' is not a number"),
        ("5+", "'the end' cannot follow '\\+'"),
        ("5 8", "'8' cannot follow '5'"),
        ("5(8)", r"'\(' cannot follow '5'"),
        ("(5)(8)", r"'\(' cannot follow '\)'"),
        ("()", r"'\)' cannot follow '\('"),
        ("(5", "never closed"),
        ("5)", "never opened"),
        ("2**9", r"'\*' cannot follow '\*'"),
        ("2^9", "not a number, an operator"),
        ("*5", r"'\*' cannot follow"),
        ("+5", r"'\+' cannot follow"),
        ("5--3", "'-' cannot follow '-'"),
        ("1/0", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("1.5", "not a number, an operator"),
        ("1e9", "not a number, an operator"),
        ("٣+٤", "not a number, an operator"),
        ("__import__('os')", "not a number, an operator"),
        ("1234567890123", "a number of 13 digits"),
    ],
)
def test_anything_else_is_refused_with_a_reason(text: str, why: str) -> None:
    with pytest.raises(NotAnExpression, match=why):
        parse_expression(text)


def test_operators_that_are_not_allowed_are_refused() -> None:
    with pytest.raises(NotAnExpression, match=r"'\*' is not one of the operators '\+-'"):
        parse_expression("2*3", "+-")


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9**9",
        "(" * 255,
        "-(" * 120 + "1" + ")" * 120 + "9" * 100,
        "9" * 10**6,
        "1/" * 127 + "7",
        "999999999999*" * 18 + "9",
    ],
)
def test_no_text_takes_long(text: str) -> None:
    before = time.process_time()
    for _ in range(20):
        try:
            parse_expression(text)
        except NotAnExpression:
            continue
    assert time.process_time() - before < 0.5


@given(st.text(alphabet="0123456789+-*/() x", max_size=40))
def test_python_agrees_wherever_we_find_a_value(text: str) -> None:
    try:
        found = parse_expression(text)
    except NotAnExpression:
        return
    spelled = "".join(f"Fraction({part})" if part.isdigit() else part for part in _split(text))
    assert eval(spelled, {"Fraction": Fraction, "__builtins__": {}}) == found.value


def _split(text: str) -> list[str]:
    parts: list[str] = []
    for character in text:
        if character.isdigit() and parts and parts[-1].isdigit():
            parts[-1] += character
        elif character.isdigit() or character in "+-*/()":
            parts.append(character)
        else:
            parts.append("")  # keeps `1 2` two numbers
    return [str(int(part)) if part.isdigit() else part for part in parts]
