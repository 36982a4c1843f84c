"""Rewards to advantages, by hand."""

import random

import numpy as np
import pytest

from telescope.algorithms.cispo import CISPO
from telescope.algorithms.dr_grpo import DrGRPO
from telescope.algorithms.grpo import GRPO
from telescope.algorithms.gspo import GSPO
from telescope.algorithms.reinforce_pp import ReinforcePP
from telescope.algorithms.rloo import RLOO
from telescope.algorithms.sapo import SAPO
from telescope.maths.advantages import Groups
from telescope.maths.rounding import is_rounding

ALL = [GRPO(), RLOO(), ReinforcePP(), DrGRPO(), CISPO(), GSPO(), SAPO()]
ALL += [GRPO(advantage_norm="batch"), GRPO(advantage_norm="none"), RLOO(advantage_norm="batch"), DrGRPO(advantage_norm="batch")]


def advantages(algorithm, rewards, groups=None, group_size=8):
    groups = np.zeros(len(rewards), int) if groups is None else np.array(groups)
    return algorithm.advantages(np.array(rewards), groups, group_size=group_size)


def test_grpo_divides_by_the_sample_standard_deviation_plus_1e_4():
    # mean 1, deviations -1 0 1, ddof 1: standard deviation 1
    assert advantages(GRPO(), [0.0, 1.0, 2.0]) == pytest.approx([-1 / 1.0001, 0.0, 1 / 1.0001], abs=1e-15)


def test_rloo_leaves_itself_out():
    # 3 - mean(1, 2) = 1.5 and so on
    assert advantages(RLOO(), [3.0, 1.0, 2.0]) == pytest.approx([1.5, -1.5, 0.0], abs=1e-15)


def test_dr_grpo_only_subtracts_the_mean():
    assert advantages(DrGRPO(), [3.0, 1.0, 2.0]) == pytest.approx([1.0, -1.0, 0.0], abs=1e-15)


def test_reinforce_pp_centres_in_the_group_and_scales_over_the_batch():
    # centred: -1 1 -3 3; their mean 0, variance 20/3
    scale = np.sqrt(20 / 3) + 1e-4
    assert advantages(ReinforcePP(), [0.0, 2.0, 4.0, 10.0], [7, 7, 9, 9]) == pytest.approx(
        [-1 / scale, 1 / scale, -3 / scale, 3 / scale], abs=1e-15
    )


def test_reinforce_pp_with_one_sample_a_prompt_standardises_raw_rewards():
    # mean 2, variance (4 + 0 + 4) / 2 = 4
    assert advantages(ReinforcePP(), [0.0, 2.0, 4.0], [0, 1, 2], group_size=1) == pytest.approx(
        [-2 / 2.0001, 0.0, 2 / 2.0001], abs=1e-15
    )


def test_a_lone_survivor_of_a_larger_group_gets_nothing_rather_than_its_raw_reward():
    for algorithm in ALL:
        assert advantages(algorithm, [5.0, 0.0, 1.0], [0, 1, 1], group_size=8)[0] == 0.0


@pytest.mark.parametrize("algorithm", ALL, ids=repr)
@pytest.mark.parametrize("reward", [0.1, 0.0, -1 / 3, 1e9])
@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_equal_rewards_are_exactly_zero(algorithm, reward, size):
    # the mean of three 0.1s is 0.10000000000000002
    assert advantages(algorithm, [reward] * size).tolist() == [0.0] * size
    beside = advantages(algorithm, [reward] * size + [0.0, 1.0], [0] * size + [1, 1])
    assert beside[:size].tolist() == [0.0] * size
    assert beside[size] < 0 < beside[size + 1]


@pytest.mark.parametrize("algorithm", ALL, ids=repr)
def test_rewards_that_differ_by_rounding_alone_are_equal_and_small_ones_are_not(algorithm):
    assert advantages(algorithm, [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2 - 0.0]).tolist() == [0.0] * 4
    assert advantages(algorithm, [0.1 + 0.2 - 0.3, 0.0, 0.0]).tolist() == [0.0] * 3
    assert advantages(algorithm, [3e9 + 1e-6, 3e9]).tolist() == [0.0] * 2
    assert advantages(algorithm, [1e-9, 0.0])[0] > 0


@pytest.mark.parametrize("algorithm", [RLOO(), RLOO(advantage_norm="batch"), GRPO()], ids=repr)
def test_one_that_differs_from_seven_equal_ones_is_weighed_by_all_eight(algorithm):
    """Where the others' spread alone divides, its rounding makes thousands of a difference of 0.95."""
    got = advantages(algorithm, [0.0] + [0.95] * 7)
    assert got[1:] == pytest.approx([-got[0] / 7] * 7)
    assert -2.5 < got[0] < -0.9


def test_groups_of_equal_rewards_count_in_the_batch_of_batch_normalisation():
    alone = advantages(GRPO(advantage_norm="batch"), [0.0, 2.0])
    beside = advantages(GRPO(advantage_norm="batch"), [0.0, 2.0, 5.0, 5.0], [0, 0, 1, 1])
    assert alone == pytest.approx([-1 / (np.sqrt(2) + 1e-4), 1 / (np.sqrt(2) + 1e-4)])
    assert beside[:2] == pytest.approx([-1 / (np.sqrt(2 / 3) + 1e-4), 1 / (np.sqrt(2 / 3) + 1e-4)])


def test_groups_of_unequal_size_each_have_their_own_mean():
    got = advantages(RLOO(), [1.0, 0.0, 1.0, 0.0, 0.0], [4, 2, 4, 2, 4])
    assert got == pytest.approx([0.5, 0.0, 0.5, 0.0, -1.0])


def test_the_order_of_rollouts_does_not_matter():
    rewards, groups = np.array([0.3, 1.0, 0.2, 0.9, 0.4]), np.array([0, 1, 0, 1, 1])
    order = np.array([3, 0, 4, 2, 1])
    for algorithm in ALL:
        whole = algorithm.advantages(rewards, groups, group_size=8)
        assert algorithm.advantages(rewards[order], groups[order], group_size=8) == pytest.approx(whole[order], abs=1e-12)


def test_statistics_are_per_rollout_and_float64():
    got = advantages(GRPO(), np.array([0.0, 1.0], np.float32))
    assert got.dtype == np.float64


@pytest.mark.parametrize("rewards", [[np.nan, 1.0], [0.0, np.inf]])
def test_a_reward_that_is_no_number_is_refused_in_words(rewards):
    with pytest.raises(ValueError, match=r"reward \d is (nan|inf): a reward must be a finite number"):
        advantages(GRPO(), rewards)


def test_no_rollouts_make_no_advantages():
    for algorithm in ALL:
        assert advantages(algorithm, []).shape == (0,)


def test_a_group_is_equal_for_the_core_and_for_the_trainer_alike():
    draw = random.Random(7)
    verdicts = set()
    for _ in range(2000):
        low = draw.uniform(-1, 1) * 10.0 ** draw.randint(-6, 6)
        high = low + max(1.0, abs(low)) * draw.uniform(0.5, 2.0) * 10.0 ** draw.choice((-12, -13, -12, -11))
        same = is_rounding(low, high)
        assert Groups(np.array([high, low]), np.array([0, 0])).equal.tolist() == [same, same]
        verdicts.add(same)
    assert verdicts == {True, False}
