"""Sentences about settings: a problem with its path, the nearest known name, values as typed, types in words.

Knows no setting by name.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from telescope.settings import Settings

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Any: "anything",
}


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake: `ConfigProblem("trainer.learning_rate", "trainer.learning_rate='fast' must be a number")`."""

    path: str
    sentence: str


class ConfigError(ValueError):
    """All mistakes of a configuration, listed at once."""

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
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


def bare_type(annotation: Any) -> Any:
    """`X` from `X | None` and `Annotated[X, …]`; unions of more stay what they are."""
    if get_origin(annotation) is Annotated:
        return bare_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return bare_type(members[0]) if len(members) == 1 else annotation
    return annotation


def allowed_values(annotation: Any) -> list[str]:
    """`["a", "b", "null"]` of `Literal["a", "b"] | None`; empty where anything else may be given."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return [choice for member in get_args(annotation) for choice in allowed_values(member)]
    return ["null"] if annotation is type(None) else []


def in_words(annotation: Any) -> str:
    """`tuple[float, float]` → `a list of 2: a number, a number`; `int | None` → `a whole number or null`."""
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return in_words(members[0])
    if origin in (Union, types.UnionType):
        return " or ".join(["true, false" if member is bool and len(members) > 1 else in_words(member) for member in members])
    if origin is Literal:
        return " | ".join(map(str, members))
    if origin is tuple and members[-1] is not Ellipsis:
        return f"a list of {len(members)}: {', '.join(in_words(member) for member in members)}"
    if origin in (tuple, list):
        return f"a list, each item {in_words(members[0])}"
    if origin is dict:
        return f"a mapping, each value {in_words(members[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return "a section of settings"
    return _WORDS.get(annotation, "a value of another type")
