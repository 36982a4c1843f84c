"""What one step's rollouts count for, and which trainer rank gets which. Python integers and floats only.

The counts are taken once over the whole update by whoever holds every mask, and shipped with it. The assignment is
deterministic and never changes the loss, only how long the slowest rank takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from telescope.records import Denominators

T = TypeVar("T")

ATTENTION_LENGTH = 24_576
"""Tokens at which attention costs as much as all the rest of a layer, where no model says it: about 12 times the hidden
size (here 2,048)."""


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


def cost(lengths: Sequence[int], *, attention_length: float = ATTENTION_LENGTH) -> float:
    """Relative cost of training a rollout whose trajectories have these lengths: tokens, and attention's square."""
    return float(sum(length + length * length / attention_length for length in lengths))


def assign(costs: Sequence[float], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Which items each rank gets, ascending: the costliest first, each to the rank with the least so far.

    `assign([5, 1, 4], 2)` is `((0,), (1, 2))`. With fewer items than ranks some get nothing.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(item)
        heapq.heappush(loads, (load + costs[item], rank))
    return tuple(tuple(sorted(share)) for share in shares)
