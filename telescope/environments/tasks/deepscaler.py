"""DeepScaleR-Preview: 40,315 competition problems from AIME, AMC, Omni-MATH and STILL (MIT)."""

from __future__ import annotations

from telescope.environments.questions.maths import MathsQuestions


class Deepscaler(MathsQuestions):
    """It has no test split, so a part is held out. See MathsQuestions for the reward."""

    dataset: str = "agentica-org/DeepScaleR-Preview-Dataset"
    """Hugging Face id of the data set."""
