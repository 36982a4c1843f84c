"""How far the policy has moved, token by token, and what is done about it. Tensor methods only: no torch import.

All tensors are [T], finite everywhere (masked places were set to 0 before), and keep the caller's dtype. Formulas and sources
are in docs/algorithms.md.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RATIO_CLAMP = 20.0
"""Nats beyond which a difference of log-probs is cut, so that its exponential stays finite in float32."""


def log_ratio(current: Tensor, reference: Tensor) -> Tensor:
    """delta = clamp(current - reference, -20, 20). Where the clamp binds the value is a constant: no gradient passes."""
    return (current - reference).clamp(-RATIO_CLAMP, RATIO_CLAMP)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO's loss, max(-ratio A, -clip(ratio, 1-low, 1+high) A): the ratio earns nothing for leaving the interval."""
    return (-ratio * advantages).maximum(-ratio.clamp(1.0 - low, 1.0 + high) * advantages)


def clip_binds(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Where `clipped_surrogate` has no gradient: (below, above), both bool."""
    return (ratio < 1.0 - low) & (advantages < 0), (ratio > 1.0 + high) & (advantages > 0)


def dual_clip(loss: Tensor, advantages: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Dual clip (arXiv:1912.09729): where A < 0 the loss is at most `bound` * |A|, and constant where that binds.

    Returns the loss and where it binds (bool). Tokens with A >= 0 are left alone.
    """
    ceiling = advantages.abs() * bound
    binds = (advantages < 0) & (loss > ceiling)
    return ceiling.where(binds, loss), binds


def tis_weight(old: Tensor, rollout: Tensor, *, cap: float, clamp: float) -> Tensor:
    """Truncated importance weight min(exp(clamp(old - rollout)), cap): trainer over sampler, detached."""
    return (old - rollout).detach().clamp(-clamp, clamp).exp().clamp(max=cap)


def icepop_weight(old: Tensor, rollout: Tensor, *, low: float, high: float) -> Tensor:
    """IcePop: exp(old - rollout) where it lies in [low, high], else 0; detached. The token stays in the denominators."""
    weight = (old - rollout).detach().clamp(-RATIO_CLAMP, RATIO_CLAMP).exp()
    return weight.where((weight >= low) & (weight <= high), 0.0)


def inside(log_ratio: Tensor, *, low: float, high: float) -> Tensor:
    """1 where exp(log_ratio) lies in [low, high], else 0; no exponential is taken, so none overflows."""
    least = math.log(low) if low > 0 else -math.inf
    kept = (log_ratio >= least) & (log_ratio <= math.log(high))
    return kept.to(log_ratio.dtype)
