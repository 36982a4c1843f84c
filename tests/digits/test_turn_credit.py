"""Credit within a rollout: returns, advantages, loss and gradient of turns, against figures by hand and a plain computation."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from pydantic import ValidationError

from telescope.algorithms.base import Algorithm
from telescope.algorithms.cispo import CISPO
from telescope.algorithms.dr_grpo import DrGRPO
from telescope.algorithms.grpo import GRPO
from telescope.algorithms.gspo import GSPO
from telescope.algorithms.reinforce_pp import ReinforcePP
from telescope.algorithms.rloo import RLOO
from telescope.algorithms.sapo import SAPO
from telescope.maths import packing
from telescope.maths.turn_credit import compute_returns, lone_share, number_turns, shape_rewards
from telescope.records import Denominators, TrainItem, Trajectory
from tests.digits.batches import Batch, outcome, single_rows

ABLE = [GRPO, RLOO, ReinforcePP, DrGRPO, CISPO, SAPO]
EPSILON = 1e-4

# Two groups of three rollouts, of one to three turns each.
GROUPS = (4, 4, 4, 9, 9, 9)
REWARDS = ((0.5, 0.5), (0.5, -0.5), (0.0,), (1.0, 0.0, 2.0), (0.0, 1.0), (0.25, 0.5))


# ---- returns


def test_a_return_is_the_turns_reward_and_what_follows_discounted():
    assert compute_returns((1.0, 0.0, 2.0), 0.5) == (1.5, 1.0, 2.0)  # 1 + 0.5 · (0 + 0.5 · 2)
    assert compute_returns((1.0, 0.0, 2.0), 1.0) == (3.0, 2.0, 2.0)
    assert compute_returns((1.0, 0.0, 2.0), 0.0) == (1.0, 0.0, 2.0)
    assert compute_returns((), 0.5) == ()


def test_what_is_not_given_by_turn_is_the_last_turns():
    assert shape_rewards((), 3, 0.7) == (0.0, 0.0, 0.7)
    assert shape_rewards((0.5, 0.5), 2, 1.0) == (0.5, 0.5)
    assert shape_rewards((0.5, 0.5), 2, 0.75) == (0.5, 0.25)  # a length that costs 0.25
    # rewards in [-1, 3] as shares: 2 is 0.75, and by turn (1, 1) / 4, the offset 0.25 at the end
    assert shape_rewards((1.0, 1.0), 2, 0.75, scale=0.25) == (0.25, 0.5)
    with pytest.raises(ValueError, match="2 rewards for 3 turns: give one a turn, or none"):
        shape_rewards((1.0, 1.0), 3, 2.0)


def test_the_same_turns_of_a_group_have_one_number_and_all_others_another():
    numbers = number_turns(np.array([9, 4, 9]), np.array([2, 1, 3])).tolist()
    assert (numbers[0], numbers[1]) == (numbers[3], numbers[4])
    assert len(set(numbers)) == 4  # turns 0, 1, 2 of group 9, and turn 0 of group 4
    assert lone_share(np.array(numbers)) == 2 / 6


# ---- advantages


def by_hand(rewards: list[tuple[float, ...]], discount: float) -> list[list[float]]:
    """Returns as sums of powers, not by recursion."""
    return [
        [math.fsum(discount ** (at - turn) * own[at] for at in range(turn, len(own))) for turn in range(len(own))]
        for own in rewards
    ]


def peers(returns: list[list[float]], rollout: int, turn: int) -> list[float]:
    """Returns of the same turn in the rollout's group, its own among them."""
    group = GROUPS[rollout]
    return [own[turn] for other, own in enumerate(returns) if GROUPS[other] == group and turn < len(own)]


def plain_advantages(algorithm: Algorithm, returns: list[list[float]]) -> list[list[float]]:
    """Turn by turn, with the standard library."""
    found = []
    for rollout, own in enumerate(returns):
        row = []
        for turn, value in enumerate(own):
            others = peers(returns, rollout, turn)
            centred = value - statistics.fmean(others)
            if len(others) < 2 or max(others) - min(others) < 1e-12:
                row.append(0.0)
            elif isinstance(algorithm, RLOO):
                row.append(centred * len(others) / (len(others) - 1))
            elif algorithm.advantage_norm == "group":  # type: ignore[attr-defined]
                row.append(centred / (statistics.stdev(others) + EPSILON))
            else:
                row.append(centred)
        found.append(row)
    if algorithm.advantage_norm != "batch":  # type: ignore[attr-defined]
        return found
    every = [value for row in found for value in row]
    mean, spread = statistics.fmean(every), statistics.stdev(every) + EPSILON
    equal = [
        [max(near) - min(near) < 1e-12 for near in (peers(returns, rollout, turn) for turn in range(len(own)))]
        for rollout, own in enumerate(returns)
    ]
    return [
        [0.0 if same else (value - mean) / spread for value, same in zip(row, flags, strict=True)]
        for row, flags in zip(found, equal, strict=True)
    ]


def credit(algorithm: Algorithm, rewards: list[tuple[float, ...]], groups: tuple[int, ...] = GROUPS) -> list[list[float]]:
    """On the product's path."""
    returns = [algorithm.turn_returns(own) for own in rewards]
    turns = np.array([len(own) for own in rewards])
    numbers = number_turns(np.array(groups), turns)
    flat = algorithm.advantages(np.concatenate(returns), numbers, group_size=3)  # type: ignore[arg-type]
    return [part.tolist() for part in np.split(flat, np.cumsum(turns)[:-1])]


def test_the_second_turns_of_the_tool_game_are_compared_with_one_another():
    rewards = [(0.5, 0.5), (0.5, -0.5), (0.0,)]
    # returns (1, 0.5), (0, -0.5), (0): first turns 1, 0, 0 against the others' mean; second turns 0.5 and -0.5
    expected = [[1.0, 1.0], [-0.5, -1.0], [-0.5]]
    for found, right in zip(credit(RLOO(credit="turn"), rewards, (4, 4, 4)), expected, strict=True):
        assert found == pytest.approx(right, abs=1e-15)
    # discounted by half: returns (0.75, 0.5), (0.25, -0.5), (0): means of others 0.125, 0.375, 0.5
    half = credit(RLOO(credit="turn", turn_discount=0.5), rewards, (4, 4, 4))
    assert [value for row in half for value in row] == pytest.approx([0.625, 1.0, -0.125, -1.0, -0.5], abs=1e-15)


def test_a_turn_that_no_other_rollout_of_its_group_has_come_to_gets_0():
    for kind in ABLE:
        assert credit(kind(credit="turn"), [(0.0, 0.0, 1.0), (0.0,), (0.5,)], (4, 4, 4))[0][1:] == [0.0, 0.0], kind


CASES = [
    *(kind(credit="turn", turn_discount=discount) for kind in ABLE for discount in (1.0, 0.9, 0.0)),
    GRPO(credit="turn", advantage_norm="batch", turn_discount=0.5),
    GRPO(credit="turn", advantage_norm="none"),
    RLOO(credit="turn", advantage_norm="batch"),
    DrGRPO(credit="turn", advantage_norm="batch", turn_discount=0.25),
]


@pytest.mark.parametrize("algorithm", CASES, ids=lambda one: f"{type(one).__name__}-{one.advantage_norm}-{one.turn_discount}")
def test_advantages_are_those_of_a_plain_computation(algorithm: Algorithm):
    expected = plain_advantages(algorithm, by_hand(list(REWARDS), algorithm.turn_discount))  # type: ignore[attr-defined]
    found = credit(algorithm, list(REWARDS))
    for own, right in zip(found, expected, strict=True):
        assert own == pytest.approx(right, abs=1e-9)


@pytest.mark.parametrize("kind", ABLE)
@pytest.mark.parametrize("group_size", [1, 8])
def test_with_one_turn_a_rollout_the_digits_are_those_of_whole_rollouts(kind: type[Algorithm], group_size: int):
    random = np.random.default_rng(3)
    rewards, groups = random.normal(size=24), random.permutation(np.repeat([70, 3, 12, 5], 6))
    whole = kind().advantages(rewards, groups, group_size=group_size)
    turn = kind(credit="turn")
    returns = np.concatenate([turn.turn_returns((reward,)) for reward in rewards])  # type: ignore[arg-type]
    numbers = number_turns(groups, np.ones(24, int))
    assert turn.advantages(returns, numbers, group_size=group_size).tolist() == whole.tolist()


@pytest.mark.parametrize("kind", ABLE)
def test_whole_rollouts_are_compared_unless_turns_are_asked_for(kind: type[Algorithm]):
    assert kind().turn_returns((0.5, 0.5)) is None


# ---- what is refused


def test_an_algorithm_with_one_loss_a_sequence_refuses_turns_by_name():
    with pytest.raises(ValidationError, match="credit=turn is not possible with GSPO, whose loss is one a sequence"):
        GSPO(credit="turn")


def test_a_discount_that_would_do_nothing_is_refused():
    with pytest.raises(ValidationError, match=r"turn_discount=0\.9 does nothing with credit=rollout: set credit=turn"):
        GRPO(turn_discount=0.9)


# ---- the loss


def trajectory(mask: list[int], logprobs: list[float]) -> Trajectory:
    kept = np.array(mask, bool)
    return Trajectory(
        ids=np.arange(1, len(mask) + 1, dtype=np.int32),
        mask=np.array(mask, np.uint8),
        logprobs=np.where(kept, logprobs, np.nan).astype(np.float32),
        versions=np.where(kept, 3, -1).astype(np.int32),
    )


def item(rollout: int, length: int, tokens: int, turns: tuple[tuple[int, float], ...]) -> TrainItem:
    return TrainItem(rollout, 4, rollout, length, 99.0, tokens, 1.0, turns=turns)


def made() -> Batch:
    """Two rollouts: one of two turns in one trajectory, one of two branches; log-probs are sixteenths, so exact."""
    trajectories = [
        trajectory([0, 1, 1, 0, 1], [0, -0.5, -1.0, 0, -2.0]),
        trajectory([0, 0, 1], [0, 0, -0.25]),
        trajectory([0, 1, 1], [0, -0.75, -0.5]),
    ]
    items = [
        item(0, 5, 3, ((2, 1.0), (1, -0.5))),
        item(1, 3, 3, ((1, 2.0),)),
        item(1, 3, 3, ((1, -1.0), (1, 0.25))),  # two answers side by side, no prompt between them
    ]
    current = [
        np.array([0, -0.5, -1.125, 0, -1.75], np.float32),
        np.array([0, 0, -0.375], np.float32),
        np.array([0, -0.5, -0.5], np.float32),
    ]
    return Batch(trajectories, items, current, current, current, Denominators(6, 2, 1))


PACKINGS = {
    "one a row": lambda batch: single_rows(batch),
    "all in one": lambda batch: packing.pack(batch.lengths, seq_len=16, multiple=16),
}


@pytest.mark.parametrize("packed", PACKINGS)
def test_each_token_is_trained_with_the_advantage_of_its_turn(packed: str):
    batch = made()
    found = outcome(GRPO(), batch, PACKINGS[packed](batch))
    # -p A over 6 tokens, by hand: first rollout 0.5 + 1.125 - 0.875, second 0.75 - 0.5 + 0.125
    assert found.loss == pytest.approx((0.5 + 1.125 - 0.875 + 0.75 - 0.5 + 0.125) / 6, abs=1e-7)
    expected = [[0, -1.0, -1.0, 0, 0.5], [0, 0, -2.0], [0, 1.0, -0.25]]
    for gradient, right in zip(found.gradients, expected, strict=True):
        assert gradient.tolist() == pytest.approx([value / 6 for value in right], abs=1e-7)


@pytest.mark.parametrize("packed", PACKINGS)
def test_means_over_rollouts_weigh_turns_by_their_tokens(packed: str):
    batch = made()
    found = outcome(GRPO(loss_aggregation="seq_mean_token_mean"), batch, PACKINGS[packed](batch))
    assert found.loss == pytest.approx(((0.5 + 1.125 - 0.875) / 3 + (0.75 - 0.5 + 0.125) / 3) / 2, abs=1e-7)


@pytest.mark.parametrize("packed", PACKINGS)
def test_the_clip_looks_at_the_sign_of_each_turn(packed: str):
    batch = made()
    found = outcome(GRPO(use_ppo_clip=True, clip_low=0.1, clip_high=0.1), batch, PACKINGS[packed](batch))
    # log ratios 0, -1/8, 1/4 | -1/8 | 1/4, 0 with A = 1, 1, -1/2 | 2 | -1, 1/4: pessimistic, so none of them is clipped
    # but where A > 0 and the ratio is above 1.1, or A < 0 and it is below 0.9: nowhere here
    ratios = [1.0, math.exp(-0.125), math.exp(0.25), math.exp(-0.125), math.exp(0.25), 1.0]
    advantages = [1.0, 1.0, -0.5, 2.0, -1.0, 0.25]
    assert found.loss == pytest.approx(-math.fsum(r * a for r, a in zip(ratios, advantages, strict=True)) / 6, abs=1e-7)
    # the same with all signs turned round: 0.9 and 1.1 bind four times
    turned = [item(each.rollout_id, each.length, 3, tuple((n, -a) for n, a in each.turns or ())) for each in batch.items]
    other = Batch(batch.trajectories, turned, batch.current, batch.old, batch.reference, batch.denominators)
    found = outcome(GRPO(use_ppo_clip=True, clip_low=0.1, clip_high=0.1), other, PACKINGS[packed](other))
    bound = [1.0, 0.9, 1.1, 0.9, 1.1, 1.0]
    assert found.loss == pytest.approx(math.fsum(r * a for r, a in zip(bound, advantages, strict=True)) / 6, abs=1e-7)
    assert found.metrics["clip_fraction"] == pytest.approx(4 / 6)


def test_turns_that_do_not_cover_the_sampled_tokens_are_refused():
    batch = made()
    wrong = [item(0, 5, 3, ((2, 1.0),)), *batch.items[1:]]
    with pytest.raises(ValueError, match="rollout 0 has advantages of 2 tokens in its turns, and 3 sampled ones"):
        packing.arrange(single_rows(batch)[0], batch.trajectories, wrong)
