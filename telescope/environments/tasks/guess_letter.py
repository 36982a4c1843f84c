"""Find a letter: `a-g` → `d`, `later` → `f`, `earlier` → `e`. Several turns, and an answer that has to follow the replies.

Seven letters and three guesses: who halves what is left always finds it, whoever walks from one end does in three of seven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import Field, model_validator

from telescope.environments.base import LazyPrompts, Prompt, Reward, Turn
from telescope.environments.hashed_random import HashedRandom
from telescope.environments.multi_turn import MultiTurn

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class LetterSearch:
    """One search: `low` and `high` bound what the replies so far have left, as indices of `ALPHABET`."""

    secret: int
    low: int
    high: int
    guesses: list[str] = field(default_factory=list)
    sensible: int = 0
    """Guesses that the replies before them had not ruled out."""
    found: bool = False


class GuessLetter(MultiTurn):
    """Reward 1 for finding the letter within `max_turns` guesses, else 0."""

    in_threads: ClassVar[bool] = False
    metrics_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"exact": (0, 1), "sensible": (0, 1)}

    max_turns: int = Field(default=3, ge=1, le=26)
    """Guesses that are allowed."""
    letters: int = Field(default=7, ge=2, le=26)
    """Neighbouring letters of the alphabet that hide one."""
    num_train: int = Field(default=100_000, ge=1)
    """Prompts of the train split."""
    num_eval: int = Field(default=512, ge=1)
    """Prompts of the eval split, drawn from another random stream."""
    seed: int = 0
    """Names the random streams of prompts."""

    @model_validator(mode="after")
    def _the_letters_do_not_fit_in_the_guesses(self) -> GuessLetter:
        if self.max_turns >= self.letters:
            raise ValueError(f"max_turns={self.max_turns} guesses find any of letters={self.letters}: give fewer guesses")
        return self

    def prompts(self, split: str) -> Sequence[Prompt]:
        size = {"train": self.num_train, "eval": self.num_eval}[split]
        return LazyPrompts(size, lambda index: self.prompt(HashedRandom("guess_letter", self.seed, split, index)))

    def prompt(self, draws: HashedRandom) -> Prompt:
        """One search from any stream of draws; the script that trains the base model uses its own."""
        first = draws.between(0, len(ALPHABET) - self.letters)
        secret = draws.between(first, first + self.letters - 1)
        asked = f"{ALPHABET[first]}-{ALPHABET[first + self.letters - 1]}"
        return Prompt(({"role": "user", "content": asked},), answer=ALPHABET[secret], facts={"first": first, "secret": secret})

    def initial_state(self, prompt: Prompt) -> LetterSearch:
        first = int(prompt.facts["first"])
        return LetterSearch(int(prompt.facts["secret"]), first, first + self.letters - 1)

    def reply(self, state: LetterSearch, answer: str) -> Sequence[Turn]:
        guess = answer.strip()
        state.guesses.append(guess)
        place = ALPHABET.find(guess) if len(guess) == 1 else -1
        if place < 0:
            return ({"role": "user", "content": "one letter"},)
        state.sensible += state.low <= place <= state.high
        state.found = place == state.secret
        if place < state.secret:
            state.low = max(state.low, place + 1)
            return ({"role": "user", "content": "later"},)
        state.high = min(state.high, place - 1)
        return ({"role": "user", "content": "earlier"},)

    def is_done(self, state: LetterSearch) -> bool:
        return state.found

    def reward(self, prompt: Prompt, state: LetterSearch) -> Reward:
        guesses = len(state.guesses)
        metrics = {"exact": float(state.found), "guesses": float(guesses), "sensible": state.sensible / max(guesses, 1)}
        return Reward(float(state.found), metrics)
