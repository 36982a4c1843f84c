"""DAPO-Math-17k: competition problems with whole-number answers; the processed version, its English part (Apache-2.0)."""

from __future__ import annotations

from telescope.environments.questions.maths import MathsQuestions


class DapoMath(MathsQuestions):
    """It has no test split, so a part is held out. See MathsQuestions for the reward."""

    dataset: str = "open-r1/DAPO-Math-17k-Processed"
    """Hugging Face id of the data set."""
    subsets: tuple[str, ...] = ("en",)
    """Its configurations, one after another; empty: its only one."""
    question_field: str = "prompt"
    """Column of the question; a dotted path reaches into it, and of a list of messages the last one counts."""
    answer_field: str = "solution"
    """Column of the answer; of a worked solution the boxed part counts, or what stands behind ####."""
