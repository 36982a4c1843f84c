"""GSPO (arXiv:2507.18071): one ratio a sequence, the geometric mean of its tokens', clipped as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from telescope.algorithms.base import PolicyLoss, TokenLosses, clip_sums
from telescope.maths import ratios
from telescope.maths.aggregation import Aggregation
from telescope.maths.segments import segment_mean, spread

if TYPE_CHECKING:
    from torch import Tensor

    from telescope.algorithms.base import PackedRow


class GSPO(PolicyLoss):
    own_ratio: ClassVar[bool] = True
    weighted: ClassVar[bool] = False

    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """How far below 1 the sequence's ratio counts."""
    clip_high: float = Field(default=4e-4, ge=0)
    """The sequence's ratio counts within [1 - clip_low, 1 + clip_high]; the paper's range, far narrower than a token's."""
    loss_aggregation: Literal["seq_mean"] = "seq_mean"
    """One loss a rollout, and the mean over rollouts."""

    @property
    def aggregation(self) -> Aggregation:
        """Each token carries its sequence's loss, so the mean over tokens, then rollouts, counts a sequence once.

        A branch of n_b tokens thereby weighs n_b / n_i within its rollout.
        """
        return "seq_mean_token_mean"

    def token_losses(self, row: PackedRow, ratio: Tensor) -> TokenLosses:
        """max(-s A, -clip(s) A) at every token of a sequence, with s = exp(mean of log ratios)."""
        deltas = ratios.log_ratio(row.current, self.reference(row))
        means = segment_mean(deltas, row.mask, row.segments, row.sequence_tokens.shape[0])
        sequence_ratio = spread(means.exp(), row.segments)
        losses = ratios.clipped_surrogate(sequence_ratio, row.advantages, self.clip_low, self.clip_high)
        below, above = ratios.clip_binds(sequence_ratio, row.advantages, self.clip_low, self.clip_high)
        return TokenLosses(losses, clip_sums(below, above, row.mask))
