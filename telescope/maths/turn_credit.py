"""Credit within a rollout: from rewards by turn to the numbers that turns are compared by. Float64, pure.

A turn is one answer of the policy. Its return is its own reward and, discounted, those of the turns behind it:

    G_i = r_i + gamma * G_(i+1)

as in REINFORCE with reward-to-go (Sutton and Barto, Reinforcement Learning, 2nd ed., 13.3), a turn being one action, as in
RAGEN (arXiv:2504.20073). The i-th turns of a group's rollouts are compared with one another, by the rule that compares
rollouts: so GiGPO (arXiv:2505.10978) groups steps, there by equal states; and MT-GRPO (arXiv:2505.11821) the turns of a tool
game.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

REWARD_LIMIT = 1e6
"""Larger rewards are mistakes, and their squares and differences would overflow the advantages."""
TURNS_TOLERANCE = 1e-6
"""Rewards by turn may miss their total by so much, or so large a share of the largest number: some sum in float32."""


def add_up(by_turn: Sequence[float], total: float) -> bool:
    """Whether rewards by turn, none beyond `REWARD_LIMIT`, add up to `total` but for rounding; none by turn always do."""
    largest = max(map(abs, (total, *by_turn)))
    return not by_turn or abs(math.fsum(by_turn) - total) <= TURNS_TOLERANCE * max(1.0, largest)


def shape_rewards(by_turn: Sequence[float], turns: int, total: float, *, scale: float = 1.0) -> tuple[float, ...]:
    """One reward a turn, which add up to `total`: `scale * by_turn`, and at the last turn what is missing (a cost of length,
    the offset of a range). Without any by turn all of it is the last turn's: `shape_rewards((), 3, 1.0)` is (0, 0, 1). A lone
    turn has `total` itself, to the last digit.

    Raises `ValueError` where `by_turn` has neither none nor `turns` numbers.
    """
    if turns < 1 or len(by_turn) not in (0, turns):
        raise ValueError(f"{len(by_turn)} rewards for {turns} turns: give one a turn, or none")
    if turns == 1:
        return (total,)
    *before, last = (scale * reward for reward in (by_turn or (0.0,) * turns))
    return (*before, last + (total - math.fsum((*before, last))))


def compute_returns(rewards: Sequence[float], discount: float) -> tuple[float, ...]:
    """G_i = r_i + discount * G_(i+1) of each turn: `compute_returns((1, 0, 2), 0.5)` is (1.5, 1, 2)."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return tuple(reversed(returns))


def number_turns(groups: np.ndarray, turns: np.ndarray) -> NDArray[np.int64]:
    """[M] a number for each turn of rollouts of `turns` [N] turns in `groups` [N], one rollout after another: the same number
    for the i-th turns of one group. Where each rollout has one turn the numbers are ordered as the groups are."""
    place = np.arange(turns.sum()) - np.repeat(np.cumsum(turns) - turns, turns)  # [M] 0, 1, … in each rollout
    longest = int(turns.max(initial=1))
    _, index = np.unique(groups, return_inverse=True)
    return np.asarray(np.repeat(index, turns) * longest + place, dtype=np.int64)


def lone_share(numbers: np.ndarray) -> float:
    """Share of the turns [M] whose number no other has: their group has nothing to compare them with."""
    _, index, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return float(np.mean(counts[index] == 1)) if len(numbers) else 0.0
