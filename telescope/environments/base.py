"""What a task is: prompts by index and a way to play one. User code; no sockets, no tokens, no weights in here.

A file of this folder with one `Environment` subclass is an environment of that file's name; its settings are its fields.
An exception out of `prompts` or `play` is a failure of the infrastructure: the rollout is tried again, then left out of its
group. It never becomes a reward of 0. docs/environments.md shows how to write one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from telescope.settings import Settings

Turn = Mapping[str, Any]  # {"role": "user", "content": "rev hhfje"}
ToolSchema = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}


@dataclass(frozen=True)
class Prompt:
    """One task instance: the opening turns and what the environment needs to score the answer."""

    turns: tuple[Turn, ...]
    answer: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reward:
    """The score of one rollout. `metrics` are numbers to be charted, e.g. `{"exact": 1.0}`."""

    total: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    golden_answer: str = ""
    """Shown beside the answer; empty: the prompt's own."""


class Dialogue(Protocol):
    """One line of messages with the policy. Records ids, masks, log-probs and versions of every token behind the
    environment's back."""

    async def say(self, *turns: Turn, tools: Sequence[ToolSchema] = (), max_tokens: int | None = None) -> str:
        """Append turns, let the policy answer, and return its text (the end-of-sequence token not included).

        `tools` are put to the chat template, now and for the rest of the dialogue. `max_tokens` lowers `rollout.max_tokens` for
        this answer. A first turn of the role "assistant" directly after an answer adds no message: it says how that answer
        reads as one (with `tool_calls`), for templates that refuse a tool's result behind anything else.
        """
        ...

    def restart(self, *turns: Turn) -> None:
        """Forget the messages so far (all that was sampled is still trained): the next `say` begins with these turns."""
        ...

    @property
    def truncated(self) -> bool:
        """Whether the last answer was cut off at the token limit."""
        ...

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be added to the dialogue before a prompt leaves no room for an answer."""
        ...


class Chat(Dialogue, Protocol):
    """What a rollout talks through: one dialogue, and on demand further ones beside it."""

    def dialogue(self) -> Dialogue:
        """Another line of messages in the same rollout, for agents within it: several may `say` at once, and one reward counts
        for all."""
        ...

    def close(self) -> None:
        """No more will be asked: another rollout may generate while this one is scored. For rewards that take a while; `say`
        fails afterwards."""
        ...


class Environment(Settings):
    """Base of all environments. Subclasses give `prompts` and `play`, or derive from SingleTurn.

    One instance serves hundreds of rollouts at once: what belongs to a rollout lives in `play`, not on the instance.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "eval")
    """The splits that `prompts` knows; "train" must be among them."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of a split, in a fixed order: the same settings give the same prompts anywhere, in any process.

        A sequence may make its prompts lazily (`draws.LazyPrompts`).
        """
        raise NotImplementedError

    async def play(self, prompt: Prompt, chat: Chat) -> Reward:
        """One rollout. Runs on the event loop: slow synchronous work belongs in `asyncio.to_thread`."""
        raise NotImplementedError


class SingleTurn(Environment):
    """One question, one answer, one reward function (`def` in a thread, `async def` on the event loop)."""

    reward_in_thread: ClassVar[bool] = True
    """False for a reward of microseconds that cannot hang: handing it to a thread would cost more than it takes."""

    def reward(self, prompt: Prompt, answer: str) -> Reward | Awaitable[Reward]:
        raise NotImplementedError

    async def play(self, prompt: Prompt, chat: Chat) -> Reward:
        answer = await chat.say(*prompt.turns)
        if inspect.iscoroutinefunction(self.reward):
            chat.close()
            scored: Reward = await self.reward(prompt, answer)
            return scored
        if self.reward_in_thread:
            chat.close()
            return await asyncio.to_thread(self._reward_now, prompt, answer)
        return self._reward_now(prompt, answer)

    def _reward_now(self, prompt: Prompt, answer: str) -> Reward:
        try:
            scored = self.reward(prompt, answer)
        except StopIteration as error:  # no future can carry it out of a thread: whoever waits would wait for ever
            said = f"{type(self).__name__}.reward raised StopIteration {error}".rstrip()
            raise RuntimeError(said).with_traceback(error.__traceback__) from error
        if not isinstance(scored, Reward):
            raise TypeError(f"{type(self).__name__}.reward returned {type(scored).__name__}, not a Reward")
        return scored
