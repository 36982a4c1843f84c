"""AIME 2025: 30 problems, answers from 0 to 999. A benchmark: what was trained on it measures nothing on it."""

from __future__ import annotations

from telescope.environments.questions.maths import MathsQuestions


class Aime2025(MathsQuestions):
    """Both splits are the same 30, because there are no others. See MathsQuestions for the reward."""

    dataset: str = "math-ai/aime25"
    """Hugging Face id of the data set."""
    train_split: str = "test"
    """The data set's split that is trained on."""
    eval_split: str | None = "test"
    """The data set's split that is held out; null: `held_out` questions of the train split."""
