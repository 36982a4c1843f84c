"""A batch is cut once, by whoever sees all of it: advantages, denominators and the ranks' shares agree with hand counts."""

from __future__ import annotations

import numpy as np
import pytest

from telescope.algorithms.rloo import RLOO
from telescope.flow.commands import Train
from telescope.orchestrator.batch import cut
from telescope.orchestrator.shelf import Shelf
from tests.orchestrator.test_shelf import make

TRAIN = Train(
    step=6,
    group_ids=(2, 5),
    rollout_ids=((20, 21), (50, 51, 52)),
    baseline_group_ids=(9,),
    baseline_rollout_ids=((90, 91),),
)


@pytest.fixture
def shelf() -> Shelf:
    shelf = Shelf()
    for rollout_id, group_id, reward in (
        (20, 2, 1.0),
        (21, 2, 0.0),
        (50, 5, 1.0),
        (51, 5, 1.0),
        (52, 5, 0.0),
        (90, 9, 1.0),
        (91, 9, 1.0),
    ):
        shelf.put(make(rollout_id, group_id, reward))
    return shelf


def test_each_rollout_is_compared_with_the_others_of_its_group(shelf: Shelf):
    batch = cut(TRAIN, shelf, RLOO(), group_size=3, ranks=1)
    assert batch.advantages.tolist() == [1.0, -1.0, 0.5, 0.5, -1.0]


def test_discarded_groups_count_in_batch_statistics_only(shelf: Shelf):
    batch = cut(TRAIN, shelf, RLOO(advantage_norm="batch"), group_size=3, ranks=1)
    seven = np.array([1.0, -1.0, 0.5, 0.5, -1.0, 0.0, 0.0])
    expected = (seven - seven.mean()) / (seven.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(batch.advantages, expected[:5], rtol=1e-12)
    assert [rollout.order.rollout_id for rollout in batch.rollouts] == [20, 21, 50, 51, 52]


def test_denominators_are_those_of_the_whole_batch_on_every_rank(shelf: Shelf):
    batch = cut(TRAIN, shelf, RLOO(), group_size=3, ranks=2)
    for shard in batch.shards:
        assert (shard.step.denominators.tokens, shard.step.denominators.sequences, shard.step.denominators.groups) == (10, 5, 2)


def test_every_rollout_goes_to_exactly_one_rank_with_its_arrays(shelf: Shelf):
    batch = cut(TRAIN, shelf, RLOO(), group_size=3, ranks=3)
    assert sorted(item.rollout_id for shard in batch.shards for item in shard.step.items) == [20, 21, 50, 51, 52]
    for shard in batch.shards:
        tokens = sum(item.length for item in shard.step.items)
        assert [len(array) for array in shard.arrays] == [tokens] * 4
        assert [array.dtype.name for array in shard.arrays] == ["int32", "uint8", "float32", "int32"]


def test_a_rank_without_work_gets_an_empty_shard_of_the_right_types(shelf: Shelf):
    batch = cut(TRAIN, shelf, RLOO(), group_size=3, ranks=7)
    empty = [shard for shard in batch.shards if not shard.step.items]
    assert len(empty) == 2
    assert [array.dtype.name for array in empty[0].arrays] == ["int32", "uint8", "float32", "int32"]


def test_lag_counts_versions_between_a_token_and_the_weights_it_trains(shelf: Shelf):
    batch = cut(TRAIN, shelf, RLOO(), group_size=3, ranks=1)
    assert batch.lags.tolist() == [1, 0] * 5  # tokens of versions 4 and 5, trained in step 6 on version 5
