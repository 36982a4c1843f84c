"""A batch is cut once, by whoever sees all of it: advantages, denominators and the ranks' shares agree with hand counts."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from telescope.algorithms.base import AlgorithmRaised, SampledRollout
from telescope.algorithms.rloo import RLOO
from telescope.config.models import EMBEDDED
from telescope.environments.chat import TokenChat
from telescope.environments.template import ChatTemplate
from telescope.flow.commands import TrainOnBatch
from telescope.maths import turn_credit
from telescope.orchestrator import rollout_store
from telescope.orchestrator.batch import BatchUnusable, Recipe, make_batch
from telescope.orchestrator.reward_ranges import RewardRanges
from telescope.orchestrator.rollout_store import Rollout, RolloutStore
from telescope.records import Denominators, Trajectory
from tests.environments.conftest import Script
from tests.orchestrator.test_rollout_store import make

TRAIN = TrainOnBatch(
    step=6,
    group_ids=(2, 5),
    rollout_ids=((20, 21), (50, 51, 52)),
    baseline_group_ids=(9,),
    baseline_rollout_ids=((90, 91),),
)


@pytest.fixture
def store() -> RolloutStore:
    store = RolloutStore()
    for rollout_id, group_id, reward in (
        (20, 2, 1.0),
        (21, 2, 0.0),
        (50, 5, 1.0),
        (51, 5, 1.0),
        (52, 5, 0.0),
        (90, 9, 1.0),
        (91, 9, 1.0),
    ):
        store.add(make(rollout_id, group_id, reward))
    return store


def test_each_rollout_is_compared_with_the_others_of_its_group(store: RolloutStore):
    batch = make_batch(TRAIN, store, Recipe(RLOO(), group_size=3, max_tokens=10), ranks=1)
    assert batch.advantages.tolist() == [1.0, -1.0, 0.5, 0.5, -1.0]


def test_discarded_groups_count_in_batch_statistics_only(store: RolloutStore):
    batch = make_batch(TRAIN, store, Recipe(RLOO(advantage_norm="batch"), group_size=3, max_tokens=10), ranks=1)
    seven = np.array([1.0, -1.0, 0.5, 0.5, -1.0, 0.0, 0.0])
    expected = (seven - seven.mean()) / (seven.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(batch.advantages, expected[:5], rtol=1e-12)
    assert [rollout.order.rollout_id for rollout in batch.rollouts] == [20, 21, 50, 51, 52]


def test_a_part_that_is_more_than_may_travel_is_refused_with_the_settings_that_make_it(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("telescope.orchestrator.batch.MAX_FRAME_BYTES", 4 * 2 * 4 * 5 - 1)
    make_batch(TRAIN, store, Recipe(RLOO(), group_size=3, max_tokens=10), ranks=1)
    with pytest.raises(BatchUnusable, match=r"lower orchestrator.prompts_batch_size_for_trainer or trainer.epochs_per_batch=3"):
        make_batch(TRAIN, store, Recipe(RLOO(), group_size=3, max_tokens=10, epochs=3), ranks=1)


@pytest.mark.parametrize(("given", "said"), [
    (lambda rewards: rewards.mean(), r"Own.advantages gave float64 of shape \[\]: .* for each of the 7 rollouts"),
    (lambda rewards: rewards[:5], r"gave float64 of shape \[5\]"),  # as many as are kept: those of a batch without discards
    (lambda rewards: rewards[:, None], r"gave float64 of shape \[7, 1\]"),
    (lambda rewards: rewards > 0, r"gave bool of shape \[7\]"),
    (lambda rewards: rewards * np.nan, "not finite numbers: keep rewards within a few thousand, or mend Own.advantages"),
])  # fmt: skip
def test_advantages_of_another_shape_than_one_a_rollout_are_refused(store: RolloutStore, given, said: str):
    class Own(RLOO):
        def advantages(self, rewards: np.ndarray, groups: np.ndarray, *, group_size: int) -> np.ndarray:
            return given(rewards)

    with pytest.raises(BatchUnusable, match=said):
        make_batch(TRAIN, store, Recipe(Own(), group_size=3, max_tokens=10), ranks=1)


@pytest.mark.parametrize("method", ["advantages", "filters_out"])
def test_an_algorithm_that_leaves_the_process_ends_the_run_as_one_that_raises(store: RolloutStore, method: str):
    def leaves(self: RLOO, *args: object, **kwargs: object) -> None:
        raise SystemExit("no baseline")

    own = type("Own", (RLOO,), {method: leaves})()
    line = leaves.__code__.co_firstlineno + 1
    said = rf"^step 6: Own.leaves raised SystemExit: no baseline \(test_batch.py, line {line}\)$"
    with pytest.raises(BatchUnusable, match=said):
        make_batch(TRAIN, store, Recipe(own, group_size=3, max_tokens=10), ranks=1)


def test_an_algorithm_that_writes_into_the_rewards_changes_no_record(store: RolloutStore):
    class Own(RLOO):
        def advantages(self, rewards: np.ndarray, groups: np.ndarray, *, group_size: int) -> np.ndarray:
            rewards -= 10
            return rewards.astype(np.float32)

    batch = make_batch(TRAIN, store, Recipe(Own(), group_size=3, max_tokens=10), ranks=1)
    assert (batch.advantages.dtype, batch.advantages.tolist()) == (np.float64, [-9.0, -10.0, -9.0, -9.0, -10.0])
    assert [rollout.reward for rollout in batch.rollouts] == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_rewards_that_overflow_are_refused_rather_than_trained_as_nan(store: RolloutStore, monkeypatch: pytest.MonkeyPatch):
    """Beyond the limit that is held at the door, so that this does not rest on it alone."""
    monkeypatch.setattr(turn_credit, "REWARD_LIMIT", float("inf"))
    monkeypatch.setattr(rollout_store, "METRIC_LIMIT", float("inf"))
    store.forget((20, 21))
    store.add(make(20, 2, 1e308))
    store.add(make(21, 2, -1e308))
    with (
        np.errstate(all="ignore"),
        pytest.raises(BatchUnusable, match=r"step 6: the rewards of its batch, from -1e\+308 to 1e\+308"),
    ):
        make_batch(TRAIN, store, Recipe(RLOO(), group_size=3, max_tokens=10), ranks=1)


def test_denominators_are_those_of_the_whole_batch_on_every_rank(store: RolloutStore):
    batch = make_batch(TRAIN, store, Recipe(RLOO(), group_size=3, max_tokens=10), ranks=2)
    for shard in batch.shards:
        assert shard.step.denominators == (Denominators(tokens=10, sequences=5, groups=2),)


def test_every_rollout_goes_to_exactly_one_rank_with_its_arrays(store: RolloutStore):
    batch = make_batch(TRAIN, store, Recipe(RLOO(), group_size=3, max_tokens=10), ranks=3)
    assert sorted(item.rollout_id for shard in batch.shards for item in shard.step.items) == [20, 21, 50, 51, 52]
    for shard in batch.shards:
        tokens = sum(item.length for item in shard.step.items)
        assert [len(array) for array in shard.arrays] == [tokens] * 4
        assert [array.dtype.name for array in shard.arrays] == ["int32", "uint8", "float32", "int32"]


def test_recorded_routing_goes_along_and_what_has_none_is_marked(store: RolloutStore):
    (routed,) = store.take([50])
    routed.branches = tuple(
        msgspec.structs.replace(branch, routed=np.full((len(branch.ids), 3, 2), 4, np.uint8)) for branch in routed.branches
    )
    (shard,) = make_batch(TRAIN, store, Recipe(RLOO(), group_size=3, max_tokens=10), ranks=1).shards
    *others, found = shard.arrays
    assert found.shape == (len(others[0]), 3, 2)
    owners = np.repeat([item.rollout_id for item in shard.step.items], [item.length for item in shard.step.items])
    assert (found[owners == 50] == 4).all()
    assert (found[owners != 50] == 255).all()


def test_routing_that_is_more_than_may_travel_is_refused_with_its_setting_and_its_bytes(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
):
    for rollout in store.take([20, 21, 50, 51, 52]):
        rollout.branches = tuple(
            msgspec.structs.replace(branch, routed=np.full((len(branch.ids), 8, 2), 4, np.uint8)) for branch in rollout.branches
        )
    recipe = Recipe(RLOO(), group_size=3, max_tokens=10)
    (shard,) = make_batch(TRAIN, store, recipe, ranks=1).shards
    *others, routed = (array.nbytes for array in shard.arrays)
    assert routed > max(others)
    monkeypatch.setattr("telescope.orchestrator.batch.MAX_FRAME_BYTES", routed - 1)
    with pytest.raises(
        BatchUnusable, match=rf"step 6: .* trainer\.router_replay=true of {routed} bytes .* raise cluster\.trainer_num_workers"
    ):
        make_batch(TRAIN, store, recipe, ranks=1)
    make_batch(TRAIN, store, recipe, ranks=2)


def test_ranks_that_share_rows_get_the_same_trajectories(store: RolloutStore):
    """Four ranks in pairs: what two ranks would get, twice each."""
    two = make_batch(TRAIN, store, Recipe(RLOO(), group_size=3, max_tokens=10), ranks=2)
    paired = make_batch(TRAIN, store, Recipe(RLOO(), group_size=3, max_tokens=10, ranks_a_shard=2), ranks=4)
    assert [[item.rollout_id for item in shard.step.items] for shard in paired.shards] == [
        [item.rollout_id for item in two.shards[pair].step.items] for pair in (0, 0, 1, 1)
    ]
    assert paired.shards[2].step.denominators == (Denominators(tokens=10, sequences=5, groups=2),)


def test_a_rank_without_work_gets_an_empty_shard_of_the_right_types(store: RolloutStore):
    batch = make_batch(TRAIN, store, Recipe(RLOO(), group_size=3, max_tokens=10), ranks=7)
    empty = [shard for shard in batch.shards if not shard.step.items]
    assert len(empty) == 2
    assert [array.dtype.name for array in empty[0].arrays] == ["int32", "uint8", "float32", "int32"]


def test_lag_counts_versions_between_a_token_and_the_weights_it_trains(store: RolloutStore):
    batch = make_batch(TRAIN, store, Recipe(RLOO(), group_size=3, max_tokens=10), ranks=1)
    assert batch.lags.tolist() == [1, 0] * 5  # tokens of versions 4 and 5, trained in step 6 on version 5


# ---- minibatches


def recipe(algorithm: RLOO | None = None, minibatches: int = 2) -> Recipe:
    return Recipe(algorithm or RLOO(), group_size=3, max_tokens=10, minibatches=minibatches)


def test_minibatches_take_whole_groups_each_with_its_own_counts(store: RolloutStore):
    batch = make_batch(TRAIN, store, recipe(), ranks=2)
    counts = {0: Denominators(tokens=4, sequences=2, groups=1), 1: Denominators(tokens=6, sequences=3, groups=1)}
    for shard in batch.shards:
        assert shard.step.denominators == batch.denominators
        numbers = [item.minibatch for item in shard.step.items]
        assert numbers == sorted(numbers)
    placed = {item.rollout_id: item.minibatch for shard in batch.shards for item in shard.step.items}
    assert len(placed) == 5
    assert placed[20] == placed[21] != placed[50] == placed[51] == placed[52]
    assert batch.denominators[placed[20]] == counts[0]
    assert batch.denominators[placed[50]] == counts[1]


def test_minibatches_change_no_advantage(store: RolloutStore):
    whole, halves = (make_batch(TRAIN, store, recipe(minibatches=number), ranks=2) for number in (1, 2))
    assert whole.advantages.tolist() == halves.advantages.tolist()


def test_each_minibatch_is_shared_out_over_the_ranks_by_itself(store: RolloutStore):
    batch = make_batch(TRAIN, store, recipe(), ranks=2)
    for shard in batch.shards:
        assert sorted({item.minibatch for item in shard.step.items}) == [0, 1]


def of_groups(lengths: dict[int, int]) -> tuple[TrainOnBatch, RolloutStore]:
    """Groups of two rollouts, each with a prompt of two tokens and so many sampled ones."""
    store = RolloutStore()
    for group, sampled in lengths.items():
        for sample in range(2):
            store.add(sized(2 * group + sample, group, float(sample), sampled))
    return TrainOnBatch(6, tuple(lengths), tuple((2 * group, 2 * group + 1) for group in lengths), (), ()), store


def sized(rollout_id: int, group_id: int, reward: float, sampled: int) -> Rollout:
    rollout, count = make(rollout_id, group_id, reward), 2 + sampled
    mask = np.r_[0, 0, np.ones(sampled)].astype(np.uint8)
    logprobs = np.where(mask, -1.0, np.nan).astype(np.float32)
    branch = Trajectory(np.arange(count, dtype=np.int32), mask, logprobs, np.where(mask, 5, -1).astype(np.int32))
    return replace(rollout, branches=(branch,))


def membership(command: TrainOnBatch, store: RolloutStore, seed: int) -> list[frozenset[int]]:
    """Groups of each of two minibatches."""
    batch = make_batch(command, store, replace(recipe(), group_size=2, seed=seed), ranks=3)
    items = [item for shard in batch.shards for item in shard.step.items]
    return [frozenset(item.group_id for item in items if item.minibatch == number) for number in range(2)]


def test_lengths_have_no_say_in_which_minibatch_a_group_comes_to():
    short = of_groups(dict.fromkeys(range(6), 1))
    long = of_groups({group: 1 + 9 * group for group in range(6)})
    found = [membership(*short, seed) for seed in range(12)]
    assert found == [membership(*long, seed) for seed in range(12)]
    assert len({tuple(parts) for parts in found}) > 4  # an order of the ids would put those begun first into the first always


def test_over_all_orders_each_group_is_as_often_in_each_minibatch():
    """So the expected sum over a minibatch is the sum over the batch divided by their number, whatever the lengths. The seeds
    are fixed; a fair share of 400 is a half within 0.1, four standard deviations."""
    command, store = of_groups({group: 1 + 9 * group for group in range(4)})
    firsts = [membership(command, store, seed)[0] for seed in range(400)]
    shares = [sum(group in first for first in firsts) / len(firsts) for group in range(4)]
    assert shares == pytest.approx([0.5] * 4, abs=0.1)


# ---- what is longer than a packed row


def test_of_a_trajectory_longer_than_a_row_the_beginning_is_trained_and_the_rest_counted():
    """12 tokens and rows of 7: prompt of 2, and the first 5 of 10 sampled ones."""
    command, store = of_groups({0: 10, 1: 3})
    rule = replace(recipe(minibatches=1), group_size=2, seq_len=7, truncates=True)
    batch = make_batch(command, store, rule, ranks=1)
    (shard,) = batch.shards
    assert {item.rollout_id: (item.length, item.sequence_tokens) for item in shard.step.items} == {
        0: (7, 5), 1: (7, 5), 2: (5, 3), 3: (5, 3),
    }  # fmt: skip
    assert batch.denominators == (Denominators(tokens=16, sequences=4, groups=2),)
    assert batch.truncated == {0: (5,), 1: (5,)}
    assert (batch.compute_metrics()["overlong_samples"], batch.compute_metrics()["truncated_tokens"]) == (2.0, 10.0)
    assert batch.advantages.tolist() == [-1.0, 1.0, -1.0, 1.0]
    ids, mask, *_ = shard.arrays
    assert ids[:7].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert mask[:7].tolist() == [0, 0, 1, 1, 1, 1, 1]


def test_a_trajectory_that_is_cut_keeps_its_own_versions_and_log_probs_and_is_judged_by_all_of_it():
    """Version 4 sampled the first 5 of 10 tokens. Two near-certain ones lie beyond the row: the filter sees them."""
    command, store = of_groups({0: 10})
    rollouts = []
    for rollout_id, tail in ((0, -1.0), (1, -1e-4)):
        (rollout,) = store.take((rollout_id,))
        (branch,) = rollout.branches
        versions, logprobs = branch.versions.copy(), branch.logprobs.copy()
        versions[2:7], logprobs[-2:] = 4, tail
        logprobs[2:7] = -np.arange(1, 6, dtype=np.float32)
        rollouts.append(replace(rollout, branches=(Trajectory(branch.ids, branch.mask, logprobs, versions),)))
    store = RolloutStore()
    for rollout in rollouts:
        store.add(rollout)
    algorithm = RLOO(repetition_filter_tokens=2)
    rule = replace(recipe(algorithm, minibatches=1), group_size=2, seq_len=7, truncates=True)
    batch = make_batch(command, store, rule, ranks=1)
    assert batch.filters == ((), ("repetition",))
    (shard,) = batch.shards
    _, _, logprobs, versions = shard.arrays
    assert versions.tolist() == [-1, -1, 4, 4, 4, 4, 4]
    assert logprobs[2:].tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert batch.lags.tolist() == [1] * 5


def test_a_prompt_as_long_as_a_row_leaves_nothing_to_train_and_still_counts():
    command, store = of_groups({0: 10, 1: 3})
    batch = make_batch(command, store, replace(recipe(minibatches=1), group_size=2, seq_len=2, truncates=True), ranks=2)
    assert batch.denominators == (Denominators(tokens=0, sequences=4, groups=2),)
    assert batch.compute_metrics()["truncated_tokens"] == 26.0


def test_without_leave_to_cut_it_the_batch_is_refused_with_the_remedies():
    command, store = of_groups({0: 10})
    with pytest.raises(BatchUnusable, match=r"rollout 0 has 12 tokens.*seq_len=11: .* or set trainer.overlong=truncate"):
        make_batch(command, store, replace(recipe(minibatches=1), group_size=2, seq_len=11), ranks=1)


# ---- filters and costs of length


def test_a_filtered_rollout_leaves_loss_and_counts_and_stays_in_the_baseline():
    store = RolloutStore()
    for rollout_id, group_id, reward in ((20, 2, 1.0), (21, 2, 0.0), (50, 5, 1.0), (51, 5, 1.0), (52, 5, 0.0)):
        rollout = make(rollout_id, group_id, reward)
        if rollout_id == 51:
            rollout = replace(rollout, answer=msgspec.structs.replace(rollout.result, finish_reason="length"))
        store.add(rollout)
    command = msgspec.structs.replace(TRAIN, baseline_group_ids=(), baseline_rollout_ids=())
    batch = make_batch(command, store, recipe(RLOO(overlong_filter=True)), ranks=1)
    assert batch.advantages.tolist() == [1.0, -1.0, 0.5, 0.5, -1.0]
    assert batch.filters == ((), (), (), ("overlong",), ())
    assert batch.denominators == (Denominators(tokens=4, sequences=2, groups=1),) * 2
    (shard,) = batch.shards
    assert sorted(item.rollout_id for item in shard.step.items) == [20, 21, 50, 52]
    assert len(batch.lags) == 8
    assert batch.compute_metrics() == {
        "truncated_fraction": 0.2,
        "filtered_fraction": 0.2,
        "overlong_filtered_fraction": 0.2,
        "repetition_filtered_fraction": 0.0,
        "overlong_samples": 0.0,
        "truncated_tokens": 0.0,
        "length_penalty_mean": 0.0,
        "advantage/mean": 0.0,
        "advantage/std": pytest.approx(0.7**0.5),  # of all five: (1 + 1 + 0.25 + 0.25 + 1) / 5
        "advantage/min": -1.0,
        "advantage/max": 1.0,
        "advantage/count": 5.0,
    }


def test_a_batch_without_a_single_rollout_to_train_is_still_a_step(store: RolloutStore):
    """Both sampled tokens of each rollout have probabilities of 0.37 and 0.61 here."""
    strict = RLOO(repetition_filter_tokens=2, repetition_filter_probability=0.3)
    batch = make_batch(TRAIN, store, recipe(strict), ranks=2)
    assert batch.denominators == (Denominators(0, 0, 0), Denominators(0, 0, 0))
    assert all(not shard.step.items for shard in batch.shards)
    assert len(batch.lags) == 0
    assert batch.compute_metrics()["repetition_filtered_fraction"] == 1.0


def test_lengths_cost_reward_before_advantages_are_made_of_it():
    """2 sampled tokens with max_tokens=3 and a buffer of 2 cost a half."""
    rule = Recipe(RLOO(overlong_buffer_tokens=2, overlong_penalty=1.0), group_size=2, max_tokens=3)
    store = RolloutStore()
    costly = make(20, 2, 1.0)
    rule.shape_reward(costly)
    store.add(costly)
    store.add(make(21, 2, 0.0))
    assert (costly.result.reward, costly.length_penalty, costly.reward) == (1.0, -0.5, 0.5)
    command = TrainOnBatch(1, (2,), ((20, 21),), (), ())
    batch = make_batch(command, store, rule, ranks=1)
    assert batch.advantages.tolist() == [0.5, -0.5]
    assert batch.compute_metrics()["length_penalty_mean"] == -0.25


def test_an_environments_own_limit_is_that_of_its_length_penalty():
    """2 sampled tokens of a limit of 2 with a buffer of 2 cost all of the penalty; of the run's 12 they cost nothing."""
    long = Recipe(RLOO(overlong_buffer_tokens=2, overlong_penalty=1.0), group_size=2, max_tokens=12)
    short = replace(long, own_max_tokens={"countdown": 2})
    for rule, cost in ((long, 0.0), (short, -1.0), (replace(long, own_max_tokens={"other": 2}), 0.0)):
        rollout = make(20, 2, 1.0)
        rule.shape_reward(rollout)
        assert rollout.length_penalty == cost


def test_items_carry_the_temperature_that_their_worker_names(store: RolloutStore):
    shards = make_batch(TRAIN, store, Recipe(RLOO(), group_size=3, max_tokens=10), ranks=2).shards
    assert {item.temperature for shard in shards for item in shard.step.items} == {0.7}


# ---- several epochs, and rewards within a range


def test_an_epoch_takes_every_rollout_once_and_cuts_minibatches_anew():
    store = RolloutStore()
    groups = range(6)
    for group in groups:
        for sample in range(2):
            store.add(make(2 * group + sample, group, float(sample)))
    command = TrainOnBatch(6, tuple(groups), tuple((2 * g, 2 * g + 1) for g in groups), (), ())
    rule = Recipe(RLOO(), group_size=2, max_tokens=10, minibatches=3, epochs=4, seed=7)
    batch = make_batch(command, store, rule, ranks=2)
    assert len(batch.denominators) == 12
    assert {counts.groups for counts in batch.denominators} == {2}
    members: dict[int, list[int]] = {}
    for shard in batch.shards:
        numbers = [item.minibatch for item in shard.step.items]
        assert numbers == sorted(numbers)
        for item in shard.step.items:
            members.setdefault(item.minibatch, []).append(item.rollout_id)
    epochs = [[tuple(sorted(members[3 * epoch + part])) for part in range(3)] for epoch in range(4)]
    for epoch in epochs:
        assert sorted(rollout for part in epoch for rollout in part) == list(range(12))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert batch.trained_tokens * 4 == sum(counts.tokens for counts in batch.denominators)
    again = make_batch(command, store, rule, ranks=2)
    assert [shard.step for shard in again.shards] == [shard.step for shard in batch.shards]
    other = make_batch(command, store, replace(rule, seed=8), ranks=2)
    assert [shard.step for shard in other.shards] != [shard.step for shard in batch.shards]


def test_normalised_rewards_are_trained_on_and_the_raw_one_stays():
    ranges = RewardRanges({"countdown": (-1.0, 3.0)}, normalize=True)
    rule = Recipe(RLOO(overlong_buffer_tokens=2, overlong_penalty=1.0), group_size=2, max_tokens=3, rewards=ranges)
    rollout, raw = make(20, 2, 1.0), make(20, 2, 1.0)
    rule.shape_reward(rollout)
    assert (rollout.result.reward, rollout.reward) == (1.0, 0.5 - 0.5)
    replace(rule, rewards=RewardRanges({"countdown": (-1.0, 3.0)})).shape_reward(raw)
    assert raw.reward == 1.0 - 0.5
    assert (ranges.normalise("countdown", 5.0), ranges.normalise("other", 5.0), ranges.choose("other", 5.0)) == (
        1.5,
        None,
        5.0,
    )


def test_rewards_outside_their_range_are_counted_and_told_once():
    ranges = RewardRanges({"countdown": (0.0, 1.0)})
    said = [ranges.note("countdown", reward) for reward in (0.0, 1.0, 1.5, -2.0)]
    assert [bool(sentence) for sentence in said] == [False, False, True, False]
    assert "environments.countdown is 1.5, outside [reward_min=0, reward_max=1]" in said[2]
    assert (ranges.outside, ranges.note("other", 9.0)) == ({"countdown": 2}, "")


# ---- rollouts of several branches


async def recorded(rollout_id: int, reward: float, answers: int) -> Rollout:
    """A rollout of `answers` answers, each in a branch of its own, out of the chat itself."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "tiny")
    policy = Script(*(([71 + at, 1], "stop") for at in range(answers)))
    chat = TokenChat(ChatTemplate(tokenizer, [1]), policy, 100)
    for _ in range(answers):
        chat.restart()
        await chat.say({"role": "user", "content": "ab"})
    record = chat.recording()
    arrays = tuple(
        np.concatenate([getattr(branch, name) for branch in record.branches])
        for name in ("ids", "mask", "logprobs", "versions")
    )
    whole = make(rollout_id, 2, reward)
    done = msgspec.structs.replace(
        whole.result,
        branch_lengths=tuple(len(branch.ids) for branch in record.branches),
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        turns=record.turns,
    )
    whole.score(done, arrays, newest=100)
    return whole


@pytest.mark.parametrize("ranks", [1, 3])
async def test_the_outcome_reaches_every_sampled_token_of_every_branch(ranks: int):
    store = RolloutStore()
    for rollout_id, reward, answers in ((20, 1.0, 3), (21, 0.0, 1), (22, 0.0, 2)):
        store.add(await recorded(rollout_id, reward, answers))
    command = TrainOnBatch(60, (2,), ((20, 21, 22),), baseline_group_ids=(), baseline_rollout_ids=())
    batch = make_batch(command, store, Recipe(RLOO(), group_size=3, max_tokens=10), ranks=ranks)
    reached: dict[int, list[tuple[int, float]]] = {20: [], 21: [], 22: []}
    for shard in batch.shards:
        ids, mask, *_ = shard.arrays
        at = 0
        for item in shard.step.items:
            whole = slice(at, at + item.length)
            reached[item.rollout_id] += [(int(token), item.advantage) for token in ids[whole][mask[whole] == 1]]
            at += item.length
    assert reached[20] == [(token, 1.0) for token in (71, 1, 72, 1, 73, 1)]
    assert reached[21] == [(71, -0.5), (1, -0.5)]
    assert reached[22] == [(token, -0.5) for token in (71, 1, 72, 1)]
    items = [item for shard in batch.shards for item in shard.step.items]
    assert {item.rollout_id: item.sequence_tokens for item in items} == {20: 6, 21: 2, 22: 4}
    assert {shard.step.denominators for shard in batch.shards} == {(Denominators(tokens=12, sequences=3, groups=1),)}
    assert batch.trained_tokens == 12


def test_a_method_of_an_algorithm_that_raises_is_named_with_step_and_line(store: RolloutStore):
    class Own(RLOO):
        def advantages(self, rewards: np.ndarray, groups: np.ndarray, *, group_size: int) -> np.ndarray:
            return self._scaled({})

        def _scaled(self, scales: dict[str, float]) -> np.ndarray:
            return np.zeros(7) * scales["math"]

        def length_penalty(self, tokens: int, *, max_tokens: int) -> float:
            raise AssertionError

    class Filter(RLOO):
        def filters_out(self, rollout: SampledRollout) -> tuple[str, ...]:
            return (str(1 // 0),)

    recipe = Recipe(Own(), group_size=3, max_tokens=10)
    with pytest.raises(
        BatchUnusable, match=r"^step 6: Own._scaled raised KeyError: 'math' \(test_batch.py, line \d+\)$"
    ) as raised:
        make_batch(TRAIN, store, recipe, ranks=1)
    assert isinstance(raised.value.__cause__, AlgorithmRaised)
    assert isinstance(raised.value.__cause__.__cause__, KeyError)
    with pytest.raises(BatchUnusable, match=r"^step 6: Filter.filters_out raised ZeroDivisionError: integer .*, line \d+\)$"):
        make_batch(TRAIN, store, Recipe(Filter(), group_size=3, max_tokens=10), ranks=1)
    with pytest.raises(
        AlgorithmRaised, match=r"^rollout 20: Own.length_penalty raised AssertionError: without a word \(test_batc"
    ):
        recipe.shape_reward(store.take((20,))[0])
