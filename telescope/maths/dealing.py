"""Which trainer rank gets which rollout, and what a step then costs. Pure; ids, lengths and costs alone.

Owns the choice between ways to deal. Refuses to change what is trained: every rollout goes to one rank, whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import zip_longest

from telescope.maths.packing import ATTENTION_LENGTH, cost, pack, rows_needed

Shares = tuple[tuple[int, ...], ...]


def deal(rollouts: Sequence[Sequence[int]], ranks: int, *, seq_len: int, attention_length: float = ATTENTION_LENGTH) -> Shares:
    """Rollouts (by the lengths of their branches) to ranks: by cost, or by count where that makes the cheaper step (as it may,
    by chance, with few rollouts). `deal([[5], [1], [4]], 2, seq_len=8)` is `((0,), (1, 2))`.

    Raises `ValueError` where a branch is longer than `seq_len`.
    """
    costs = [cost(branches, attention_length=attention_length) for branches in rollouts]
    by_cost, by_count = assign(costs, ranks), deal_by_count(len(rollouts), ranks)
    if ranks == 1:
        return by_cost

    def step(shares: Shares) -> float:
        return step_cost(rollouts, shares, seq_len=seq_len, attention_length=attention_length)

    return by_cost if step(by_cost) <= step(by_count) else by_count


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


def deal_by_count(rollouts: int, ranks: int) -> Shares:
    """As many rollouts for each rank, in turn, whatever their lengths: `deal_by_count(5, 2)` is `((0, 2, 4), (1, 3))`."""
    return tuple(tuple(range(rank, rollouts, ranks)) for rank in range(ranks))


def step_cost(
    rollouts: Sequence[Sequence[int]], shares: Shares, *, seq_len: int, attention_length: float = ATTENTION_LENGTH
) -> float:
    """What the ranks need together for one update. They run row by row and meet in every layer, so each place costs what the
    costliest of its rows does; the least possible is the mean of the ranks' costs."""
    lengths = [[length for rollout in share for length in rollouts[rollout]] for share in shares]
    most = max(rows_needed(own, seq_len=seq_len) for own in lengths)
    planned = [pack(own, seq_len=seq_len, rows=most, attention_length=attention_length) for own in lengths]
    rows = [[cost(row.lengths, attention_length=attention_length) for row in plan] for plan in planned]
    return sum(max(place) for place in zip_longest(*rows, fillvalue=0.0))


def imbalance(
    rollouts: Sequence[Sequence[int]], shares: Shares, *, seq_len: int, attention_length: float = ATTENTION_LENGTH
) -> float:
    """`step_cost` over the mean of the ranks' costs: 1.0 where no rank ever waits."""
    whole = sum(cost(branches, attention_length=attention_length) for branches in rollouts)
    if not whole:
        return 1.0
    return step_cost(rollouts, shares, seq_len=seq_len, attention_length=attention_length) * len(shares) / whole
