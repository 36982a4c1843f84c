"""Numbers on one rollout's length and its repetitions. Numpy only; what follows from them is an algorithm's settings."""

from __future__ import annotations

import math

import numpy as np


def soft_overlong(tokens: int, *, max_tokens: int, buffer: int) -> float:
    """DAPO's punishment of a length (arXiv:2503.14476, eq. 13), in [-1, 0].

    0 up to `max_tokens - buffer`, then linearly down to -1 at `max_tokens`: `soft_overlong(95, max_tokens=100, buffer=20)` is
    -0.75. Longer ones (several turns) stay at -1.
    """
    over = tokens - (max_tokens - buffer)
    return -min(max(over / buffer, 0.0), 1.0)


def longest_certain_run(logprobs: np.ndarray, probability: float) -> int:
    """Longest run of consecutive log-probs [n] above that of `probability`, e.g. 2 for [-5, -0.001, -0.002, -3] at 0.99."""
    certain = np.concatenate([[False], np.asarray(logprobs) > math.log(probability), [False]])
    edges = np.flatnonzero(certain[1:] != certain[:-1])
    return int((edges[1::2] - edges[::2]).max(initial=0))
