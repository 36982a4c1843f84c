"""GSM8K: grade-school word problems, 7,473 to train on and 1,319 to test (MIT)."""

from __future__ import annotations

from telescope.environments.questions.maths import MathsQuestions


class Gsm8k(MathsQuestions):
    """The answers are worked solutions that end in `#### 18`. See MathsQuestions for the reward."""

    dataset: str = "openai/gsm8k"
    """Hugging Face id of the data set."""
    subsets: tuple[str, ...] = ("main",)
    """Its configurations, one after another; empty: its only one."""
    question_field: str = "question"
    """Column of the question; a dotted path reaches into it, and of a list of messages the last one counts."""
    eval_split: str | None = "test"
    """The data set's split that is held out; null: `held_out` questions of the train split."""
