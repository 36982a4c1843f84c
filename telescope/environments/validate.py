"""How an environment may be written, in words: what its class lacks, and what is not a message or a prompt.

Owns sentences about the user's own code, said when it is loaded or when a prompt is made. Refuses to judge what a task is.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_MESSAGE = '{"role": "user", "content": "…"}'
_SHOWN = 60


def must_override(function: F) -> F:
    """Marks a method that every environment of this shape writes itself, unless it writes its own `play`."""
    function.__dict__["must_override"] = True
    return function


def formerly(name: str) -> Callable[[F], F]:
    """Marks a method that users may override and that was called `name` before: an override of that name is never called."""

    def mark(function: F) -> F:
        function.__dict__["formerly"] = name
        return function

    return mark


def find_turns_mistake(turns: Any) -> str:
    """What is wrong with a list of messages; "" where it is one."""
    if isinstance(turns, str | bytes | Mapping) or not isinstance(turns, Sequence):
        return f"{_shorten(turns)} is not a list of messages like {_MESSAGE}"
    return next(filter(None, map(find_message_mistake, turns)), "")


def find_message_mistake(turn: Any) -> str:
    """What is wrong with one message; "" where it is one. A template would write "None" where the text is missing: only an
    assistant's may be, as its calls can stand for it."""
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        return f"{_shorten(turn)} is not a message like {_MESSAGE}"
    if turn.get("content") is None and (turn["role"] != "assistant" or not {"content", "tool_calls"} & turn.keys()):
        return f"the message {_shorten(turn)} has no content"
    return ""


def find_class_mistake(kind: type[Any]) -> str:
    """The methods that a class lacks, so that no rollout of it could be scored, or that have a name of former times; "" where
    there are none."""
    if lacking := _list_missing(kind):
        return f"{kind.__name__} defines no {' and no '.join(lacking)} (docs/environments.md)"
    renamed = (f"{kind.__name__}.{old} is never called: name it {new} (CHANGELOG.md)" for old, new in _list_renamed(kind))
    return next(renamed, "")


def find_ranges_mistake(ranges: Mapping[str, Any]) -> str:
    """The first of `metrics_ranges` that is not the two ends of a metric; "" where there is none."""
    for name, ends in ranges.items():
        if not _are_ends(ends):
            return f"metrics_ranges: {name} has {_shorten(ends)}, not its two ends like (0.0, 1.0)"
    return ""


def find_prompts_mistake(kind: type[Any], split: str, prompts: Any) -> str:
    """Why what `prompts(split)` gave is not a sequence; "" where it is one."""
    if inspect.iscoroutine(prompts):
        prompts.close()
        return f"{kind.__name__}.prompts must be a plain `def`, no `async def`; what has to be awaited belongs in set_up"
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__"):
        return f"prompts({split!r}) gave {_shorten(prompts)}: give a list (or LazyPrompts)"
    return ""


def describe_not_awaitable(method: str, given: Any) -> str:
    """For a method that has to be `async def` and gave its result at once."""
    return f"{method} must be an `async def`: it gave {_shorten(given)} at once"


def _list_missing(kind: type[Any]) -> list[str]:
    names = {name for base in kind.__mro__ for name in vars(base)}
    marked = {name for name in names if _is_marked(kind, name)}
    shape = next(base for base in kind.__mro__ if "play" in vars(base))
    if not any(_is_marked(shape, name) for name in vars(shape)):  # a `play` of its own asks for what it asks for
        marked &= {"prompts"}
    return sorted(marked)


def _list_renamed(kind: type[Any]) -> list[tuple[str, str]]:
    """(former name, name) of the methods that the class defines by their former name alone."""
    methods = [(name, inspect.getattr_static(kind, name)) for base in kind.__mro__ for name in vars(base)]
    found = {(getattr(method, "formerly", ""), name) for name, method in methods}
    return sorted((old, new) for old, new in found if old and hasattr(kind, old))


def _is_marked(kind: type[Any], name: str) -> bool:
    return getattr(inspect.getattr_static(kind, name, None), "must_override", False) is True


def _are_ends(ends: Any) -> bool:
    if not isinstance(ends, Sequence) or len(ends) != 2:
        return False
    return all(isinstance(end, int | float) and not math.isnan(end) for end in ends) and ends[0] <= ends[1]


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
