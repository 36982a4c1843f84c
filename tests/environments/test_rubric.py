"""Rubrics: weights, arguments by name, and no failure that counts as 0."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from telescope.environments.answer_parsers import AnswerTags
from telescope.environments.base import Prompt
from telescope.environments.failures import GraderError, InfrastructureError
from telescope.environments.rubric import Rubric

PROMPT = Prompt(({"role": "user", "content": "2+2?"},), answer="4", facts={"hard": 0.5})


def exact(parsed: str | None, answer: str) -> float:
    return float(parsed == answer)


def difficulty(facts: Mapping[str, Any]) -> float:
    return float(facts["hard"])


async def judged(completion: str, prompt: Prompt) -> tuple[float, str]:
    await asyncio.sleep(0)
    return 1.0 if "4" in completion else 0.0, "four"


async def test_a_total_is_the_sum_of_weights_times_values() -> None:
    tags = AnswerTags()
    rubric = (
        Rubric(parser=tags)
        .add(exact, ends=(0.0, 1.0))
        .add(tags.well_formed, 0.2, name="format")
        .add(judged, 0.5)
        .add(difficulty, 0.0)
    )
    reward = await rubric.reward(prompt=PROMPT, completion="it is <answer>4</answer>")
    assert reward.total == pytest.approx(1.7)
    assert dict(reward.metrics) == {"exact": 1.0, "format": 1.0, "judged": 1.0, "difficulty": 0.5}
    assert list(reward.metrics) == ["exact", "format", "judged", "difficulty"]
    assert reward.golden_answers == ("four",)
    assert rubric.ranges == {"exact": (0.0, 1.0)}


async def test_functions_that_are_not_async_share_a_thread_off_the_loop() -> None:
    ran: list[int] = []

    def where(state: Any) -> float:
        ran.append(threading.get_ident())
        return float(state)

    def again(completion: str) -> float:
        ran.append(threading.get_ident())
        return 0.0

    reward = await Rubric().add(where).add(again).reward(prompt=PROMPT, completion="", state=3)
    assert reward.total == 3.0
    assert ran[0] == ran[1] != threading.get_ident()


@pytest.mark.parametrize("value", [float("nan"), None, "1", [1.0]])
async def test_what_is_no_finite_number_is_the_graders_failure(value: Any) -> None:
    def odd(completion: str) -> Any:
        return value

    with pytest.raises(GraderError, match="reward function odd gave"):
        await Rubric().add(odd).reward(prompt=PROMPT, completion="")


async def test_a_function_that_raises_is_named_and_its_sibling_does_not_hide_it() -> None:
    def broken(completion: str) -> float:
        return {"a": 1.0}[completion]

    with pytest.raises(GraderError, match="reward function broken: KeyError: 'x'"):
        await Rubric().add(judged).add(broken).reward(prompt=PROMPT, completion="x")


async def test_a_judge_that_is_down_is_no_failure_of_the_grader() -> None:
    async def down(completion: str) -> float:
        raise InfrastructureError("the judge is down")

    with pytest.raises(InfrastructureError, match="the judge is down"):
        await Rubric().add(exact).add(down).reward(prompt=PROMPT, completion="x")


def test_an_argument_that_nobody_gives_is_refused_when_the_rubric_is_made() -> None:
    def asks(completions: str) -> float:
        return 0.0

    with pytest.raises(ValueError, match="reward function asks asks for 'completions'; there are prompt, completion"):
        Rubric().add(asks)
    with pytest.raises(ValueError, match="two reward functions are called exact"):
        Rubric().add(exact).add(exact)
    assert Rubric(extra=("completions",)).add(asks) is not None
