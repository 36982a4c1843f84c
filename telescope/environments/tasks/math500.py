"""MATH-500: 500 test problems of MATH (MIT). A benchmark: what was trained on it measures nothing on it."""

from __future__ import annotations

from telescope.environments.questions.maths import MathsQuestions


class Math500(MathsQuestions):
    """Both splits are the same 500, because there are no others. See MathsQuestions for the reward."""

    dataset: str = "HuggingFaceH4/MATH-500"
    """Hugging Face id of the data set."""
    train_split: str = "test"
    """The data set's split that is trained on."""
    eval_split: str | None = "test"
    """The data set's split that is held out; null: `held_out` questions of the train split."""
