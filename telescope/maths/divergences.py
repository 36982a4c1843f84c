"""How far two policies are apart, estimated from the taken tokens. Tensor methods only: no torch import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from telescope.maths.ratios import log_ratio

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def estimate(current: Tensor, other: Tensor, estimator: Estimator) -> Tensor:
    """KL(current || other) at each token, from log-probs [T] of tokens drawn from (nearly) current: [T], with gradient.

    With d = clamp(current - other, -20, 20), after J. Schulman, "Approximating KL divergence" (2020): k1 = d; k2 = d^2 / 2;
    k3 = exp(-d) - 1 + d, which is never negative and has the mean of k1.
    """
    difference = log_ratio(current, other.detach())
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2.0
        case "k3":
            return (-difference).expm1() + difference
