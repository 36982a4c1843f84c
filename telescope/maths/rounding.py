"""Which numbers are the same but for rounding: 0.1 + 0.2 and 0.3. Pure Python, for the core too. Refuses to round anything."""

from __future__ import annotations

ROUNDING = 1e-12
"""Of numbers beyond 1 a share of the larger one. A sum of a hundred terms is off by some 1e-14."""


def is_rounding(low: float, high: float) -> bool:
    """Whether nothing but rounding lies between the two."""
    return high - low <= ROUNDING * max(1.0, abs(low), abs(high))
