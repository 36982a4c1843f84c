"""Dr. GRPO (arXiv:2503.20783): rewards minus their group's mean, and a loss divided by a constant rather than by lengths.

The default aggregation, token_mean, brings the lengths back: it is not Dr. GRPO unless token_sum_norm is set.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from telescope.algorithms.base import AdvantageNorm, PolicyGradient
from telescope.maths.aggregation import Aggregation


class DrGRPO(PolicyGradient):
    norms: ClassVar[tuple[AdvantageNorm, ...]] = ("none", "batch")

    advantage_norm: AdvantageNorm = "none"
    """none: the reward minus its group's mean; batch: that, standardised over the batch."""
    dr_grpo_loss_agg_mode: Literal["token_mean", "token_sum_norm"] = "token_mean"
    """token_sum_norm divides by rollouts * rollout.max_tokens, a constant: only so is this Dr. GRPO."""

    @property
    def aggregation(self) -> Aggregation:
        return self.dr_grpo_loss_agg_mode
