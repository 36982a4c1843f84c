"""A dialogue in which the environment answers back: a state, a reply to each answer, an end, and a score.

    initial_state ─▶ say(opening) ─▶ reply(state, answer) ─▶ is_done? ─▶ say(reply) ─▶ … ─▶ reward(prompt, state)

Owns the order of these calls and where they run. Refuses to keep anything of a rollout on the instance: all of it is in the
state, which `reply` changes in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from telescope.environments.base import Chat, Environment, Prompt, Reward, Turn
from telescope.environments.failures import ContextFull
from telescope.environments.threads import run_function
from telescope.environments.validate import find_turns_mistake, must_override

OUT_OF_TURNS = "out_of_turns"
OVERLONG = "overlong"
END_STATE_LIMIT_S = 60.0


class MultiTurn(Environment):
    """Each method may be `def` or `async def`. A `def` runs in a thread unless `in_threads` is False."""

    in_threads: ClassVar[bool] = True
    """False where all `def`s take microseconds and cannot hang."""
    call_limit_s: ClassVar[float | None] = None
    """Seconds that one call of `initial_state`, `reply` or `is_done` may take; None: `rollout.timeout_s` alone counts. Also
    those of `end_state`, which no time-out of the rollout reaches; None: `END_STATE_LIMIT_S`."""

    max_turns: int = Field(default=8, ge=1, le=10_000)
    """Answers of the policy in one rollout, at most."""

    @property
    def turn_limit(self) -> int:
        """Answers after which the dialogue is cut off."""
        return self.max_turns

    @must_override
    def initial_state(self, prompt: Prompt) -> Any:
        """Whatever one rollout needs to remember; any object."""
        raise NotImplementedError

    def opening(self, prompt: Prompt, state: Any) -> Sequence[Turn]:
        """The turns before the first answer: those of the prompt, unless the state adds to them."""
        return prompt.turns

    @must_override
    def reply(self, state: Any, answer: str) -> Sequence[Turn] | Awaitable[Sequence[Turn]]:
        """Take the policy's answer into the state, and give the turns that follow. What it gives at the end is not said."""
        raise NotImplementedError

    @must_override
    def is_done(self, state: Any) -> bool | Awaitable[bool]:
        """Whether the dialogue is over; asked after each reply."""
        raise NotImplementedError

    @must_override
    def reward(self, prompt: Prompt, state: Any) -> Reward | Awaitable[Reward]:
        """The score of the whole dialogue, however it ended."""
        raise NotImplementedError

    def end_state(self, state: Any) -> Awaitable[None] | None:
        """Give back what the state holds (a sandbox, a file). Called once for each state that a rollout has got, however the
        rollout ends. Not for one that `initial_state` returns after its time, and not where the worker leaves while all
        threads are taken: what outlives a process needs an end of its own."""

    async def say(self, chat: Chat, state: Any, turns: Sequence[Turn]) -> str:
        """Ask the policy; the one place where shapes on top of this one add options to `chat.say`."""
        return await chat.say(*turns)

    async def play(self, prompt: Prompt, chat: Chat) -> Reward:
        state = await self.run_method(self.initial_state, prompt)
        try:
            tags = await self._converse(prompt, state, chat)
            if self.in_threads or inspect.iscoroutinefunction(self.reward):
                chat.close()
            reward = await self.run_reward(self.reward, prompt, state, in_thread=self.in_threads)
        finally:
            await self.run_end_state(state)
        return replace(reward, tags=(*reward.tags, *tags)) if tags else reward

    async def run_end_state(self, state: Any) -> None:
        """`end_state`, where and for as long as it may run."""
        if type(self).end_state is not MultiTurn.end_state:  # else it would wait for a free thread for nothing
            limit_s = END_STATE_LIMIT_S if self.call_limit_s is None else self.call_limit_s
            await run_function(self.end_state, state, limit_s=limit_s, in_thread=self.in_threads)

    async def run_method(self, function: Any, *arguments: Any) -> Any:
        """A method of a subclass, where and for as long as it may run."""
        return await run_function(function, *arguments, limit_s=self.call_limit_s, in_thread=self.in_threads)

    async def _converse(self, prompt: Prompt, state: Any, chat: Chat) -> tuple[str, ...]:
        """Talk until it is over. Gives the tags that say why it was cut off."""
        turns = self.opening(prompt, state)
        for _ in range(self.turn_limit):
            try:
                answer = await self.say(chat, state, turns)
            except ContextFull:
                return (OVERLONG,)
            turns, done = await self._reply_and_check(state, answer)
            if done:
                return ()
            mistake = find_turns_mistake(turns)
            if mistake:
                raise TypeError(f"{type(self).__name__}.reply: {mistake}")
            if not turns:
                raise RuntimeError(f"{type(self).__name__}.reply gave no turn though is_done is False: nothing can follow")
        return (OUT_OF_TURNS,)

    async def _reply_and_check(self, state: Any, answer: str) -> tuple[Sequence[Turn], bool]:
        if inspect.iscoroutinefunction(self.reply) or inspect.iscoroutinefunction(self.is_done):
            return await self.run_method(self.reply, state, answer), await self.run_method(self.is_done, state)
        turns, done = await self.run_method(self._reply_and_check_now, state, answer)  # one thread for both
        return turns, done

    def _reply_and_check_now(self, state: Any, answer: str) -> tuple[Any, Any]:
        return self.reply(state, answer), self.is_done(state)
