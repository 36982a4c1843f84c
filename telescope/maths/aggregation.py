"""From token losses to this row's share of the loss of one whole optimiser update. Tensor methods only: no torch import.

Owns the normalisers. The counts come from outside (`Denominators`, over all rows and all ranks), so the shares of any packing
add up to the same loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from telescope.maths.segments import spread
from telescope.records import Denominators

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token_mean", "seq_mean_token_mean", "token_sum_norm"]


def aggregate(
    losses: Tensor,
    mask: Tensor,
    segments: Tensor,
    sequence_tokens: Tensor,
    *,
    how: Aggregation,
    denominators: Denominators,
    max_tokens: int,
) -> Tensor:
    """The row's share, a scalar. `losses` [T], `mask` [T] bool, `segments` [T] int64, `sequence_tokens` [S] (n_i).

    token_mean: sum / all tokens. seq_mean_token_mean: each rollout's mean, then the mean over rollouts.
    token_sum_norm: sum / (rollouts * max_tokens), a true constant. Raises `ValueError` for any other.
    """
    kept = losses.where(mask, 0.0)
    sequences = max(denominators.sequences, 1)
    match how:
        case "token_mean":
            return kept.sum() / max(denominators.tokens, 1)
        case "seq_mean_token_mean":
            return (kept / spread(sequence_tokens.clamp(min=1.0), segments)).sum() / sequences
        case "token_sum_norm":
            return kept.sum() / (sequences * max_tokens)
        case _:  # an algorithm of a user's own, which no type checker has read
            raise ValueError(f"aggregation {how!r} is none of {', '.join(get_args(Aggregation))}")
