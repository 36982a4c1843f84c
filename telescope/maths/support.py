"""Which tokens can be sampled at all under `top_k`, `top_p` and `min_p`. Tensor methods only.

The sampler draws from the tokens it keeps, and its log-probs are normalised over these. The trainer has to normalise over the
same ones, so it applies the same rules, in the same order, to its own logits: min_p, top_k, top_p, as vLLM does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Support:
    """`top_k` 0, `top_p` 1 and `min_p` 0 keep every token."""

    top_k: int = 0
    """Keep so many of the likeliest tokens, and those as likely as the last of them."""
    top_p: float = 1.0
    """Of what is left, keep the likeliest tokens until they have this share of its probability."""
    min_p: float = 0.0
    """Keep tokens at least this times as likely as the likeliest one."""

    @property
    def is_whole(self) -> bool:
        return not self.top_k and self.top_p >= 1 and self.min_p <= 0


WHOLE = Support()


def left_out(logits: Tensor, targets: Tensor, support: Support) -> Tensor:
    """[T, V] bool: the tokens that can't be sampled. `logits` [T, V] are those after temperature; `targets` [T] were sampled
    and are never left out, though weights that have moved since might not keep them."""
    out = logits < logits.amax(dim=-1, keepdim=True) + _log(support.min_p)
    if 0 < support.top_k < logits.shape[-1]:
        kept = logits.masked_fill(out, -float("inf"))
        out |= kept < kept.topk(support.top_k, dim=-1).values[:, -1:]
    if support.top_p < 1:
        kept, order = logits.masked_fill(out, -float("inf")).sort(dim=-1, descending=True)
        before = kept.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)  # probability of all likelier tokens
        before[:, 0] = 0.0
        out |= (before >= support.top_p).scatter(1, order, before >= support.top_p)
    return out.scatter(1, targets[:, None], value=False)


def _log(share: float) -> float:
    return log(share) if share > 0 else -float("inf")
