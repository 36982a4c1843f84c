"""A group's states: one enum, one transition function."""

from __future__ import annotations

from itertools import pairwise

import pytest

from telescope.flow.groups import GroupState, RolloutGroup, RolloutStatus, transition
from telescope.records import PromptRef

WAY = ["pending", "queued", "generating", "env", "scoring", "complete", "kept", "batched", "trained"]


def test_a_group_can_go_the_whole_way():
    for old, new in pairwise(WAY):
        assert transition(GroupState(old), GroupState(new)) == new


@pytest.mark.parametrize("final", ["trained", "discarded", "cancelled", "failed"])
def test_nothing_follows_an_end(final: str):
    for state in GroupState:
        with pytest.raises(ValueError, match=f"a group cannot pass from {final} to {state}"):
            transition(GroupState(final), state)


def test_no_group_goes_back():
    with pytest.raises(ValueError, match="from env to generating"):
        transition(GroupState.ENV, GroupState.GENERATING)


def test_only_complete_groups_are_kept_or_discarded():
    for state in (GroupState.PENDING, GroupState.QUEUED, GroupState.GENERATING, GroupState.ENV, GroupState.SCORING):
        for end in (GroupState.KEPT, GroupState.DISCARDED, GroupState.BATCHED, GroupState.TRAINED):
            with pytest.raises(ValueError, match="cannot pass"):
                transition(state, end)


def test_rollout_ids_do_not_depend_on_the_order_of_dispatch():
    group = RolloutGroup(5, PromptRef("countdown", "train", 0), returned=False, group_size=8)
    assert [rollout.rollout_id for rollout in group.rollouts] == [40, 41, 42, 43, 44, 45, 46, 47]


def test_rewards_that_differ_by_rounding_alone_are_equal():
    """Two ways to one sum of weights; such a group would take a place in a batch and teach nothing."""
    group = RolloutGroup(5, PromptRef("countdown", "train", 0), returned=False, group_size=2)
    for rollout, reward in zip(group.rollouts, (0.1 + 0.2, 0.3), strict=True):
        rollout.status, rollout.reward = RolloutStatus.DONE, reward
    assert 0.1 + 0.2 != 0.3
    assert group.rewards_are_equal
    group.rollouts[0].reward = 0.3 + 1e-9
    assert not group.rewards_are_equal


def test_turns_that_differ_are_not_equal_though_their_rollouts_rewards_are():
    """And the other way round: rollouts that no turn tells apart teach nothing, whatever their rewards."""
    group = RolloutGroup(5, PromptRef("look_up", "train", 0), returned=False, group_size=3)
    for rollout, returns in zip(group.rollouts, ((1.0, 0.5), (1.0, 1.0), (1.0,)), strict=True):
        rollout.status, rollout.reward, rollout.turn_returns = RolloutStatus.DONE, 1.0, returns
    assert not group.rewards_are_equal
    group.rollouts[1].turn_returns = (1.0, 0.5 + 1e-15)
    assert group.rewards_are_equal
    group.rollouts[1].turn_returns, group.rollouts[1].reward = (1.0,), 0.0
    assert group.rewards_are_equal  # a second turn that one rollout alone has come to compares with nothing
