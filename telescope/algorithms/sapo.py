"""SAPO (arXiv:2511.20347): a smooth gate in place of the clip, closing faster for tokens of negative advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from telescope.algorithms.base import PolicyLoss, TokenLosses
from telescope.maths.aggregation import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from telescope.algorithms.base import PackedRow


class SAPO(PolicyLoss):
    own_ratio: ClassVar[bool] = True

    sapo_tau_pos: float = Field(default=1.0, gt=0)
    """The same as sapo_tau_neg, for positive advantages."""
    sapo_tau_neg: float = Field(default=1.05, gt=0)
    """How fast the gate closes as the ratio leaves 1, for positive advantages and for the others."""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean"] = "seq_mean_token_mean"
    """seq_mean_token_mean weights rollouts alike (the paper's); token_mean weights tokens alike."""

    @property
    def aggregation(self) -> Aggregation:
        return self.loss_aggregation

    def token_losses(self, row: PackedRow, ratio: Tensor) -> TokenLosses:
        """-(4 / tau) sigmoid(tau (ratio - 1)) A: slope 1 in the ratio at 1."""
        tau = row.advantages.new_full(row.advantages.shape, self.sapo_tau_neg).where(row.advantages <= 0, self.sapo_tau_pos)
        return TokenLosses(-(4.0 / tau) * (tau * (ratio - 1.0)).sigmoid() * row.advantages)
