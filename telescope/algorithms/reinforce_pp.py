"""REINFORCE++ (arXiv:2501.03262), the form with a baseline: the group's mean off, then standardised over the batch."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from telescope.algorithms.base import AdvantageNorm, PolicyGradient
from telescope.maths.advantages import Groups, standardise
from telescope.maths.aggregation import Aggregation


class ReinforcePP(PolicyGradient):
    smallest_group: ClassVar[int] = 1
    norms: ClassVar[tuple[AdvantageNorm, ...]] = ("batch",)

    advantage_norm: AdvantageNorm = "batch"
    """Always batch."""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """token_mean weights tokens alike; seq_mean_token_mean weights rollouts alike."""

    @property
    def aggregation(self) -> Aggregation:
        return self.loss_aggregation

    def advantages(self, rewards: np.ndarray, groups: np.ndarray, *, group_size: int) -> np.ndarray:
        """(A - mean) / (std + epsilon) over the batch; A = r_i - group mean, or r_i where one sample a prompt is asked for.

        What decides is the configured group size: a lone survivor of a larger group gets 0, not its raw reward.
        """
        batch = Groups(rewards, groups)
        if group_size == 1:
            return standardise(batch.rewards)
        return batch.over_batch(batch.centred())
