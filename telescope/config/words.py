"""Sentences about settings: a problem with its path, the nearest known name, values as the user typed them.

Knows no setting by name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One mistake: `Problem("trainer.learning_rate", "trainer.learning_rate='fast' must be a number")`."""

    path: str
    sentence: str


class ConfigError(ValueError):
    """All mistakes of a configuration, listed at once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        count = len(self.problems)
        opening = "The configuration has a mistake" if count == 1 else f"The configuration has {count} mistakes"
        super().__init__("\n".join([f"{opening}:", *(f"  - {problem.sentence}" for problem in self.problems)]))


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The known name that `name` was probably meant to be, e.g. `clip_high` for `clip_hihg`; None where none is near: as much
    alike as `alike`, 1 for the same."""
    close = difflib.get_close_matches(name.lower(), [candidate.lower() for candidate in known], n=1, cutoff=alike)
    return next((candidate for candidate in known if candidate.lower() == close[0]), None) if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean x?`, or the known names where none is near: always something to go on with."""
    names = sorted(known)
    guess = nearest(name, names)
    if guess is not None:
        return f" Did you mean {guess}?"
    return f" There {'is' if len(names) == 1 else 'are'} {', '.join(names)}." if names else ""


def typed(value: Any) -> str:
    """A value as one would type it: `null`, `true`, `'fast'`, `[1, 2]`; long ones are cut."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:76]} ..."
