"""A step's groups into minibatches, and the counts that one optimiser update divides by. Python integers only.

The counts are taken once over the whole update by whoever holds every mask, and shipped with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from telescope.records import Denominators

T = TypeVar("T")


def cut(groups: Sequence[T], minibatches: int) -> tuple[Sequence[T], ...]:
    """`groups` in order into parts whose sizes differ by one at most: `cut([1, 2, 3, 4, 5], 2)` is `([1, 2, 3], [4, 5])`."""
    if not 1 <= minibatches <= len(groups):
        raise ValueError(f"{len(groups)} groups can't make {minibatches} minibatches: each has one group at least")
    size, more = divmod(len(groups), minibatches)
    starts = [part * size + min(part, more) for part in range(minibatches + 1)]
    return tuple(groups[start:end] for start, end in pairwise(starts))


def denominators(trained_tokens: Sequence[int], groups: Sequence[int]) -> Denominators:
    """Counts over the kept rollouts of one update: trained tokens and group number of each. One without a token counts."""
    if len(trained_tokens) != len(groups):
        raise ValueError(f"{len(trained_tokens)} token counts for {len(groups)} rollouts")
    return Denominators(tokens=int(sum(trained_tokens)), sequences=len(groups), groups=len(set(groups)))
