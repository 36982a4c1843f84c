"""Prompts of so many random words for the models of benchmarks.shapes, and rewards that differ within a group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from telescope.environments.base import Prompt, Reward, SingleTurn
from telescope.environments.draws import Draws, LazyPrompts


class Words(SingleTurn):
    """Reward: the last bit of a checksum of the answer, as good as a coin."""

    reward_in_thread: ClassVar[bool] = False

    length: int = Field(default=128, ge=1)
    """Words, and so tokens, of a prompt."""
    vocabulary: int = Field(default=500, ge=1)
    """Words are w0 to w(vocabulary - 1)."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        return LazyPrompts(100_000, lambda index: self._prompt(split, index))

    def _prompt(self, split: str, index: int) -> Prompt:
        draws = Draws("words", split, index)
        words = " ".join(f"w{draws.between(0, self.vocabulary - 1)}" for _ in range(self.length))
        return Prompt(turns=({"role": "user", "content": words},))

    def reward(self, prompt: Prompt, answer: str) -> Reward:
        return Reward(float(zlib.crc32(answer.encode()) & 1))
