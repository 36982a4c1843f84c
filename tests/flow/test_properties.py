"""Rules that hold in every run, whatever finishes first, dies, joins, fails or says things twice. The rules are in rules.py."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.staleness import age_bound, age_bound_in_updates
from telescope.records import Sampling
from telescope.wire.channel import MessageChannel
from telescope.wire.codec import RawArrays
from telescope.wire.messages import Envelope, Generate, GenerateFailed, RolloutError, RunRollout
from tests.flow.cases import any_manners, any_settings
from tests.flow.harness import Manners, World


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
    worlds = play_many(first_seed=0, events=150_000)
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
    assert_ages_are_within_what_is_promised(worlds)
    # and of lanes that are free early, of reports that press, and of rollouts that wait for them
    assert sum(world.rules.freed for world in worlds) > 1000
    assert sum(world.rules.loads_heard for world in worlds) > 1000
    assert sum(len(world.rules.moves) for world in worlds) > 10
    adaptive = [world for world in worlds if world.settings.adaptive_concurrency and not world.manners.server_life_s]
    assert sum(world.rules.fewest_lanes < world.rules.most_lanes / 2 for world in adaptive) > 3


def assert_ages_are_within_what_is_promised(worlds: list[World]) -> None:
    """In versions, and in updates for 1 to 4 minibatches: a token trained in minibatch k of n (from 0) of step s was sampled by
    a version that is (s - 1 - version) * n + k updates behind."""
    for world in worlds:
        for train in world.rules.steps:
            oldest = max(train.step - 1 - world.rules.groups[group_id].v_start for group_id in train.group_ids)
            assert oldest <= age_bound(world.settings)
            for minibatches in (1, 2, 3, 4):
                behind = max(oldest * minibatches + k for k in range(minibatches))
                assert behind <= age_bound_in_updates(world.settings, minibatches)


class Wired(World):
    """Every order of the core goes over a real channel with the credits of its peer; each answer returns one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.channels: dict[str, MessageChannel] = {}
        self.asked: dict[object, tuple[str, int]] = {}
        self.answers: dict[str, int] = {}

    def tell(self, event: object) -> None:
        match event:
            case seen.WorkerJoined(worker=name, capacity=capacity) | seen.ServerJoined(server=name, capacity=capacity):
                self.channels[name] = MessageChannel(capacity)
                self.answers[name] = 0
                self.asked = {key: asked for key, asked in self.asked.items() if asked[0] != name}
            case seen.TurnDone(request_id=request_id):
                self._answered(request_id, GenerateFailed(request_id, ""))
            case seen.RolloutDone() | seen.RolloutFailed():
                self._answered((event.rollout_id, event.attempt), RolloutError(event.rollout_id, event.attempt, ""))
        super().tell(event)

    def _answered(self, key: object, body: GenerateFailed | RolloutError) -> None:
        name, number = self.asked.pop(key, ("", 0))
        if number:
            self.answers[name] += 1
            assert self.channels[name].accept(Envelope(body, self.answers[name], number))

    def _perform(self, command: object) -> None:
        match command:
            case do.DispatchRollout(worker=worker, order=order):
                seq, _ = self.channels[worker].send(RunRollout(order))
                self.asked[order.rollout_id, order.attempt] = worker, seq
            case do.PlaceRequest(request_id=request_id, server=server):
                body = Generate(request_id, 0, 0, 0, Sampling(1.0, 1, 0))
                seq, _ = self.channels[server].send(body, RawArrays.of((np.zeros(1, np.int32),)))
                self.asked[request_id] = server, seq
        super()._perform(command)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_no_order_of_the_core_ever_lacks_its_credit(data: st.DataObject, seed: int):
    def pick(choices):
        return data.draw(st.sampled_from(list(choices)))

    manners = replace(
        any_manners(pick), capacity=pick([1, 2, 5]), server_capacity=pick([1, 2, 5]), timeout_share=pick([0.1, 0.6])
    )
    Wired(any_settings(pick), manners, seed).run()  # channels raise NoCredit


def test_small_servers_are_filled_to_the_last_place():
    case = any_settings(Random(0).choice)
    world = Wired(case, Manners(server_capacity=2, timeout_share=0.3), seed=1).run()
    assert world.rules.outstanding_most == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_events_break_no_rule_and_every_run_ends():
    worlds = play_many(first_seed=1_000_000, events=1_000_000)
    assert_ages_are_within_what_is_promised(worlds)
    assert {world.settings.prompts_batch_size_for_trainer for world in worlds} == {1, 2, 3, 4, 8, 16, 32}
    assert {world.settings.max_async_rollout for world in worlds} == {0, 1, 2, 3, 4}
    assert {world.settings.max_off_policy_steps for world in worlds} == set(range(1, 9))
