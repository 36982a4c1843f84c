"""RLOO (arXiv:2402.14740): each reward against the mean of the other rollouts of its prompt."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from telescope.algorithms.base import AdvantageNorm, PolicyGradient
from telescope.maths.advantages import Groups
from telescope.maths.aggregation import Aggregation


class RLOO(PolicyGradient):
    norms: ClassVar[tuple[AdvantageNorm, ...]] = ("none", "batch")

    advantage_norm: AdvantageNorm = "none"
    """none: the reward minus the others' mean; batch: that, standardised over the batch."""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """token_mean weights tokens alike; seq_mean_token_mean weights rollouts alike."""

    @property
    def aggregation(self) -> Aggregation:
        return self.loss_aggregation

    def advantages(self, rewards: np.ndarray, groups: np.ndarray, *, group_size: int) -> np.ndarray:
        """(r_i - mean) * G / (G - 1), with G the scored rollouts of the group."""
        batch = Groups(rewards, groups)
        alone = batch.leave_one_out()
        return batch.over_batch(alone) if self.advantage_norm == "batch" else alone
