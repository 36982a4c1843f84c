r"""Which part of a text is its final answer: the box, what stands behind "answer is", the last formula or number.

Everything within a thought is passed over; a thought that was begun, by the text or by the prompt before it, and never ended
has no answer behind it. Each step passes over the text a fixed number of times. Refuses to judge what it finds.
"""

from __future__ import annotations

import re
from typing import Literal

from telescope.environments.answer_parsers import AnswerParser, AnswerTags, Boxed, ThinkTags
from telescope.environments.graders.notation import tidy
from telescope.environments.graders.quantities import parse_quantity

AnswerForm = Literal["boxed", "any"]
MAX_ANSWER_CHARACTERS = 1000
"""What is longer is not a final answer."""
_TAIL = 400  # characters at the end of a text in which a bare number or formula is looked for
_MARK = re.compile(r"####|\banswers?(?: of [^.\n:=]{1,60})?\**(?: (?:is|are)\b|\s?:|\s?=)\**:?", re.IGNORECASE)
_FORMULA = re.compile(
    r"\$\$(.{1,400}?)\$\$|\\\[(.{1,400}?)\\\]|\\\((.{1,400}?)\\\)|(?<!\\)\$(?![\s$])([^$\n]{1,400}?)(?<![\s\\])\$(?!\d)",
    re.DOTALL,
)
_OPERATOR = "[-+−–*×·÷/]"
_NUMBER = re.compile(
    # No part of what is longer: 05 of 1e-05, 5 of 7-5 and 7 - 5, 50 of 12:50 and 1.250,50, 5 of "minus 5".
    rf"(?<![\w.^{{\\])(?<!\d[,:])(?<![\w)\]}}^{{]{_OPERATOR})(?<![\d)\]}}] {_OPERATOR} )"
    rf"(?<!\b[a-zA-Z] {_OPERATOR} )(?<![Mm]inus )(?<![Nn]egative )"
    r"(?:(?:(?<=[=:(])|(?<=[=:] ))[-+−] )?[-+−]?\$?(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:/\d+|[eE][-+−]?\d+|(?: ?(?:\\times|\\cdot|[×·*x]) ?10)?(?:\^(?:\{[-+−]?\d+\}|[-+−]?\d+)|[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+))?"
    rf"(?: ?\\?%)?(?!\d|[.,:]\d|[eE][-+−]?\d|\^|[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]| ?{_OPERATOR} ?\$?[\d(])"
)
_GROUP = re.compile(r"[(\[](?=[^)\]]*\d)[-+\d.,/ ]{1,80}[)\]]")
_PROSE = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{2,}(?![a-zA-Z}])")
_DENIED = re.compile(
    r"(?:\bnot true|\bfalse|\bwrong|\bdoubt|(?:\bnot|n['’]t|\bnever) (?:think|believe|say|claim|agree|mean))"
    r"(?: that)?(?: the)?(?: (?:final|correct|right))?\s*$",
    re.IGNORECASE,
)
_OTHERWISE = re.compile(
    r"(?:\bnot|\bnever|n['’]t(?: be)?|\bcannot be|\bthan|\bat (?:least|most)|\babout|\bapproximately|\broughly"
    r"|\bnearly|\balmost|\bbetween \S{1,20} and)\s*[*_$`]*$",
    re.IGNORECASE,
)
_NOT_BUT = re.compile(r"not [^.;\n]{1,60}?,? but (?:rather |instead )?", re.IGNORECASE)
_QUOTED = re.compile(r"\*\*(.{1,400}?)\*\*|`([^`\n]{1,400})`|__(.{1,400}?)__|(?<!\*)\*([^*\n]{1,400})\*(?!\*)")
_CANDIDATE = r"(?:\$[^$\n]{1,200}\$|\*\*[^*\n]{1,200}\*\*|`[^`\n]{1,200}`|[-+−]?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?)"
_HEDGED = re.compile(
    rf"(?P<one>{_CANDIDATE})[.,;]?\s+\(?(?:or|but also|and/or|alternatively|but (?:maybe|perhaps|possibly))"
    rf"(?: (?:maybe|perhaps|possibly|else|even|also))?,? (?P<other>{_CANDIDATE})"
    r"(?=[.,;:!?)]*(?:\s+(?!(?:or|and)\b)[a-zA-Z]|\s*$|\n))(?![\w$])",
    re.IGNORECASE,
)
_LEADING = re.compile(
    r"(?:[\s:=]|simply |just |equal to |therefore |thus |indeed |exactly |given by |found to be )+", re.IGNORECASE
)
_ENDING = re.compile(
    r"\s*(?:\n|[.!?](?=\s|$)(?!\d)"
    r"|[,;]?\s(?:because|since|as|so|which|where|that|thus|hence|i\.e\.|for|when|if|but|not|and (?=\w{3,}))\b"
    r"|;\s|\s\((?=[a-z])|,\s(?=[a-z]{3,})| [-–—] |\s\\boxed)",
    re.IGNORECASE,
)


def extract_answer(text: str, form: AnswerForm = "any") -> str | None:
    r"""The part that counts, behind any thought: the last `\boxed{…}`; with "any" also what stands behind the last `####`, in
    <answer> tags, behind "answer is" or "answer:", or the last formula or number near the end. None: there is none."""
    parsers: tuple[AnswerParser, ...] = (Boxed(),) if form == "boxed" else (Boxed(), AnswerTags())
    for parser in parsers:
        found = ThinkTags(parser).parse(text)
        if found is not None:
            return _limit_length(found)
    rest = ThinkTags().parse(text)
    return None if form == "boxed" or rest is None else _limit_length(_find_loose(rest) or "")


def extract_golden(text: str) -> str:
    """The answer that a data set's answer or worked solution gives: boxed, behind `####`, else the whole text."""
    boxed = Boxed().parse(text)
    if boxed is not None:
        return boxed
    _, mark, rest = text.rpartition("####")
    return rest.strip() if mark else text.strip()


def find_said(text: str) -> str | None:
    """What stands behind the last "answer is" or its like."""
    for mark in reversed(list(_MARK.finditer(text))):
        if _DENIED.search(text[max(0, mark.start() - 40) : mark.start()]):
            continue
        said = _read_said(text[mark.end() : mark.end() + 2 * MAX_ANSWER_CHARACTERS])
        if said:
            return said
    return None


def _find_loose(text: str) -> str | None:
    said = find_said(text)
    if said is not None:
        return said
    tail = text[-_TAIL:]
    marks = list(_MARK.finditer(tail))
    if marks and _DENIED.search(tail[: marks[-1].start()]) and not re.search(r"[.!?]\s|\n", tail[marks[-1].end() :].strip()):
        return None
    line = tail.strip().rpartition("\n")[2].strip("*_` .")
    if ("\\" in line or "(" in line) and not _PROSE.search(line) and "$" not in line:
        return line
    if len(line) < _TAIL and parse_quantity(tidy(line)) is not None:
        return line
    formulas = list(_FORMULA.finditer(tail))
    outside = list(tail)
    for formula in formulas:
        outside[formula.start() : formula.end()] = " " * len(formula[0])
    groups = list(_GROUP.finditer("".join(outside)))
    numbers = [*_NUMBER.finditer("".join(outside))]
    if groups and (not numbers or groups[-1].end() > numbers[-1].end() > groups[-1].start()):
        numbers = groups
    last = max((found.end() for found in (*formulas, *numbers)), default=0)
    for hedged in _HEDGED.finditer(tail):
        if hedged.start() < last <= hedged.end():
            return _read_hedged(hedged)
    if formulas and (not numbers or numbers[-1].end() < formulas[-1].end()):
        return _take_group(formulas[-1])
    if not numbers or _OTHERWISE.search(tail[: numbers[-1].start()]):
        return None
    return numbers[-1][0].replace("$", "")


def _read_said(rest: str) -> str:
    """The answer at the beginning of `rest`, without the sentence around it."""
    leading = _LEADING.match(rest)
    rest = rest[leading.end() if leading else 0 :]
    otherwise = _NOT_BUT.match(rest)
    rest = rest[otherwise.end() if otherwise else 0 :]
    hedged = _HEDGED.match(rest)
    if hedged is not None:
        return _read_hedged(hedged)
    quoted = _QUOTED.match(rest)
    if quoted is not None:
        return _read_said(_take_group(quoted)) if _FORMULA.search(quoted[0]) else _take_group(quoted).strip().rstrip(".:")
    rest = rest.lstrip("*_` ")
    formula = _FORMULA.match(rest)
    if formula is not None:
        behind = rest[formula.end() : formula.end() + 20]
        joined = re.match(r",? ?(?:and|or|,) ?\$", behind)
        if not joined:
            return _take_group(formula).strip().rstrip(".,")
    ending = _ENDING.search(rest)
    said = rest[: ending.start()] if ending is not None else rest
    inside = _FORMULA.search(said)
    if inside is not None and said.count("$") == 2 and not _NUMBER.search(said[: inside.start()]):
        return _take_group(inside).strip().rstrip(".,")
    return said.lstrip(" *_`,").rstrip(" *_`,.")


def _read_hedged(hedged: re.Match[str]) -> str:
    """Both candidates, so that only a list of two is them; one, where they are the same number in two spellings."""
    one, other = (hedged[name].strip("$*`").rstrip(".:") for name in ("one", "other"))
    values = parse_quantity(tidy(one)), parse_quantity(tidy(other))
    return one if values[0] is not None and values[0] == values[1] else f"{one} or {other}"


def _take_group(match: re.Match[str]) -> str:
    return next((group for group in match.groups() if group is not None), "")


def _limit_length(answer: str) -> str | None:
    answer = answer.strip()
    return answer if 0 < len(answer) <= MAX_ANSWER_CHARACTERS else None
