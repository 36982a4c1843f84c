"""GRPO (arXiv:2402.03300): rewards against those of the same prompt, in units of their standard deviation.

Here without the paper's KL term, and with the mean over tokens rather than over sequences of means; see docs/algorithms.md.
"""

from __future__ import annotations

from typing import Literal

from telescope.algorithms.base import PolicyGradient
from telescope.maths.aggregation import Aggregation


class GRPO(PolicyGradient):
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """token_mean weights tokens alike (DAPO's choice); seq_mean_token_mean weights rollouts alike (the paper's)."""

    @property
    def aggregation(self) -> Aggregation:
        return self.loss_aggregation
