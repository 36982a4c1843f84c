"""Where an answer stands in the policy's text, and whether it is one of the right ones, for questions of the user's own.

A pattern may take for ever on a hostile text, so `search_pattern` belongs in a grader process (graders/pool.py). Refuses to
know a row or a prompt.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

from telescope.environments.answer_parsers import AnswerParser, AnswerTags, Boxed, ThinkTags, Whole
from telescope.environments.graders.extraction import extract_answer
from telescope.environments.graders.maths import Conventions, compare_exactly, tidy
from telescope.environments.graders.quantities import parse_quantity

AnswerPlace = Literal["whole", "boxed", "tag", "any"]
Scoring = Literal["exact", "number", "math", "regex", "function", "judge"]


@dataclass(frozen=True)
class LooseAnswer:
    """Boxed, behind ####, in tags, behind "answer is", or the last formula or number (graders/extraction.py)."""

    def parse(self, completion: str) -> str | None:
        return extract_answer(completion, "any")

    def well_formed(self, completion: str) -> float:
        return float(self.parse(completion) is not None)

    def wrap(self, text: str) -> str:
        return Boxed().wrap(text)


WITHIN: dict[AnswerPlace, Whole | Boxed | AnswerTags | LooseAnswer] = {
    "whole": Whole(),
    "boxed": Boxed(),
    "tag": AnswerTags(),
    "any": LooseAnswer(),
}


def make_parser(place: AnswerPlace) -> AnswerParser:
    """Reads the answer behind any thought."""
    within = WITHIN[place]
    return within if isinstance(within, LooseAnswer) else ThinkTags(within)


def wrap_answer(text: str, place: AnswerPlace) -> str:
    """The answer as the policy has to write it."""
    return WITHIN[place].wrap(text)


def is_same_text(wanted: str, given: str, ignore_case: bool = False) -> bool:
    """Whether both are the same words; white space between them, and how an accent is written, does not matter."""
    one, other = (" ".join(unicodedata.normalize("NFC", text).split()) for text in (wanted, given))
    return one.casefold() == other.casefold() if ignore_case else one == other


def is_number(text: str) -> bool:
    """Whether the whole text is a number, with a unit or a percent sign at most."""
    return parse_quantity(tidy(text)) is not None


def is_same_number(wanted: str, given: str, conventions: Conventions) -> bool:
    """Whether the answer is the number that is wanted, in any of the usual spellings."""
    return compare_exactly(wanted, given, conventions) is True


def make_pattern(pattern: str, answer: str) -> str:
    """The pattern that an answer must hold: with the right answer in place of {answer}, which stands for itself there; without
    a pattern the right answer is one."""
    return pattern.replace("{answer}", re.escape(answer)) if pattern else answer


def find_pattern_mistake(pattern: str) -> str:
    """Why it is not a regular expression; "" where it is one."""
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    except OverflowError:
        return "a number of repetitions is too large"
    except RecursionError:
        return "it is nested too deeply"
    return ""


def search_pattern(pattern: str, text: str, ignore_case: bool) -> bool:
    """Whether the pattern is found in the text; without a limit."""
    return re.search(pattern, text, re.IGNORECASE if ignore_case else 0) is not None
