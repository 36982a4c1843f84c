"""Counts of an update, ranks' shares, the learning rate, summaries and the finishing of metrics."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telescope.maths import dealing, metrics, minibatches, packing, summaries
from telescope.maths.learning_rate import learning_rate_factor
from telescope.records import Denominators


def test_denominators_count_rollouts_without_a_trained_token():
    assert minibatches.denominators([3, 0, 5], [7, 7, 2]) == Denominators(tokens=8, sequences=3, groups=2)


def test_the_costliest_goes_to_the_idlest_rank():
    assert dealing.assign([5.0, 1.0, 4.0], 2) == ((0,), (1, 2))
    assert dealing.assign([1.0, 1.0, 1.0, 1.0], 2) == ((0, 2), (1, 3))


def test_a_rank_may_get_nothing():
    assert dealing.assign([2.0], 3) == ((0,), (), ())
    assert dealing.assign([], 2) == ((), ())


def test_groups_are_cut_in_order_into_parts_that_differ_by_one_at_most():
    assert minibatches.cut([1, 2, 3, 4, 5], 2) == ([1, 2, 3], [4, 5])
    assert minibatches.cut([1, 2, 3], 3) == ([1], [2], [3])
    assert minibatches.cut("abcdefgh", 3) == ("abc", "def", "gh")
    for parts in (0, 4):
        with pytest.raises(ValueError, match=f"3 groups can't make {parts} minibatches"):
            minibatches.cut([1, 2, 3], parts)


@given(costs=st.lists(st.floats(0, 1e6), max_size=40), ranks=st.integers(1, 5))
def test_every_rollout_goes_to_one_rank_and_the_shares_are_near_equal(costs, ranks):
    shares = dealing.assign(costs, ranks)
    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    loads = [sum(costs[index] for index in share) for share in shares]
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0.0) + 1e-6


def test_attention_makes_one_long_rollout_cost_more_than_two_halves():
    assert packing.cost([100], attention_length=100) == 200.0
    assert packing.cost([50, 50], attention_length=100) == 150.0


def test_the_first_warm_up_step_is_one_nth_and_not_zero():
    factors = [learning_rate_factor(s, schedule="constant", number_of_steps=10, warmup_steps=4) for s in range(1, 7)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_reach_the_smallest_ratio_at_the_last_step():
    common = {"number_of_steps": 9, "warmup_steps": 1, "min_ratio": 0.1}
    linear = [learning_rate_factor(s, schedule="linear", **common) for s in (1, 5, 9)]
    cosine = [learning_rate_factor(s, schedule="cosine", **common) for s in (1, 3, 5, 9)]
    assert linear == pytest.approx([1.0, 0.55, 0.1])
    assert cosine == pytest.approx([1.0, 1 - 0.9 * (1 - math.cos(math.pi / 4)) / 2, 0.55, 0.1])


def test_schedules_without_warm_up_begin_at_the_full_rate():
    for schedule in ("none", "constant", "linear", "cosine"):
        assert learning_rate_factor(1, schedule=schedule, number_of_steps=1) == 1.0
        assert learning_rate_factor(1, schedule=schedule, number_of_steps=5) == 1.0


def test_none_is_fixed_and_knows_no_warm_up():
    assert [learning_rate_factor(s, schedule="none", number_of_steps=5, warmup_steps=3) for s in (1, 5)] == [1.0, 1.0]


def test_a_warm_up_longer_than_the_run_only_warms_up():
    assert [learning_rate_factor(s, schedule="cosine", number_of_steps=2, warmup_steps=4) for s in (1, 2)] == [0.25, 0.5]


def test_after_the_last_step_the_rate_stays_down():
    assert learning_rate_factor(12, schedule="linear", number_of_steps=10, min_ratio=0.2) == pytest.approx(0.2)


def test_step_zero_is_refused():
    with pytest.raises(ValueError, match="steps count from 1"):
        learning_rate_factor(0, schedule="linear", number_of_steps=10)


def test_gini_by_hand():
    assert summaries.gini([1, 1, 1]) == 0.0
    assert summaries.gini([0, 0, 0, 1]) == pytest.approx(0.75)
    assert summaries.gini([1, 3]) == pytest.approx(0.25)
    assert summaries.gini([0.0, 0.0]) == 0.0
    assert summaries.gini([0.1, 0.1, 0.1]) == 0.0
    assert summaries.gini([-1.0, 1.0]) == pytest.approx(0.5)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=20))
def test_gini_is_the_mean_difference_of_all_pairs(values):
    known = np.array(values)
    expected = 0.0 if known.sum() == 0 else np.abs(known[:, None] - known).mean() / (2 * known.mean())
    assert summaries.gini(values) == pytest.approx(expected, abs=1e-9)


def test_group_means_take_each_group_alone():
    assert summaries.group_mean(summaries.gini, [1, 3, 5, 5], [0, 0, 4, 4]) == pytest.approx(0.125)
    assert summaries.group_mean(summaries.max_median_ratio, [1, 1, 6, 4, 4], [0, 0, 0, 1, 1]) == pytest.approx(3.5)
    assert summaries.group_mean(summaries.gini, [], []) is None


def test_summaries_by_hand():
    assert summaries.summary([1.0, 3.0]) == {"mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0}
    assert summaries.percentiles([0.0, 10.0], (50, 90)) == {"p50": 5.0, "p90": pytest.approx(9.0)}
    assert summaries.summary([]) == summaries.percentiles([]) == {}


def test_metrics_over_two_rows_equal_those_over_all_tokens():
    rows = [
        (torch.tensor([1.001, 0.999, float("nan")]), torch.tensor([True, True, False])),
        (torch.tensor([1.003]), torch.tensor([True])),
    ]
    sums, peaks = {}, {}
    for values, mask in rows:
        sums = metrics.merge_sums(sums, metrics.mean_sums("ratio", values, mask, spread=True))
        peaks = metrics.merge_peaks(peaks, metrics.extremes("ratio", values, mask))
    known = np.float32([1.001, 0.999, 1.003]).astype(np.float64)
    finished = metrics.finish({name: float(v) for name, v in sums.items()}, {name: float(v) for name, v in peaks.items()})
    assert finished == {
        "ratio_mean": pytest.approx(known.mean(), rel=1e-12),
        "ratio_std": pytest.approx(known.std(), rel=1e-6),
        "ratio_min": known.min(),
        "ratio_max": known.max(),
    }


def test_what_no_token_measured_is_left_out():
    values, mask = torch.tensor([float("nan")]), torch.tensor([False])
    sums, peaks = metrics.mean_sums("ratio", values, mask), metrics.extremes("ratio", values, mask)
    assert metrics.finish({n: float(v) for n, v in sums.items()}, {n: float(v) for n, v in peaks.items()}) == {}
