"""A group's states: one enum, one transition function."""

from __future__ import annotations

from itertools import pairwise

import pytest

from telescope.flow.groups import Group, State, transition
from telescope.records import PromptRef

WAY = ["pending", "queued", "generating", "env", "scoring", "complete", "kept", "batched", "trained"]


def test_a_group_can_go_the_whole_way():
    for old, new in pairwise(WAY):
        assert transition(State(old), State(new)) == new


@pytest.mark.parametrize("final", ["trained", "discarded", "cancelled", "failed"])
def test_nothing_follows_an_end(final: str):
    for state in State:
        with pytest.raises(ValueError, match=f"a group cannot pass from {final} to {state}"):
            transition(State(final), state)


def test_no_group_goes_back():
    with pytest.raises(ValueError, match="from env to generating"):
        transition(State.ENV, State.GENERATING)


def test_only_complete_groups_are_kept_or_discarded():
    for state in (State.PENDING, State.QUEUED, State.GENERATING, State.ENV, State.SCORING):
        for end in (State.KEPT, State.DISCARDED, State.BATCHED, State.TRAINED):
            with pytest.raises(ValueError, match="cannot pass"):
                transition(state, end)


def test_rollout_ids_do_not_depend_on_the_order_of_dispatch():
    group = Group(5, PromptRef("countdown", "train", 0), returned=False, group_size=8)
    assert [sample.rollout_id for sample in group.samples] == [40, 41, 42, 43, 44, 45, 46, 47]
