"""A score from several weighted reward functions, each with the arguments it names.

    rubric = Rubric(parser=AnswerTags()).add(exact).add(AnswerTags().well_formed, 0.2, name="format")
    return await rubric.reward(prompt=prompt, completion=answer)          # total = exact + 0.2 · format

Owns calling and adding up. A function that raises, or gives no finite number, is a failure of the grader that names it; it
never counts as 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from telescope.environments.answer_parsers import AnswerParser, Whole
from telescope.environments.base import Prompt, Reward
from telescope.environments.failures import GraderError, InfrastructureError, PolicyError
from telescope.environments.threads import run_function

ARGUMENTS = ("prompt", "completion", "answer", "facts", "state", "parser", "parsed")
"""prompt: the Prompt; completion: the policy's text; answer: the prompt's right answer; facts: the prompt's; state: of a
dialogue (None elsewhere); parser: the rubric's; parsed: what it makes of the completion."""


@dataclass(frozen=True)
class WeightedReward:
    """One reward function. With weight 0 it is a metric alone."""

    name: str
    function: Callable[..., Any]
    weight: float
    ends: tuple[float, float] | None


class Rubric:
    """`extra`: names of arguments beyond `ARGUMENTS` that the caller of `reward` gives."""

    def __init__(self, *, parser: AnswerParser | None = None, extra: Collection[str] = (), in_threads: bool = True) -> None:
        self._parser = Whole() if parser is None else parser
        self._known = (*ARGUMENTS, *extra)
        self._in_threads = in_threads
        self._parts: dict[str, WeightedReward] = {}

    def add(
        self, function: Callable[..., Any], weight: float = 1.0, *, name: str = "", ends: tuple[float, float] | None = None
    ) -> Rubric:
        """One more function, `def` (in a thread) or `async def`; it returns a number, or a number and the golden answer.

        Raises `ValueError` where it asks for an argument that nobody gives, or its name is taken.
        """
        called_as = name or str(getattr(function, "__name__", type(function).__name__)).lstrip("_")
        strangers = [argument for argument in _list_required(function) if argument not in self._known]
        if strangers:
            raise ValueError(f"reward function {called_as} asks for {strangers[0]!r}; there are {', '.join(self._known)}")
        if called_as in self._parts:
            raise ValueError(f"two reward functions are called {called_as}: give one another name=")
        if not math.isfinite(weight):
            raise ValueError(f"the weight of {called_as} is {weight}, not a finite number")
        self._parts[called_as] = WeightedReward(called_as, function, weight, ends)
        return self

    @property
    def ranges(self) -> Mapping[str, tuple[float, float]]:
        """For `Environment.metrics_ranges`: of the functions that were added with `ends`."""
        return {part.name: part.ends for part in self._parts.values() if part.ends is not None}

    async def reward(self, *, prompt: Prompt, completion: str, state: Any = None, **extra: Any) -> Reward:
        """The sum of weight times value, and each value as a metric. Raises `GraderError`."""
        if not self._parts:
            raise GraderError("the rubric has no reward functions: add one")
        given = {
            "prompt": prompt,
            "completion": completion,
            "answer": prompt.answer,
            "facts": prompt.facts,
            "state": state,
            "parser": self._parser,
            "parsed": self._parser.parse(completion),
            **extra,
        }
        outcomes = await self._run_all(given)
        values = {name: value for name, (value, _) in outcomes.items()}
        golden = dict.fromkeys(answer for _, answer in outcomes.values() if answer is not None)
        total = math.fsum(self._parts[name].weight * value for name, value in values.items())
        return Reward(total, values, golden_answers=tuple(golden))

    async def _run_all(self, given: Mapping[str, Any]) -> dict[str, tuple[float, str | None]]:
        """All functions' outcomes in the order they were added. Those that are `def` share one thread."""
        plain = [part for part in self._parts.values() if not inspect.iscoroutinefunction(part.function)]
        awaited = [part for part in self._parts.values() if inspect.iscoroutinefunction(part.function)]
        work = [run_function(_call_all, plain, given, in_thread=self._in_threads)] if plain else []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(coroutine) for coroutine in (*work, *(_await_one(p, given) for p in awaited))]
        except BaseExceptionGroup as errors:
            raise _find_first(errors) from None
        found = {name: outcome for task in tasks for name, outcome in task.result()}
        return {name: found[name] for name in self._parts}


def _call_all(parts: list[WeightedReward], given: Mapping[str, Any]) -> list[tuple[str, tuple[float, str | None]]]:
    outcomes = []
    for part in parts:
        try:
            outcomes.append((part.name, _read_outcome(part, part.function(**_pick_arguments(part, given)))))
        except Exception as error:
            raise _blame(part, error) from error
    return outcomes


async def _await_one(part: WeightedReward, given: Mapping[str, Any]) -> list[tuple[str, tuple[float, str | None]]]:
    try:
        return [(part.name, _read_outcome(part, await part.function(**_pick_arguments(part, given))))]
    except Exception as error:
        raise _blame(part, error) from error


def _blame(part: WeightedReward, error: Exception) -> Exception:
    """What says itself whose failure it is stays what it is."""
    if isinstance(error, GraderError | InfrastructureError | PolicyError):
        return error
    return GraderError(f"reward function {part.name}: {type(error).__name__}: {error}")


def _find_first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _find_first(first) if isinstance(first, BaseExceptionGroup) else first


def _read_outcome(part: WeightedReward, result: Any) -> tuple[float, str | None]:
    value, golden = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(value, Real) or not math.isfinite(value):
        raise GraderError(f"reward function {part.name} gave {value!r}, not a finite number")
    return float(value), None if golden is None else str(golden)


def _list_required(function: Callable[..., Any]) -> list[str]:
    """Arguments that have to be given: by name, without a default."""
    parameters = inspect.signature(function).parameters.values()
    fixed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p.name for p in parameters if p.kind not in fixed and p.default is inspect.Parameter.empty]


def _pick_arguments(part: WeightedReward, given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(part.function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(given)
    return {p.name: given[p.name] for p in parameters if p.name in given}
