"""Any data set of the package reasoning-gym: over a hundred kinds of made problems, each with its own scorer (Apache-2.0).

Problem i of a split is made when it is asked for, from the seed and i alone. It is scored in a grader process, where it is made
once more: some scorers raise, some hand the answer to sympy, which evaluates it. Limits hold that process, but it is no
sandbox: docs/tasks.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, ClassVar

from pydantic import Field, field_validator

from telescope.config.words import did_you_mean
from telescope.environments.answer_parsers import AnswerTags, ThinkTags, Whole
from telescope.environments.base import LazyPrompts, Prompt, Reward, SingleTurn
from telescope.environments.graders.pool import GraderOverrun, grade
from telescope.environments.questions.dataset import Instruction

REFUSED = {
    "composite": "it is a mixture: give `environments` one entry for each of its parts",
    "list_functions": "the same seed gives it other problems each time",
}
SCORING_LIMIT_S = 10.0  # of processor time; making the slowest problems again takes 0.5 s
MAX_ANSWER_CHARACTERS = 10_000


class ReasoningGym(SingleTurn):
    """Reward as the data set's own scorer gives it: 1 for right, a small part (0.01 to 0.05) for well-formed and wrong, 0."""

    requires: ClassVar[tuple[str, ...]] = ("reasoning-gym>=0.1.25,<0.2",)
    reward_min: ClassVar[float | None] = 0.0
    reward_max: ClassVar[float | None] = 1.0
    metrics_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"exact": (0, 1), "has_answer": (0, 1)}

    task: str = "leg_counting"
    """Which data set, e.g. chain_sum, countdown, sudoku, knights_knaves."""
    config: dict[str, Any] = Field(default_factory=dict)
    """That data set's own settings, e.g. {min_terms: 2, max_terms: 4}."""
    instruction: Instruction = "{question}\n\nGive the final answer between <answer> and </answer>."
    """The user's message; {question} is filled in."""
    answer_tag: str | None = Field(default="answer", pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """Read the answer from the last <tag>...</tag>; null: all of it behind any thought."""
    num_train: int = Field(default=10_000, ge=1)
    """Problems of the train split."""
    num_eval: int = Field(default=256, ge=1)
    """Problems of the eval split, made from other seeds."""
    seed: int = Field(default=0, ge=0)
    """Problem i is made from seed + i, those of the eval split from behind the last one of the train split."""

    @field_validator("task")
    @classmethod
    def _task_can_be_trained(cls, task: str) -> str:
        if task in REFUSED:
            raise ValueError(f"task={task!r} can't be trained on: {REFUSED[task]}")
        return task

    def check_data(self) -> None:
        """Problems are made, not read; the package alone takes seconds to import, and `requires` has been looked at."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        load_problems(self.task, self._config)  # refuses a wrong name or setting now rather than at the first rollout
        size = {"train": self.num_train, "eval": self.num_eval}[split]
        start = self.seed if split == "train" else self.seed + self.num_train
        return LazyPrompts(size, lambda index: self._prompt(start + index))

    def right_answer(self, prompt: Prompt) -> str:
        return self._parser.wrap(prompt.answer) if prompt.answer else ""

    async def reward(self, prompt: Prompt, answer: str) -> Reward:
        given = ThinkTags(self._parser).parse(answer)
        total, tags = 0.0, tuple[str, ...]()
        if given is not None and len(given) <= MAX_ANSWER_CHARACTERS:
            try:
                total = await grade(score, self.task, self._config, prompt.facts["seed"], given, limit_s=SCORING_LIMIT_S)
            except GraderOverrun:
                tags = ("too_heavy",)
        metrics = {"exact": float(total >= 1), "has_answer": float(given is not None)}
        return Reward(total, metrics, golden_answers=(prompt.answer,), tags=tags, info={"parsed_answer": given})

    @property
    def _parser(self) -> Whole | AnswerTags:
        return Whole() if self.answer_tag is None else AnswerTags(self.answer_tag)

    @cached_property
    def _config(self) -> str:
        return json.dumps(self.config, sort_keys=True)

    def _prompt(self, seed: int) -> Prompt:
        made = make_problem(self.task, self._config, seed)
        content = self.instruction.replace("{question}", str(made["question"]))
        answer = "" if made["answer"] is None else str(made["answer"])
        return Prompt(({"role": "user", "content": content},), answer=answer, facts={"seed": seed})


def score(task: str, config: str, seed: int, answer: str) -> float:
    """What the data set's scorer makes of an answer. For a grader process."""
    return float(load_problems(task, config).score_answer(answer, make_problem(task, config, seed)))


def make_problem(task: str, config: str, seed: int) -> Mapping[str, Any]:
    """The problem of a seed: `question`, `answer` and the scorer's `metadata`."""
    made: Mapping[str, Any] = load_problems(task, config)[seed]
    return made


@lru_cache(maxsize=16)
def load_problems(task: str, config: str) -> Any:
    """The data set whose item i is made from the seed i. Raises `ValueError` for a name or a setting it does not know."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ValueError(f"task={task!r} is not a data set of reasoning-gym.{did_you_mean(task, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(task, **{"size": 2**62, **json.loads(config), "seed": 0})
    except (TypeError, AssertionError) as error:
        raise ValueError(f"config={config} is refused by {task}: {error}") from error
