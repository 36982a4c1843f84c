"""CISPO (arXiv:2506.13585): the ratio is clipped and frozen as a weight, so that no token loses its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from telescope.algorithms.base import PolicyLoss, TokenLosses, clip_sums
from telescope.maths.aggregation import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from telescope.algorithms.base import PackedRow


class CISPO(PolicyLoss):
    own_ratio: ClassVar[bool] = True

    clip_low: float = Field(default=1.0, ge=0, le=1)
    """1.0: no lower clip, as in the paper."""
    clip_high: float = Field(default=0.5, ge=0)
    """The weight is the ratio within [1 - clip_low, 1 + clip_high]."""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """token_mean weights tokens alike, here over the whole update (the paper: within a group)."""

    @property
    def aggregation(self) -> Aggregation:
        return self.loss_aggregation

    def token_losses(self, row: PackedRow, ratio: Tensor) -> TokenLosses:
        """-stop_gradient(clip(ratio)) A p."""
        frozen = ratio.detach()
        weight = frozen.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        sums = clip_sums(frozen < 1.0 - self.clip_low, frozen > 1.0 + self.clip_high, row.mask)
        return TokenLosses(-weight * row.advantages * row.current, sums)
