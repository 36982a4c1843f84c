"""MATH: competition problems of seven subjects, 7,500 to train on and 5,000 to test (MIT)."""

from __future__ import annotations

from telescope.environments.questions.maths import MathsQuestions


class HendrycksMath(MathsQuestions):
    """The answer is the boxed part of the worked solution. See MathsQuestions for the reward."""

    dataset: str = "EleutherAI/hendrycks_math"
    """Hugging Face id of the data set."""
    subsets: tuple[str, ...] = (
        *("algebra", "counting_and_probability", "geometry", "intermediate_algebra"),
        *("number_theory", "prealgebra", "precalculus"),
    )
    """Its configurations, one after another; empty: its only one."""
    answer_field: str = "solution"
    """Column of the answer; of a worked solution the boxed part counts, or what stands behind ####."""
    eval_split: str | None = "test"
    """The data set's split that is held out; null: `held_out` questions of the train split."""
