"""Dialogues with a state: the order of things, where they run, and how they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from telescope.environments.base import Chat, Prompt, Reward, Turn
from telescope.environments.failures import GraderError, InfrastructureError, PolicyError
from telescope.environments.multi_turn import MultiTurn
from telescope.environments.template import ChatTemplate
from telescope.environments.threads import TimeLimit, run_function
from tests.environments.playing import played


@dataclass
class Sought:
    word: str
    said: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    ended: int = 0


class Guess(MultiTurn):
    """Say `ab`; every wrong word is answered with `no`."""

    max_turns: int = 3

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [Prompt(({"role": "user", "content": "a word"},), answer="ab")]

    def initial_state(self, prompt: Prompt) -> Sought:
        return Sought(prompt.answer)

    def reply(self, state: Sought, answer: str) -> Sequence[Turn]:
        state.said.append(answer)
        state.threads.add(threading.get_ident())
        return [{"role": "user", "content": "no"}]

    def is_done(self, state: Sought) -> bool:
        return state.said[-1] == state.word

    def reward(self, prompt: Prompt, state: Sought) -> Reward:
        return Reward(1.0 / len(state.said) if self.is_done(state) else 0.0, {"guesses": float(len(state.said))})

    def end_state(self, state: Sought) -> None:
        state.ended += 1


async def test_a_dialogue_goes_on_until_it_is_done(tiny: ChatTemplate) -> None:
    reward, answers, recording = await played(tiny, Guess(), "c", "ab")
    assert (reward.total, dict(reward.metrics), reward.tags) == (0.5, {"guesses": 2.0}, ())
    assert answers.prompts == [
        "<|user|>a word<|assistant|>",
        "<|user|>a word<|assistant|>c<|end|><|user|>no<|assistant|>".replace("<|end|>", tiny.end_texts[1]),
    ]
    assert recording.turns == 2


async def test_the_last_turn_is_scored_too_and_says_that_turns_ran_out(tiny: ChatTemplate) -> None:
    reward, answers, _ = await played(tiny, Guess(), "c", "d", "e")
    assert (reward.total, reward.metrics["guesses"], reward.tags) == (0.0, 3.0, ("out_of_turns",))
    assert len(answers.prompts) == 3
    reward, _, _ = await played(tiny, Guess(), "c", "d", "ab")
    assert (reward.total, reward.tags) == (pytest.approx(1 / 3), ())


async def test_a_dialogue_that_outgrows_the_model_is_scored_with_what_there_is(tiny: ChatTemplate) -> None:
    reward, _, recording = await played(tiny, Guess(), "c", max_prompt_tokens=9)
    assert (reward.total, reward.tags) == (0.0, ("overlong",))
    (branch,) = recording.branches
    assert branch.mask.sum() == 2


async def test_plain_functions_run_off_the_loop_unless_they_cannot_hang(tiny: ChatTemplate) -> None:
    seen: list[Sought] = []

    class Kept(Guess):
        def initial_state(self, prompt: Prompt) -> Sought:
            seen.append(super().initial_state(prompt))
            return seen[-1]

    class Quick(Kept):
        in_threads = False

    await played(tiny, Kept(), "ab")
    await played(tiny, Quick(), "ab")
    assert threading.get_ident() not in seen[0].threads
    assert seen[1].threads == {threading.get_ident()}
    assert [state.ended for state in seen] == [1, 1]


async def test_each_method_may_be_async(tiny: ChatTemplate) -> None:
    class Async(Guess):
        async def initial_state(self, prompt: Prompt) -> Sought:  # type: ignore[override]
            return Sought(prompt.answer)

        async def reply(self, state: Sought, answer: str) -> Sequence[Turn]:  # type: ignore[override]
            await asyncio.sleep(0)
            state.said.append(answer)
            return [{"role": "user", "content": "no"}]

        async def reward(self, prompt: Prompt, state: Sought) -> Reward:  # type: ignore[override]
            return Reward(float(len(state.said)))

    assert (await played(tiny, Async(), "c", "ab"))[0].total == 2.0


async def test_a_reward_that_raises_is_the_graders_failure_and_a_reply_that_raises_is_not(tiny: ChatTemplate) -> None:
    class BadReward(Guess):
        def reward(self, prompt: Prompt, state: Sought) -> Reward:
            raise KeyError("x")

    class BadReply(Guess):
        def reply(self, state: Sought, answer: str) -> Sequence[Turn]:
            raise InfrastructureError("the game server is down")

    with pytest.raises(GraderError, match="KeyError: 'x'"):
        await played(tiny, BadReward(), "ab")
    with pytest.raises(InfrastructureError, match="the game server is down"):
        await played(tiny, BadReply(), "ab")


async def test_a_state_is_given_back_whatever_happens(tiny: ChatTemplate) -> None:
    ended = []

    class Holding(Guess):
        def reply(self, state: Sought, answer: str) -> Sequence[Turn]:
            raise PolicyError("it cheated", tag="cheat", total=-1.0)

        async def end_state(self, state: Sought) -> None:  # type: ignore[override]
            ended.append(state.word)

    with pytest.raises(PolicyError, match="it cheated"):
        await played(tiny, Holding(), "ab")
    assert ended == ["ab"]


async def test_giving_back_has_a_time_of_its_own(tiny: ChatTemplate) -> None:
    class Slow(Guess):
        call_limit_s = 0.5

        async def end_state(self, state: Sought) -> None:  # type: ignore[override]
            await asyncio.Event().wait()

    with pytest.raises(TimeLimit, match=r"Slow.end_state did not return within 0\.5 s"):
        await played(tiny, Slow(), "ab")


async def test_a_reply_of_nothing_before_the_end_is_refused(tiny: ChatTemplate) -> None:
    class Silent(Guess):
        def reply(self, state: Sought, answer: str) -> Sequence[Turn]:
            state.said.append(answer)
            return ()

    with pytest.raises(RuntimeError, match=r"Silent.reply gave no turn though is_done is False"):
        await played(tiny, Silent(), "c")


async def test_a_limit_counts_from_when_a_function_begins() -> None:
    release = threading.Event()

    def hangs() -> None:
        release.wait(60)

    try:
        with pytest.raises(TimeLimit, match=r"hangs did not return within 0\.05 s"):
            await run_function(hangs, limit_s=0.05)
    finally:
        release.set()
    assert await run_function(lambda: 3, limit_s=60.0) == 3


async def test_a_reward_over_its_limit_is_the_graders_failure(tiny: ChatTemplate) -> None:
    release = threading.Event()

    class Hanging(Guess):
        reward_limit_s = 0.05

        def reward(self, prompt: Prompt, state: Any) -> Reward:
            release.wait(60)
            return Reward(1.0)

    try:
        with pytest.raises(GraderError, match=r"Hanging.reward did not return within 0.05 s"):
            await played(tiny, Hanging(), "ab")
    finally:
        release.set()


async def test_shapes_on_top_may_ask_with_options(tiny: ChatTemplate) -> None:
    class Terse(Guess):
        async def say(self, chat: Chat, state: Any, turns: Sequence[Turn]) -> str:
            return await chat.say(*turns, max_tokens=4)

    assert (await played(tiny, Terse(), "ab"))[0].total == 1.0
