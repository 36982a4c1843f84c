"""From the rewards of a batch to one advantage a rollout. Float64 numpy; knows no algorithm by name.

Statistics are per rollout, with ddof 1; `EPSILON` is added to a standard deviation. A group whose rewards are all equal, but
for rounding, gets exactly 0 (a mean of three 0.1s is not 0.1 in floating point), by every rule; so does a lone rollout, which
has nothing to be compared with (the core fails such a group before it gets here).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from telescope.maths.rounding import ROUNDING

EPSILON = 1e-4
Floats = NDArray[np.float64]


class Groups:
    """Rewards [N] arranged by group number [N]: counts, means, standard deviations and which groups are all equal."""

    def __init__(self, rewards: np.ndarray, groups: np.ndarray) -> None:
        self.rewards: Floats = np.asarray(rewards, dtype=np.float64)
        if self.rewards.shape != np.shape(groups) or self.rewards.ndim != 1:
            raise ValueError(f"rewards {np.shape(rewards)} and groups {np.shape(groups)} must both be [N]")
        if not np.isfinite(self.rewards).all():
            where = int(np.flatnonzero(~np.isfinite(self.rewards))[0])
            raise ValueError(
                f"reward {where} is {self.rewards[where]}: a reward must be a finite number; "
                "a score that could not be computed is a failed rollout, and leaves its group before this"
            )
        _, self.index = np.unique(groups, return_inverse=True)
        self.counts = np.bincount(self.index)
        low = np.full(len(self.counts), np.inf)
        high = np.full(len(self.counts), -np.inf)
        np.minimum.at(low, self.index, self.rewards)
        np.maximum.at(high, self.index, self.rewards)
        size = np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))
        self.equal: NDArray[np.bool_] = (high - low <= ROUNDING * size)[self.index]  # [N] its whole group has one reward
        self.sizes = self.counts[self.index]  # [N] members of the rollout's group

    def centred(self) -> Floats:
        """r_i minus the mean of its group."""
        means = np.bincount(self.index, weights=self.rewards) / np.maximum(self.counts, 1)
        return np.where(self.equal, 0.0, self.rewards - means[self.index])

    def standardised(self) -> Floats:
        """(r_i - mean) / (std + epsilon) within the group."""
        centred = self.centred()
        variance = np.bincount(self.index, weights=centred**2) / np.maximum(self.counts - 1, 1)
        standardised: Floats = centred / (np.sqrt(variance)[self.index] + EPSILON)
        return standardised

    def leave_one_out(self) -> Floats:
        """r_i minus the mean of the others of its group, which is (r_i - mean) * G / (G - 1)."""
        alone: Floats = self.centred() * self.sizes / np.maximum(self.sizes - 1, 1)
        return alone

    def over_batch(self, advantages: Floats) -> Floats:
        """(A - mean) / (std + epsilon) over the whole batch; groups of equal rewards count in it and stay exactly 0."""
        return np.where(self.equal, 0.0, standardise(advantages))


def standardise(values: Floats) -> Floats:
    """(x - mean) / (std + epsilon) over all; exactly 0 where all are equal or there is only one."""
    if len(values) < 2 or values.max() == values.min():
        return np.zeros_like(values)
    return np.asarray((values - values.mean()) / (values.std(ddof=1) + EPSILON), dtype=np.float64)
