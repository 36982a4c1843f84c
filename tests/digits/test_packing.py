"""Rows, alignment and filler."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.maths import packing
from telescope.records import TrainItem, Trajectory


def trajectory(ids, mask, logprobs=None):
    mask = np.array(mask, np.uint8)
    logprobs = np.array(logprobs if logprobs is not None else -np.arange(len(mask)), np.float32)
    return Trajectory(
        ids=np.array(ids, np.int32),
        mask=mask,
        logprobs=np.where(mask == 1, logprobs, np.nan).astype(np.float32),
        versions=np.where(mask == 1, 0, -1).astype(np.int32),
    )


def item(rollout, length, advantage=1.0, tokens=1, temperature=1.0):
    return TrainItem(
        *(rollout, 0, rollout),
        length=length,
        advantage=advantage,
        sequence_tokens=tokens,
        temperature=temperature,
    )


def test_the_costliest_goes_into_the_cheapest_row_with_room():
    rows = packing.pack([3, 7, 5, 2, 4], seq_len=10, multiple=4)
    assert [row.items for row in rows] == [(1,), (2, 3), (0, 4)]
    assert [row.starts for row in rows] == [(0,), (0, 5), (0, 3)]
    assert [row.lengths for row in rows] == [(7,), (5, 2), (3, 4)]
    assert [row.size for row in rows] == [8, 8, 8]


def test_where_equal_rows_leave_one_without_room_the_first_with_room_is_taken():
    """7 | 4 + 3 + 3 and then 3 to the 7 finds room; of 6, 5, 5, 5 the last does not."""
    rows = packing.pack([7, 4, 3, 3, 3], seq_len=10, attention_length=1e9)
    assert sorted(row.used for row in rows) == [10, 10]
    assert packing._cheapest_with_room([0, 1, 2], [6, 5, 5], [6.0, 5.0, 5.0], 10, 2) == [[0], [1, 2]]
    assert packing._cheapest_with_room([0, 1, 2, 3], [6, 5, 5, 5], [6.0, 5.0, 5.0, 5.0], 10, 2) is None


def test_a_rank_with_little_spreads_it_over_as_many_rows_as_the_others_have():
    assert [row.lengths for row in packing.pack([3, 3, 2], seq_len=10)] == [(3, 3, 2)]
    assert [row.lengths for row in packing.pack([3, 3, 2], seq_len=10, rows=2)] == [(3, 2), (3,)]
    assert [row.lengths for row in packing.pack([3, 3, 2], seq_len=10, rows=5)] == [(3,), (3,), (2,)]


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), seq_len=st.integers(50, 200), rows=st.integers(0, 9))
def test_no_row_costs_more_than_the_costliest_of_first_fit(lengths, seq_len, rows):
    def costliest(plan):
        return max(packing.cost(row, attention_length=30) for row in plan)

    first_fit = [
        [lengths[item] for item in row]
        for row in packing._first_fit(sorted(range(len(lengths)), key=lambda item: -lengths[item]), lengths, seq_len)
    ]
    plan = packing.pack(lengths, seq_len=seq_len, rows=rows, attention_length=30)
    assert costliest([row.lengths for row in plan]) <= costliest(first_fit) * (1 + 1e-9)
    costs = [packing.cost(row.lengths, attention_length=30) for row in plan]
    assert costs == sorted(costs, reverse=True)
    assert len(plan) <= max(rows, len(first_fit))


@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    seq_len=st.integers(50, 200),
    multiple=st.sampled_from([1, 8, 64]),
)
def test_every_trajectory_stands_in_one_row_once_and_no_row_is_too_full(lengths, seq_len, multiple):
    rows = packing.pack(lengths, seq_len=seq_len, multiple=multiple)
    assert sorted(index for row in rows for index in row.items) == list(range(len(lengths)))
    for row in rows:
        assert row.lengths == tuple(lengths[index] for index in row.items)
        assert 0 < row.used <= seq_len
        assert row.size % multiple == 0
        assert 0 <= row.size - row.used < multiple
    assert rows == packing.pack(lengths, seq_len=seq_len, multiple=multiple)
    assert len(rows) == packing.rows_needed(lengths, seq_len=seq_len)
    assert len(rows) <= 1 + 2 * sum(lengths) / seq_len


def test_a_trajectory_longer_than_a_row_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"trajectory 1 has 11 tokens.*trainer.seq_len=10: raise trainer.seq_len"):
        packing.pack([3, 11], seq_len=10)


def test_the_arrays_of_a_row():
    trajectories = [trajectory([5, 6, 7], [0, 1, 1]), trajectory([8, 9], [0, 1])]
    row = packing.pack([3, 2], seq_len=8, multiple=8)[0]
    arrays = packing.arrange(row, trajectories, [item(0, 3, 0.5, 2), item(1, 2, -1.5, 1)])
    assert arrays.ids.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert arrays.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert arrays.segments.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert arrays.mask.tolist() == [False, True, True, False, True, False, False, False]
    assert arrays.advantages.tolist() == [0.5, 0.5, 0.5, -1.5, -1.5, 0.0, 0.0, 0.0]
    assert arrays.sequence_tokens.tolist() == [2.0, 1.0, 0.0]
    assert arrays.boundaries.tolist() == [0, 3, 5, 8]
    np.testing.assert_array_equal(arrays.logprobs, np.float32([np.nan, -1, -2, np.nan, -1, np.nan, np.nan, np.nan]))


def test_the_last_token_of_one_trajectory_never_predicts_the_first_of_the_next():
    trajectories = [trajectory([5, 6, 7], [0, 1, 1]), trajectory([8, 9], [0, 1])]
    row = packing.pack([3, 2], seq_len=8, multiple=2)[0]
    arrays = packing.arrange(row, trajectories, [item(0, 3), item(1, 2)])
    sampled = np.flatnonzero(arrays.mask)
    assert arrays.ids[sampled].tolist() == [6, 7, 9]
    assert arrays.ids[sampled - 1].tolist() == [5, 6, 8]
    assert arrays.segments[sampled].tolist() == arrays.segments[sampled - 1].tolist()
    assert (arrays.position_ids[sampled] > 0).all()


def test_a_row_without_padding_has_an_empty_last_segment():
    arrays = packing.arrange(packing.pack([2], seq_len=2)[0], [trajectory([1, 2], [0, 1])], [item(0, 2)])
    assert arrays.segments.tolist() == [0, 0]
    assert arrays.sequence_tokens.tolist() == [1.0, 0.0]
    assert arrays.boundaries.tolist() == [0, 2, 2]


def test_a_filler_row_is_padding_alone():
    arrays = packing.arrange(packing.filler(multiple=4), [], [])
    assert arrays.mask.tolist() == [False] * 4
    assert arrays.segments.tolist() == [0] * 4
    assert arrays.sequence_tokens.tolist() == [0.0]
    assert packing.with_filler([], 2, multiple=4) == [packing.filler(multiple=4)] * 2


def test_more_rows_than_agreed_are_refused():
    with pytest.raises(ValueError, match="3 rows do not fit in 2"):
        packing.with_filler([packing.filler()] * 3, 2)


@pytest.mark.parametrize("hole", [np.nan, np.inf, -np.inf])
def test_a_missing_log_prob_is_an_error_and_never_zero(hole):
    broken = trajectory([5, 6, 7], [0, 1, 1], [0.0, -1.0, hole])
    with pytest.raises(ValueError, match="rollout 41 lacks the sampling log-prob of 1 trained tokens"):
        packing.arrange(packing.pack([3], seq_len=3)[0], [broken], [item(41, 3)])


def test_a_first_token_marked_as_sampled_is_refused():
    with pytest.raises(ValueError, match="rollout 7 marks its first token as sampled"):
        packing.arrange(packing.pack([1], seq_len=3)[0], [trajectory([5], [1])], [item(7, 1)])


def test_other_arrays_are_laid_out_as_the_row_is():
    rows = packing.pack([2, 3], seq_len=5, multiple=8)
    laid = packing.lay_out(rows[0], [np.float32([1, 2]), np.float32([3, 4, 5])], fill=-9.0)
    assert laid.tolist() == [1, 2, 3, 4, 5, -9, -9, -9]


def test_recorded_routing_lies_where_its_tokens_do_and_the_rest_is_marked():
    """A row of 3 + 2 tokens and one of padding; of the second trajectory nothing was recorded."""
    record = np.arange(6, dtype=np.uint8).reshape(3, 1, 2)
    plain = [trajectory([0] * length, [0] * length) for length in (3, 2)]
    items = [item(1, 3), item(2, 2)]
    (row,) = packing.pack([3, 2], seq_len=8, multiple=6)
    arrays = packing.arrange(row, [msgspec.structs.replace(plain[0], routed=record), plain[1]], items)
    assert arrays.routed is not None
    assert arrays.routed.tolist() == [[[0, 1]], [[2, 3]], [[4, 5]], *[[[255, 255]]] * 3]
    assert packing.arrange(row, plain, items).routed is None
