"""Rules that hold in every run, whatever finishes first, dies, joins, fails or says things twice. The rules are in rules.py."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.flow.cases import any_manners, any_settings
from tests.flow.harness import World


def play(seed: int, most_events: int = 200_000) -> World:
    chance = Random(seed)
    return World(any_settings(chance.choice), any_manners(chance.choice), seed).run(most_events)


def play_many(first_seed: int, events: int) -> list[World]:
    worlds = []
    while sum(world.events for world in worlds) < events:
        worlds.append(play(first_seed + len(worlds)))
    return worlds


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_no_run_breaks_a_rule(data: st.DataObject, seed: int):
    def pick(choices):
        return data.draw(st.sampled_from(list(choices)))

    World(any_settings(pick), any_manners(pick), seed).run()


def test_a_hundred_thousand_events_break_no_rule_and_every_run_ends():
    worlds = play_many(first_seed=0, events=100_000)
    # what the runs were made of, so that a tame generator cannot pass for a proof
    ends = [world.stop.ok for world in worlds]
    assert ends.count(True) > 20
    assert ends.count(False) > 10
    fates = {state for world in worlds for state, groups in world.core.counts().groups_by_state.items() if groups}
    assert fates == {"trained", "discarded", "cancelled", "failed"}
    reasons = {reason for world in worlds for reason in world.core.counts().reasons}
    assert "cancelled: off_policy" in reasons
    assert sum(world.core.counts().rollouts_retried for world in worlds) > 500
    assert sum(world.core.counts().results_ignored for world in worlds) > 500
    assert max(age for world in worlds for age in world.rules.ages) >= 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_events_break_no_rule_and_every_run_ends():
    worlds = play_many(first_seed=1_000_000, events=1_000_000)
    assert {world.settings.groups_per_batch for world in worlds} == {1, 2, 3, 4, 8, 32}
    assert {world.settings.max_async for world in worlds} == {0, 1, 2, 3, 4}
    assert {world.settings.max_off_policy_steps for world in worlds} == set(range(1, 9))
