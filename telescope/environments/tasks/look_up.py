"""Look a word up: `get kfa` → the tool says `bjdc` → `bjdc`. What the words mean is drawn anew for each prompt, so that only
the tool can tell: without it nothing but luck (1 in 10,000) is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field

from telescope.environments.base import LazyPrompts, Prompt, Reward, Turn
from telescope.environments.hashed_random import HashedRandom
from telescope.environments.tool_environment import ToolEnvironment, ToolState
from telescope.environments.tools.call_parsers import CallFormat
from telescope.environments.tools.schema import ToolFunction

LETTERS = "abcdefghij"


@dataclass
class Page(ToolState):
    """The one entry of this rollout's dictionary."""

    key: str
    value: str
    found: list[bool] = field(default_factory=list)
    """By answer: whether the tool had told the value once it was read."""


class LookUp(ToolEnvironment):
    """Reward 1 for saying exactly what the word means, else 0."""

    reward_min: ClassVar[float | None] = 0.0
    reward_max: ClassVar[float | None] = 1.0
    in_threads: ClassVar[bool] = False

    # The language of the embedded model; a larger one takes `call_format=json call_tag=tool_call tool_prompt=auto`.
    call_format: CallFormat = "python"
    """How a call is written: `json`, `function`, `python` or `bare` (docs/tools.md)."""
    call_tag: str = Field(default="t", pattern=r"^\w+$")
    """The tag that calls stand in: `<t>look(key='kfa')</t>`."""
    tool_prompt: Literal["auto", "template", "listing", "none"] = "none"
    """How the policy hears of its tool; the embedded model knows it already."""
    result_role: Literal["auto", "tool", "user"] = "tool"
    """Role of the turns that hold results."""
    max_turns: int = Field(default=2, ge=1, le=10_000)
    """Answers of the policy in one rollout, at most."""
    question: str = "get {key}"
    """The user's message."""
    tool_there: bool = True
    """False takes the tool away, for a control: nobody can then know the answer."""
    call_credit: float = Field(default=0.0, ge=0, le=1)
    """With algorithm.credit=turn: so much of the reward is earned by the call that succeeds, and what it is wrong by in the end
    is the last answer's. The total stays the same. 0: all of it is the last answer's."""
    num_train: int = Field(default=100_000, ge=1)
    """Prompts of the train split."""
    num_eval: int = Field(default=512, ge=1)
    """Prompts of the eval split, drawn from another random stream."""
    seed: int = 0
    """Names the random streams of prompts."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        size = {"train": self.num_train, "eval": self.num_eval}[split]
        return LazyPrompts(size, lambda index: self.prompt(HashedRandom("look_up", self.seed, split, index)))

    def prompt(self, draws: HashedRandom) -> Prompt:
        """One question from any stream of draws; the script that trains the base model uses its own."""
        key, value = self.word(draws, 3), self.word(draws, 4)
        turns = ({"role": "user", "content": self.question.format(key=key)},)
        return Prompt(turns, answer=value, facts={"key": key})

    @staticmethod
    def word(draws: HashedRandom, length: int) -> str:
        return "".join(draws.choice(LETTERS) for _ in range(length))

    def initial_state(self, prompt: Prompt) -> Page:
        return Page(prompt.facts["key"], prompt.answer)

    def look(self, key: str, state: Page) -> str:
        """Look a word up.

        Args:
            key: The word.
        """
        if key != state.key:
            raise KeyError(key)
        return state.value

    def tools_for(self, state: Page) -> Sequence[ToolFunction]:
        return [self.look] if self.tool_there else []

    def format_error(self, name: str, error: str) -> str:
        return "?" if self.tool_prompt == "none" else super().format_error(name, error)

    async def reply(self, state: Page, answer: str) -> Sequence[Turn]:
        turns = await super().reply(state, answer)
        state.found.append(state.successes > 0)
        return turns

    def reward(self, prompt: Prompt, state: Page) -> Reward:
        exact = float(state.final_answer.strip() == prompt.answer)
        metrics = {"exact": exact, "asked_the_tool": float(state.successes > 0)}
        return Reward(exact, metrics, turns=self.credit_calls(exact, state.found) if self.call_credit else ())

    def credit_calls(self, total: float, found: Sequence[bool]) -> tuple[float, ...]:
        """Rewards by turn, `call_credit` for the answer whose call succeeds: with 0.5 a right answer after it is (0.5, 0.5),
        a wrong one (0.5, -0.5). A difference of potentials (Ng, Harada and Russell, 1999) without a discount: it changes no
        total, but which policy is best where `algorithm.turn_discount` is below 1."""
        earned = [self.call_credit * told for told in found[:-1]]
        return tuple(after - before for before, after in zip((0.0, *earned), (*earned, total), strict=True))
