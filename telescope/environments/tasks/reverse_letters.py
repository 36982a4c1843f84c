"""Reverse the letters: `rev hhfje` -> `ejfhh`. Millions of distinct prompts, so that no reward comes from remembering them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from telescope.environments.base import LazyPrompts, Prompt, Reward, SingleTurn
from telescope.environments.hashed_random import HashedRandom


class ReverseLetters(SingleTurn):
    """Reward 1 for exactly the reversed letters, else 0 (or a part, see `partial_credit`)."""

    reward_in_thread: ClassVar[bool] = False
    metrics_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "exact": (0, 1),
        "valid_format": (0, 1),
        "same_letters": (0, 1),
        "in_place": (0, 1),
    }

    letters: str = "abcdefghij"
    """The letters that words are made of."""
    min_length: int = Field(default=4, ge=1)
    """Letters of the shortest word."""
    max_length: int = Field(default=7, ge=1, le=64)
    """Letters of the longest word."""
    partial_credit: float = Field(default=0.0, ge=0, lt=1)
    """A wrong answer earns this times its share of letters in the right place."""
    num_train: int = Field(default=100_000, ge=1)
    """Prompts of the train split."""
    num_eval: int = Field(default=512, ge=1)
    """Prompts of the eval split, drawn from another random stream."""
    seed: int = 0
    """Names the random streams of prompts."""

    @field_validator("letters")
    @classmethod
    def _letters_are_distinct(cls, letters: str) -> str:
        if len(letters) < 2 or len(set(letters)) != len(letters) or any(letter.isspace() for letter in letters):
            raise ValueError(f"letters={letters!r} must be two or more different characters without spaces")
        return letters

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> ReverseLetters:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length={self.min_length} must not be above max_length={self.max_length}")
        return self

    def prompts(self, split: str) -> Sequence[Prompt]:
        return LazyPrompts(self._size(split), lambda index: self._prompt(split, index))

    def reward(self, prompt: Prompt, answer: str) -> Reward:
        given, wanted = answer.strip(), prompt.answer
        exact = given == wanted
        in_place = sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted))
        metrics = {
            "exact": float(exact),
            "valid_format": float(bool(given) and set(given) <= set(self.letters)),
            "same_letters": float(sorted(given) == sorted(wanted)),
            "in_place": in_place,
        }
        return Reward(1.0 if exact else self.partial_credit * in_place, metrics, golden_answers=(wanted,))

    def _size(self, split: str) -> int:
        return {"train": self.num_train, "eval": self.num_eval}[split]

    def _prompt(self, split: str, index: int) -> Prompt:
        word = self.word(HashedRandom("reverse_letters", self.seed, split, index))
        return Prompt(turns=({"role": "user", "content": f"rev {word}"},), answer=word[::-1])

    def word(self, draws: HashedRandom) -> str:
        """One word of this task from any stream of draws; the script that trains the base model uses its own stream."""
        length = draws.between(self.min_length, self.max_length)
        return "".join(draws.choice(self.letters) for _ in range(length))
