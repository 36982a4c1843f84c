"""What a task is: prompts by index and a way to play one. User code; no sockets, no tokens, no weights in here.

A file of this folder with one `Environment` subclass is an environment of that file's name; its settings are its fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from telescope.settings import Settings

Turn = Mapping[str, str]  # {"role": "user", "content": "rev hhfje"}


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


class Chat(Protocol):
    """A dialogue with the policy. Records ids, masks, log-probs and versions of every token behind the environment's back."""

    async def say(self, *turns: Turn) -> str:
        """Append turns, let the policy answer, and return its text (the end-of-sequence token not included)."""
        ...


class Environment(Settings):
    """Base of all environments. Subclasses give `prompts` and `play`, or derive from SingleTurn."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of a split ("train", "eval"), in a fixed order: the same settings give the same prompts anywhere."""
        raise NotImplementedError

    async def play(self, prompt: Prompt, chat: Chat) -> Reward:
        raise NotImplementedError


class SingleTurn(Environment):
    """One question, one answer, one reward function."""

    def reward(self, prompt: Prompt, answer: str) -> Reward:
        raise NotImplementedError

    async def play(self, prompt: Prompt, chat: Chat) -> Reward:
        return self.reward(prompt, await chat.say(*prompt.turns))
