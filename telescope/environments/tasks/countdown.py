"""Countdown: `use 3 5 8 make 10` -> `5+8-3`. Every number exactly once, and the value must be right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from telescope.environments.base import LazyPrompts, Prompt, Reward, SingleTurn, Turn
from telescope.environments.graders.expression import NotAnExpression, parse_expression
from telescope.environments.hashed_random import HashedRandom

_TRIES = 1000


@dataclass(frozen=True)
class CountdownProblem:
    numbers: tuple[int, ...]
    target: int
    solution: str
    """One expression that reaches the target; there may be others."""


class Countdown(SingleTurn):
    """Reward 1 for a right expression, `wrong_value_reward` for one of all numbers with another value, else 0; and beside it
    `format_bonus` for the form of the answer."""

    reward_in_thread: ClassVar[bool] = False
    metrics_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "exact": (0, 1),
        "valid_format": (0, 1),
        "all_numbers": (0, 1),
    }

    num_numbers: int = Field(default=3, ge=2, le=12)
    """Numbers of a prompt; an answer uses each exactly once."""
    min_number: int = Field(default=1, ge=0)
    """Smallest number drawn."""
    max_number: int = Field(default=9, ge=1, le=10**6)
    """Largest number drawn."""
    operators: str = "+-"
    """Which of + - * / an answer may use; targets are made with them."""
    min_target: int = 1
    """Smallest target set."""
    max_target: int = 999
    """Largest target set."""
    wrong_value_reward: float = Field(default=0.1, ge=0, lt=1)
    """Reward of an expression that uses every number once but has another value."""
    instruction: str = "use {numbers} make {target}"
    """The user's message; {numbers} and {target} are filled in. The default is what the embedded model `tiny` knows; give a
    larger model whole sentences."""
    answer_tag: str | None = Field(default=None, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """Read the expression from the last <tag>...</tag> of the answer; null: the whole answer is the expression."""
    format_bonus: float = Field(default=0.0, ge=0, le=1)
    """Added to the reward where an expression stands in the tag, right or wrong; half of it where anything else does. Needs
    answer_tag."""
    examples: int = Field(default=0, ge=0, le=64)
    """Solved problems shown before the question, as earlier turns of the dialogue: the same ones before each question, so that
    their cached keys and values serve all prompts."""
    num_train: int = Field(default=100_000, ge=1)
    """Prompts of the train split."""
    num_eval: int = Field(default=512, ge=1)
    """Prompts of the eval split, drawn from another random stream. With few small numbers both meet the same problems."""
    seed: int = 0
    """Names the random streams of prompts."""

    @field_validator("operators")
    @classmethod
    def _operators_are_known(cls, operators: str) -> str:
        if not operators or len(set(operators)) != len(operators) or not set(operators) <= set("+-*/"):
            raise ValueError(f"operators={operators!r} must be some of +-*/, each at most once")
        return operators

    @model_validator(mode="after")
    def _problems_can_be_made(self) -> Countdown:
        for low, high in (("min_number", "max_number"), ("min_target", "max_target")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)} must not be above {high}={getattr(self, high)}")
        if self.format_bonus and self.answer_tag is None:
            raise ValueError(
                f"format_bonus={self.format_bonus} needs answer_tag: set it to the tag that the instruction asks for"
            )
        for field in ("{numbers}", "{target}"):
            if field not in self.instruction:
                raise ValueError(f"instruction={self.instruction!r} must contain {field}")
        self.problem(HashedRandom("countdown", self.seed, "probe"))
        return self

    def prompts(self, split: str) -> Sequence[Prompt]:
        return LazyPrompts(self._size(split), lambda index: self._prompt(split, index))

    def right_answer(self, prompt: Prompt) -> str:
        return self._wrap_in_tag(prompt.answer)

    def reward(self, prompt: Prompt, answer: str) -> Reward:
        text = self._find_expression(answer)
        valid, all_used, exact = self._judge(text or "", prompt.facts["numbers"], prompt.facts["target"])
        total = 1.0 if exact else self.wrong_value_reward if all_used else 0.0
        if self.format_bonus and text is not None:
            total += self.format_bonus * (1.0 if valid else 0.5)
        metrics = {"exact": float(exact), "valid_format": float(valid), "all_numbers": float(all_used)}
        return Reward(total, metrics, golden_answers=(prompt.answer,))

    def _find_expression(self, answer: str) -> str | None:
        """The part of the answer that must be the expression; None where the tag is missing."""
        if self.answer_tag is None:
            return answer
        opening, closing = f"<{self.answer_tag}>", f"</{self.answer_tag}>"
        before, found, _ = answer.rpartition(closing)
        return before.rpartition(opening)[2] if found and opening in before else None

    def _judge(self, text: str, numbers: tuple[int, ...], target: int) -> tuple[bool, bool, bool]:
        """Whether the text is an expression, uses all numbers exactly once, and has the wanted value as well."""
        try:
            expression = parse_expression(text, self.operators)
        except NotAnExpression:
            return False, False, False
        all_used = sorted(expression.numbers) == sorted(numbers)
        return True, all_used, all_used and expression.value == target

    def _size(self, split: str) -> int:
        return {"train": self.num_train, "eval": self.num_eval}[split]

    def _prompt(self, split: str, index: int) -> Prompt:
        problem = self.problem(HashedRandom("countdown", self.seed, split, index))
        return Prompt(
            turns=(*self._examples, {"role": "user", "content": self.question(problem)}),
            answer=problem.solution,
            facts={"numbers": problem.numbers, "target": problem.target},
        )

    @cached_property
    def _examples(self) -> tuple[Turn, ...]:
        """The solved examples, question and answer in turn."""
        problems = [self.problem(HashedRandom("countdown", self.seed, "examples", index)) for index in range(self.examples)]
        return tuple(
            turn
            for problem in problems
            for turn in (
                {"role": "user", "content": self.question(problem)},
                {"role": "assistant", "content": self._wrap_in_tag(problem.solution)},
            )
        )

    def _wrap_in_tag(self, solution: str) -> str:
        return solution if self.answer_tag is None else f"<{self.answer_tag}>{solution}</{self.answer_tag}>"

    def question(self, problem: CountdownProblem) -> str:
        # No str.format: braces elsewhere in an instruction are text.
        shown = self.instruction.replace("{numbers}", " ".join(map(str, problem.numbers)))
        return shown.replace("{target}", str(problem.target))

    def problem(self, draws: HashedRandom) -> CountdownProblem:
        """A solvable problem from any stream of draws. Raises `ValueError` where the settings leave none to be found."""
        for _ in range(_TRIES):
            numbers = [draws.between(self.min_number, self.max_number) for _ in range(self.num_numbers)]
            solution = self.random_expression(numbers, draws)
            try:
                value = parse_expression(solution, self.operators).value
            except NotAnExpression:  # a division by zero
                continue
            if value.denominator == 1 and self.min_target <= value <= self.max_target:
                return CountdownProblem(tuple(numbers), int(value), solution)
        raise ValueError(
            f"no target in [min_target={self.min_target}, max_target={self.max_target}] was found in {_TRIES} random problems "
            f"of {self.num_numbers} numbers in [{self.min_number}, {self.max_number}] with {self.operators}: widen the targets"
        )

    def random_expression(self, numbers: Sequence[int], draws: HashedRandom) -> str:
        """The numbers in random order with random operators between them, e.g. `5+8-3`."""
        shuffled = [str(number) for number in draws.shuffled(numbers)]
        return shuffled[0] + "".join(draws.choice(self.operators) + number for number in shuffled[1:])
