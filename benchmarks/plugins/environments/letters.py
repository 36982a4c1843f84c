"""Prompts of so many random letters for the models of benchmarks.shapes, and rewards that differ within a group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from string import ascii_lowercase
from typing import ClassVar

from pydantic import Field

from telescope.environments.base import LazyPrompts, Prompt, Reward, SingleTurn
from telescope.environments.hashed_random import HashedRandom


class Letters(SingleTurn):
    """Reward: the last bit of a checksum of the answer, as good as a coin."""

    reward_in_thread: ClassVar[bool] = False

    length: int = Field(default=128, ge=1)
    """Letters, and so tokens, of a prompt."""
    number: int = Field(default=100_000, ge=1)
    """Prompts of a split."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        return LazyPrompts(self.number, lambda index: self._prompt(split, index))

    def _prompt(self, split: str, index: int) -> Prompt:
        draws = HashedRandom("letters", split, index)
        letters = "".join(draws.choice(ascii_lowercase) for _ in range(self.length))
        return Prompt(turns=({"role": "user", "content": letters},))

    def reward(self, prompt: Prompt, answer: str) -> Reward:
        return Reward(float(zlib.crc32(answer.encode()) & 1))
