r"""Mathematical answers: which part of a text is one, and whether two are the same.

`compare_exactly` decides at once what needs no algebra (numbers with their percent signs, units and bases, words, dates, equal
texts, lists of these), in time linear in what it reads. The rest is `compare_symbolically`, which takes lists apart in the same
way and asks math-verify for each part: that may take for ever (`\boxed{9^{9^{9^9}}}`), so it belongs in a grader process
(pool.py). Refuses to evaluate anything here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from telescope.environments.graders.extraction import AnswerForm as AnswerForm
from telescope.environments.graders.extraction import extract_answer as extract_answer
from telescope.environments.graders.extraction import extract_golden as extract_golden
from telescope.environments.graders.notation import Items, find_interval, match_intervals, split_items, squeeze, turn_round
from telescope.environments.graders.notation import tidy as tidy
from telescope.environments.graders.quantities import PercentReading as PercentReading
from telescope.environments.graders.quantities import compare_quantities, parse_quantity, take_unit

_PLAIN = re.compile(r"-?[0-9]{1,18}")
_PLAIN_DECIMAL = re.compile(r"-?(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,6}|[0-9]{1,18})(?:\.[0-9]{1,18})?")
_DATE = re.compile(r"(\d{1,4})([-/.])(\d{1,2})\2(\d{1,4})|(\d{1,2}):(\d{2})(?: ?([ap])\.?m\.?)?", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+(?:[ '’-][^\W\d_]+)*")
_UNEQUAL = re.compile(r"(?:\\ne(?![a-zA-Z])|!=|\\not)")
_UNITED = re.compile(r"\\(?:cup|cap|setminus|mathbb)(?![a-zA-Z])")
_IN_WORDS = re.compile(r"\s*\$?\\text(?:bf|it|rm)?\{\s*[a-zA-Z]{2,}\s*\}\$?\s*")
_TURNED = re.compile(r"(?!\\?[a-zA-Z]=)([^=<>]+)=(\\?[a-zA-Z])")  # what names nothing yet: `5=x`, not `y=x`
_PARTED = re.compile(r"\d+(?: \d+)+")
_PRODUCT = re.compile(r"[a-df-hj-np-z]{1,3}")  # letters that are often variables; the rest make words
_NAMED = re.compile(r"(?:option|choice|answer) ", re.IGNORECASE)
_NAME = (
    r"(?:m?\\(?:angle|overline|vec|widehat|hat) ?\{?[a-zA-Z]{1,4}\}?"
    r"|\\?[a-zA-Z]+'?(?:_\{?\w{1,8}\}?)?(?:\([^()=]{1,20}\))?"
    r"|\([a-zA-Z, ]{1,20}\)|[-+*/^(). \d]{1,40})"
)
_ASSIGNED = re.compile(rf"{_NAME} ?(?:=|\\in(?![a-zA-Z])|\\approx(?![a-zA-Z]))|\\approx(?![a-zA-Z])|=")
_EXPONENT = re.compile(r"(?<=\d)[eE]([-+]?\d+)(?![\w.])")
_STATED = re.compile(r"[<>=]|\\[lg]e(?![a-zA-Z])|\\in(?![a-zA-Z])|\\ne(?![a-zA-Z])")
_IRRATIONAL = re.compile(r"\\(?:pi|sqrt)(?![a-zA-Z])|[π√]")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_LETTERS = re.compile(r"[^\W\d_]+")
_CONSTANT = re.compile(r"e|i|E|pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|abs|max|min|mod|arcsin|arccos|arctan")
_VANISHING = re.compile(  # where letters may cancel, or are bound; and ordinals
    r"\\(?:sum|prod|int|lim|begin|binom|a?r?c?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp)(?![a-zA-Z])|\\frac\{[^{}]*[a-zA-Z]"
    r"|(?<=[^ ])[-+/]|^\d+ ?(?:st|nd|rd|th)$"
)
_DIGITS = 40  # of numbers that are compared as such
_Leaf = Callable[[str, str], bool | None]


@dataclass(frozen=True)
class Conventions:
    """What decides where two readings are usual."""

    percent: PercentReading = "either"
    """What `10%` is: 10 or 0.1 as the other side has it, 0.1 alone ("hundredths"), or 10 alone ("units")."""
    tolerance: float = 0.0
    """How far a number that is not whole may be off, as a share of the right one."""


DEFAULTS = Conventions()


def compare_exactly(wanted: str, given: str, conventions: Conventions = DEFAULTS) -> bool | None:
    """Whether both are the same answer, as far as that shows without algebra; None: it does not show."""
    if _PLAIN.fullmatch(wanted) and _PLAIN.fullmatch(given):
        return int(wanted) == int(given)
    if conventions.tolerance == 0 and _PLAIN_DECIMAL.fullmatch(wanted) and _PLAIN_DECIMAL.fullmatch(given):
        return Decimal(wanted.replace(",", "")) == Decimal(given.replace(",", ""))
    return _compare_texts(wanted, given, _Equality(conventions, lambda one, other: None))


def compare_symbolically(wanted: str, given: str, percent: PercentReading = "either", tolerance: float = 0.0) -> bool:
    """Whether both are the same, part by part as math-verify sees it. Main thread of a grader process only; without a limit."""
    same = _Equality(Conventions(percent, tolerance), lambda one, other: _ask_math_verify(one, other, tolerance))
    return bool(_compare_texts(wanted, given, same))


def _compare_texts(wanted: str, given: str, equality: _Equality) -> bool | None:
    (wanted, first), (given, second) = _part_unit(wanted), _part_unit(given)
    if first and second and first != second and "unit" not in (first[:4], second[:4]):
        return False
    one, other = tidy(wanted), tidy(given)
    if (_IN_WORDS.fullmatch(wanted) or _IN_WORDS.fullmatch(given)) and _WORD.fullmatch(one) and _WORD.fullmatch(other):
        return squeeze(one) == squeeze(other)
    try:
        return equality.compare(one, other)
    except RecursionError:  # too deep to be anybody's right answer
        return False


def _part_unit(answer: str) -> tuple[str, str]:
    """An irrational number without the unit behind it, and that; anything else stays whole: parse_quantity reads it."""
    before, unit = take_unit(answer)
    value = before.rpartition("=")[2]
    if not unit or not _IRRATIONAL.search(value) or _find_letters(value):
        return answer, ""
    return before, unit


def parse_number(text: str) -> Fraction | None:
    r"""The exact value of `1,000`, `-0.5`, `2 1/2` or `\frac{3}{4}`, tidied before; None for anything else."""
    quantity = parse_quantity(text)
    plain = quantity is not None and not quantity.percent and not quantity.unit and quantity.base is None
    return quantity.value if quantity is not None and plain else None


@dataclass(frozen=True)
class _Equality:
    """Takes two answers apart until a part shows itself or is left to `leaf`."""

    conventions: Conventions
    leaf: _Leaf

    def compare(self, one: str, other: str) -> bool | None:
        if squeeze(one) == squeeze(other):
            return bool(one)
        if not one or not other:
            return False
        first, second = parse_quantity(one), parse_quantity(other)
        if first is not None and second is not None:
            return compare_quantities(first, second, self.conventions.percent, self.conventions.tolerance)
        if (known := _compare_words(one, other)) is not None:
            return known
        if (intervals := match_intervals(one, other)) is not None:
            return self._compare_items(*intervals)
        left, right = _split_answer(one), _split_answer(other)
        if not (len(left.items) == len(right.items) == 1):
            if len(left.items) == 1 or len(right.items) == 1:
                shorter = _drop_names(one, other)
                if (shorter[0] == one) != (shorter[1] == other) and (shorter[0] == one) == (len(left.items) != 1):
                    return self.compare(*shorter)
            if any(_UNITED.search(text) for text in (one, other)) and "" in (left.opening, right.opening):
                return self.leaf(one, other)
            return self._compare_items(_intersect(one, left, right), _intersect(other, right, left))
        named = _drop_names(left.items[0], right.items[0])
        if named != (one, other):
            return self.compare(*named)
        turned = turn_round(one), turn_round(other)
        if _names_more(one, other) or _names_more(other, one):
            return False
        return squeeze(turned[0]) == squeeze(turned[1]) or self.leaf(*turned)

    def _compare_items(self, left: Items, right: Items) -> bool | None:
        if len(left.items) != len(right.items):
            return False
        if (left.opening, left.closing) != (right.opening, right.closing) and "" not in (left.opening, right.opening):
            return False
        if left.ordered or right.ordered:
            verdicts = [self.compare(a, b) for a, b in zip(left.items, right.items, strict=True)]
            return False if False in verdicts else None if None in verdicts else True
        return self._match(left.items, right.items)

    def _match(self, wanted: tuple[str, ...], given: tuple[str, ...]) -> bool | None:
        """Each of `wanted` finds its own in `given`."""
        rest, doubtful = list(given), False
        for item in wanted:
            verdicts = [self.compare(item, other) for other in rest]
            if True in verdicts:
                del rest[verdicts.index(True)]
            elif None in verdicts:
                doubtful = True
            else:
                return False
        return None if doubtful else True


def _split_answer(text: str) -> Items:
    r"""`3 \approx 4` is two answers, `x \approx 4` one."""
    near, sign, value = text.partition("\\approx")
    if sign and value.strip() and parse_quantity(near.strip()) is not None:
        return Items("", "", (near.strip(), value.strip()))
    return split_items(text)


def _intersect(text: str, own: Items, other: Items) -> Items:
    """An inequality as an interval, where the other side is one."""
    interval = find_interval(text) if len(own.items) == 1 and other.opening in ("(", "[") else None
    return interval or own


def _drop_names(one: str, other: str) -> tuple[str, str]:
    """Without the `x =` that only one of them has."""
    one, other = (_TURNED.sub(r"\2=\1", text) if _TURNED.fullmatch(text) else text for text in (one, other))
    names = _ASSIGNED.match(one), _ASSIGNED.match(other)
    if names[0] is not None and names[1] is None and not _STATED.search(other):
        one = _take_value(one, names[0])
    elif names[1] is not None and names[0] is None and not _STATED.search(one):
        other = _take_value(other, names[1])
    return _NAMED.sub("", one, 1), _NAMED.sub("", other, 1)


def _names_more(text: str, number: str) -> bool:
    """Whether the text is a product with letters that are not constants, and the other a mere number. math-verify takes such
    letters for units."""
    irrational = _IRRATIONAL.search(number) and not _find_letters(number) and not _STATED.search(number)
    if _VANISHING.search(text) or (parse_number(number) is None and not irrational):
        return False
    return any(not _CONSTANT.fullmatch(run) for run in _find_letters(text.rpartition("=")[2]))


def _find_letters(text: str) -> list[str]:
    """Runs of letters that are not a command."""
    return _LETTERS.findall(_COMMAND.sub(" ", text.replace("π", "")))


def _take_value(text: str, name: re.Match[str]) -> str:
    value = text.rpartition("=")[2] if name[0].endswith("=") else text[name.end() :]
    return value.strip() or text


def _compare_words(one: str, other: str) -> bool | None:
    """Words, dates and times are equal or they are not: nothing is multiplied or subtracted."""
    dates = _DATE.fullmatch(one), _DATE.fullmatch(other)
    if dates[0] and dates[1]:
        parts = [
            [int(part) if part and part.isdecimal() else (part or "").casefold() for part in d.groups()] for d in dates if d
        ]
        return parts[0] == parts[1]
    if any(date and ":" not in text for date, text in zip(dates, (other, one), strict=True)):
        return False
    if _UNEQUAL.match(one) is not None or _UNEQUAL.match(other) is not None:
        return False if not (_UNEQUAL.match(one) and _UNEQUAL.match(other)) else None
    if any(_PARTED.fullmatch(text) and parse_quantity(by) for text, by in ((one, other), (other, one))):
        return False
    words = [bool(_WORD.fullmatch(text)) and not _PRODUCT.fullmatch(text) for text in (one, other)]
    if all(words) or any(word and parse_quantity(text) for word, text in zip(words, (other, one), strict=True)):
        return False
    return None


def _ask_math_verify(wanted: str, given: str, tolerance: float) -> bool:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing limit at each call
    written = (_EXPONENT.sub(r"\\times 10^{\1}", text) for text in (wanted, given))
    one, other = (parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in written)
    if one and other and (same := _compare_numbers(one[0], other[0], tolerance)) is not None:
        return same
    return bool(verify(one, other, float_rounding=12, timeout_seconds=0))


def _compare_numbers(one: Any, other: Any, tolerance: float) -> bool | None:
    """Two numbers of sympy, real or complex, exactly; what is small counts by its own digits. None where one is none."""
    from sympy import Expr, Float, I, Rational

    if not isinstance(one, Expr) or not isinstance(other, Expr):
        return None
    try:
        numbers = [each.xreplace({i: I for i in each.free_symbols if i.name == "i"}) for each in (one, other)]
        if not all(each.is_number and each.is_finite for each in numbers):
            return None
        exact = [each.xreplace({short: Rational(str(short)) for short in each.atoms(Float)}) for each in numbers]
        difference = (exact[0] - exact[1]).doit()
        if difference == 0 or difference.is_Rational:
            near = abs(difference) <= Rational(str(tolerance)) * abs(exact[0]).doit() if tolerance else False
            return bool(difference == 0 or near)
        size = max(abs(each.evalf(_DIGITS)) for each in exact)
        return bool(abs(difference.evalf(_DIGITS)) <= max(Float(tolerance), Float(10) ** (5 - _DIGITS)) * size)
    except (ArithmeticError, TypeError, ValueError, RecursionError):
        return None
