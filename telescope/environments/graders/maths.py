r"""Mathematical answers: which part of a text is one, and whether two are the same.

`compare_exactly` decides at once what needs no algebra (whole numbers, decimals, fractions, equal texts), in time linear in
what it reads. The rest is `compare_symbolically`, which asks math-verify: that may take for ever (`\boxed{9^{9^{9^9}}}`), so it
belongs in a grader process (pool.py). Refuses to evaluate anything here.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from typing import Literal

from telescope.environments.parsers import AnswerParser, AnswerTags, Boxed, ThinkTags

AnswerForm = Literal["boxed", "any"]
MAX_ANSWER_CHARACTERS = 1000
"""What is longer is not a final answer."""
_TAIL = 400  # characters at the end of a text in which a bare number is looked for
_MAX_DIGITS = 60
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_BARE = re.compile(r"(?<![\w.^])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?")
_FRACTION = re.compile(r"([-+]?)\\frac(?:\{(-?\d+)\}\{(-?\d+)\}|(\d)(\d))|([-+]?\d+)/(\d+)")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_DROPPED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\\$|\$|\\\(|\\\)|\\\[|\\\]|~")


def extract_answer(text: str, form: AnswerForm = "any") -> str | None:
    r"""The part that counts, behind any thought: the last `\boxed{…}`; with "any" also what stands behind the last `####`, in
    <answer> tags, behind "answer is" or "answer:", or the last number near the end. None: there is none."""
    parsers: tuple[AnswerParser, ...] = (Boxed(),) if form == "boxed" else (Boxed(), AnswerTags())
    for parser in parsers:
        found = ThinkTags(parser).parse(text)
        if found is not None:
            return _limit_length(found)
    rest = ThinkTags().parse(text)
    return None if form == "boxed" or rest is None else _find_loose(rest)


def extract_golden(text: str) -> str:
    """The answer that a data set's answer or worked solution gives: boxed, behind `####`, else the whole text."""
    boxed = Boxed().parse(text)
    if boxed is not None:
        return boxed
    _, mark, rest = text.rpartition("####")
    return rest.strip() if mark else text.strip()


def compare_exactly(wanted: str, given: str) -> bool | None:
    """Whether both are the same answer, as far as that shows without algebra; None: it does not show."""
    one, other = tidy(wanted), tidy(given)
    if one == other:
        return bool(one)
    first, second = parse_number(one), parse_number(other)
    if first is None or second is None:
        return None
    if first == second:
        return True
    near = abs(first - second) <= Fraction(1, 10**5) * max(Fraction(1), abs(first))
    return None if near and not first.denominator == second.denominator == 1 else False


def compare_symbolically(wanted: str, given: str) -> bool:
    """Whether math-verify takes both for the same. Main thread of a grader process only; no limit of its own."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing limit at each call
    one, other = (parse(f"\\boxed{{{_write_latex(text)}}}", parsing_timeout=0) for text in (wanted, given))
    return bool(verify(one, other, timeout_seconds=0))


def tidy(text: str) -> str:
    r"""The text without what changes no answer: spaces, dollar signs, \left and \right, \text around words, a last full stop,
    brackets around one letter, and the case of words; \dfrac is \frac."""
    text = _DROPPED.sub("", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("−", "-"))
    text = _WRAPPED.sub(r"\1", text).replace("\\%", "%").replace("^\\circ", "°").replace("^{\\circ}", "°")
    text = "".join(text.split()).rstrip(".").casefold()
    return text[1] if len(text) == 3 and text[0] == "(" and text[2] == ")" and text[1].isalpha() else text


def parse_number(tidied: str) -> Fraction | None:
    r"""The exact value of `1,000`, `-0.5`, `3/4` or `\frac{3}{4}`, tidied before; None for anything else."""
    if not tidied or len(tidied) > _MAX_DIGITS:
        return None
    if _NUMBER.fullmatch(tidied) and tidied[-1].isdigit():
        return Fraction(tidied.replace(",", ""))
    match = _FRACTION.fullmatch(tidied)
    if match is None:
        return None
    sign, top, bottom, digit, other, plain_top, plain_bottom = match.groups()
    below = int(bottom or other or plain_bottom)
    above = int(top or digit or plain_top)
    return None if below == 0 else Fraction(-above if sign == "-" else above, below)


def _find_loose(text: str) -> str | None:
    for mark in ("####", "answer is", "answer:", "Answer:"):
        _, found, rest = text.rpartition(mark)
        line = rest.strip().partition("\n")[0].strip(" *$").rstrip(".")
        if found and line:
            return _limit_length(line)
    numbers = _BARE.findall(text[-_TAIL:])
    return numbers[-1].replace("$", "") if numbers else None


def _limit_length(answer: str) -> str | None:
    answer = answer.strip()
    return answer if 0 < len(answer) <= MAX_ANSWER_CHARACTERS else None


def _write_latex(text: str) -> str:
    """Signs outside ASCII that LaTeX writes otherwise."""
    return text.replace("−", "-").replace("×", "\\times ").replace("·", "\\cdot ").replace("π", "\\pi ")
