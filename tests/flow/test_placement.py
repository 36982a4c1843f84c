"""Lanes that are free before the reward, servers that are pressed, and lanes that follow what the engines report."""

from __future__ import annotations

from typing import Any

import pytest

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.placement import Pressure, ServerLanes
from tests.flow.harness import Manners, World, settings
from tests.flow.test_core import CARDS, Desk, placed, runs, turn

# ---- a lane is free once the tokens are there


def one_lane(**changes: Any) -> Desk:
    return Desk(
        prompts_batch_size_for_trainer=4,
        group_size=1,
        max_concurrent_prompts_per_server=1,
        **{"free_lane_after_generation": True, **changes},
    )


def test_a_lane_is_free_when_generation_is_over_and_the_credit_when_the_worker_has_answered():
    desk = one_lane()
    assert runs(desk.open(capacity=2)) == [(0, 0)]
    assert runs(desk.tell(seen.GenerationOver(0, 0))) == [(1, 0)]
    assert desk.core.counts().rollouts_scoring == 1
    assert runs(desk.tell(seen.GenerationOver(1, 0))) == []  # the lane is free; the worker has two orders
    assert runs(desk.done(0, 1.0)) == [(2, 0)]


def test_the_lane_is_given_away_once():
    desk = one_lane()
    desk.open()
    desk.tell(seen.GenerationOver(0, 0))
    assert runs(desk.tell(seen.GenerationOver(0, 0))) == []
    assert runs(desk.done(0, 1.0)) == []  # its lane is rollout 1's
    assert runs(desk.done(1, 1.0)) == [(2, 0)]


def test_without_the_setting_the_reward_holds_the_lane():
    desk = one_lane(free_lane_after_generation=False)
    desk.open()
    assert runs(desk.tell(seen.GenerationOver(0, 0))) == []
    assert runs(desk.done(0, 1.0)) == [(1, 0)]


def test_a_rollout_keeps_its_lane_between_its_turns():
    desk = one_lane()
    desk.open()
    desk.tell(turn("r0", 0))
    assert runs(desk.tell(seen.TurnDone("r0", 0, 5, "stop"))) == []
    assert placed(desk.tell(turn("r1", 0))) == [("r1", "server-0")]


def test_whoever_asked_for_no_more_tokens_gets_none():
    desk = one_lane()
    desk.open()
    desk.tell(seen.GenerationOver(0, 0))
    assert desk.tell(turn("r", 0)) == [do.RefuseRequest("r", "its rollout has said that it asks for no more tokens")]


def test_a_failed_reward_is_tried_again_in_a_new_lane():
    desk = one_lane()
    desk.open()
    desk.tell(seen.GenerationOver(0, 0))  # rollout 1 has the lane
    assert runs(desk.failed(0)) == []
    assert runs(desk.done(1, 1.0)) == [(0, 1)]  # first in line


def test_rewards_of_ten_seconds_hold_nothing_up_with_free_lanes():
    """Three lanes for 48 rollouts, a second to generate, ten to score."""

    def seconds(**changes: bool) -> float:
        case = settings(
            number_of_steps=2,
            prompts_batch_size_for_trainer=16,
            max_concurrent_prompts_per_server=1,
            max_async_rollout=0,
            **changes,
        )
        manners = Manners(servers=1, most_turns=1, score_s=10.0, step_s=0.0, update_s=0.0, closes_share=1.0)
        return World(case, manners, seed=3).run().now

    assert seconds(free_lane_after_generation=True) < 0.5 * seconds(free_lane_after_generation=False)


# ---- where groups go


def load(server: str, kv_used: float, *, running: int = 1, waiting: int = 0, preemptions: int = 0) -> seen.ServerLoad:
    return seen.ServerLoad(server, kv_used, running, waiting, preemptions)


def two_servers(**changes: Any) -> Desk:
    desk = Desk(prompts_batch_size_for_trainer=3, group_size=2, **changes)
    desk.open(servers=2)
    return desk


def ask(desk: Desk, rollout_id: int, tokens: int) -> list[tuple[str, str]]:
    return placed(desk.tell(seen.TurnStarted(f"r{rollout_id}", rollout_id, 0, 0, tokens)))


def test_a_new_group_goes_to_the_calm_server_even_if_it_has_more_tokens():
    desk = two_servers()
    assert ask(desk, 0, 10) == [("r0", "server-0")]
    assert ask(desk, 2, 500) == [("r2", "server-1")]
    desk.tell(load("server-0", 0.9))
    assert ask(desk, 4, 10) == [("r4", "server-1")]


@pytest.mark.parametrize(("tokens", "server"), [(50, "server-1"), (51, "server-0")])
def test_a_group_leaves_a_pressed_server_for_one_with_half_its_tokens_at_most(tokens: int, server: str):
    desk = two_servers()
    ask(desk, 0, 100)
    ask(desk, 2, tokens)
    desk.tell(load("server-0", 0.9))
    assert ask(desk, 1, 10) == [("r1", server)]


def test_a_group_stays_where_both_servers_are_pressed():
    desk = two_servers()
    ask(desk, 0, 100)
    ask(desk, 2, 10)
    desk.tell(load("server-0", 0.9), load("server-1", 0.9))
    assert ask(desk, 1, 10) == [("r1", "server-0")]


def test_a_server_without_requests_is_calm_whatever_it_said_last():
    desk = two_servers()
    ask(desk, 0, 100)
    desk.tell(load("server-0", 0.99), seen.TurnDone("r0", 0, 5, "stop"), load("server-0", 0.99))
    assert ask(desk, 2, 10) == [("r2", "server-0")]


def test_a_pressed_server_still_answers_where_there_is_no_other():
    desk = Desk(group_size=2)
    desk.open()
    ask(desk, 0, 100)
    desk.tell(load("server-0", 1.0, preemptions=3))
    assert ask(desk, 1, 100) == [("r1", "server-0")]


def test_a_load_that_is_no_measure_cannot_be_reported():
    for wrong in ({"kv_used": float("nan")}, {"kv_used": 1.1}, {"kv_used": 0.5, "waiting": -1}):
        with pytest.raises(ValueError, match="kv_used must be from 0 to 1, and no count below 0"):
            load("server-0", **wrong)


# ---- lanes that follow the reports


def share(lanes: int = 64, **changes: Any) -> ServerLanes:
    return ServerLanes(
        settings(group_size=1, max_concurrent_prompts_per_server=lanes, **{"adaptive_concurrency": True, **changes})
    )


def test_above_the_soft_cap_only_the_lanes_in_use_are_offered():
    some = share()
    some.hear(load("s", 0.85), outstanding=40, now=0.0)
    assert (some.count(40), some.count(39), some.limit) == (40, 39, 64)
    some.hear(load("s", 0.84), outstanding=39, now=0.3)
    assert some.count(39) == 64


def test_above_the_hard_cap_a_quarter_of_what_is_in_use_goes_at_once_and_then_nothing_for_two_seconds():
    some = share()
    for now, limit in ((0.0, 30), (0.3, 30), (1.9, 30), (2.0, 22)):
        some.hear(load("s", 0.95), outstanding=40, now=now)
        assert some.limit == limit


def test_a_request_thrown_out_of_the_cache_cuts_and_the_same_report_again_does_not():
    some = share()
    some.hear(load("s", 0.5, preemptions=1), outstanding=64, now=0.0)
    assert (some.limit, some.pressure) == (48, Pressure.HARD)
    some.hear(load("s", 0.5, preemptions=1), outstanding=48, now=5.0)
    assert (some.limit, some.pressure) == (51, Pressure.CALM)


def test_a_burst_is_no_queue_and_what_still_waits_at_the_next_report_is():
    some = share()
    some.hear(load("s", 0.1, running=4, waiting=60), outstanding=64, now=0.0)
    assert (some.limit, some.pressure) == (64, Pressure.CALM)
    some.hear(load("s", 0.1, running=4, waiting=5), outstanding=64, now=0.3)
    assert (some.limit, some.pressure) == (48, Pressure.HARD)


def test_calm_lanes_grow_by_a_sixteenth_part_a_second_up_to_all():
    some = share()
    some.hear(load("s", 1.0), outstanding=8, now=0.0)
    assert some.limit == 6
    for now, limit in ((1.9, 6), (2.0, 7), (2.9, 7), (3.0, 8)):
        some.hear(load("s", 0.2), outstanding=6, now=now)
        assert some.limit == limit
    some.hear(load("s", 0.2, waiting=1), outstanding=6, now=4.0)
    assert some.limit == 8  # not while requests wait in the engine
    for second in range(45):
        some.hear(load("s", 0.2), outstanding=6, now=5.0 + second)
    assert some.limit == 64


def test_one_lane_is_always_offered():
    some = share()
    for second in range(20):
        some.hear(load("s", 1.0), outstanding=1, now=2.0 * second)
    assert (some.limit, some.count(1)) == (1, 1)


def test_without_the_setting_pressure_takes_no_lane():
    some = share(adaptive_concurrency=False)
    some.hear(load("s", 1.0, preemptions=9), outstanding=40, now=0.0)
    assert (some.count(40), some.limit, some.pressure) == (64, 64, Pressure.HARD)


def test_no_rollout_starts_for_a_server_above_its_soft_cap_and_others_go_on():
    desk = Desk(prompts_batch_size_for_trainer=9, group_size=1, max_concurrent_prompts_per_server=2, adaptive_concurrency=True)
    desk.tell(seen.ServerJoined("server-0", 0, 9), seen.ServerJoined("server-1", 0, 9), seen.TrainerReady(1))
    assert runs(desk.tell(seen.WorkerJoined("worker-0", 100, CARDS))) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for rollout_id in range(4):
        ask(desk, rollout_id, 10)
    desk.tell(load("server-0", 0.9))
    assert desk.core.counts().lanes == 4  # two in use, and two of the calm one
    desk.tell(seen.TurnDone("r0", 0, 5, "stop"))
    assert desk.core.counts().lanes == 3
    assert runs(desk.done(0, 1.0)) == []
    desk.tell(seen.TurnDone("r1", 1, 5, "stop"))
    assert runs(desk.done(1, 1.0)) == [(4, 0)]
    assert len(runs(desk.tell(load("server-0", 0.5)))) == 1


def test_lanes_find_what_a_small_cache_holds():
    """Requests of 10 to 60 tokens in a cache of 700: about twenty fit; 192 lanes would throw requests out all the time."""
    manners = Manners(servers=1, kv_tokens=700, most_turns=1, capacity=1024, generate_s=2.0)

    def thrown_out(adaptive: bool) -> int:
        case = settings(
            number_of_steps=12,
            prompts_batch_size_for_trainer=32,
            max_concurrent_prompts_per_server=64,
            max_async_rollout=2,
            adaptive_concurrency=adaptive,
        )
        world = World(case, manners, seed=5)
        world.run()
        return world._thrown_out["server-0"]

    assert thrown_out(adaptive=True) < 0.5 * thrown_out(adaptive=False)


def test_lanes_of_groups_are_neither_freed_early_nor_adapted():
    for name in ("free_lane_after_generation", "adaptive_concurrency"):
        with pytest.raises(
            ValueError,
            match=f"{name} needs enable_individual_sample_lanes: .* switch {name} off, or enable_individual_sample_lanes on",
        ):
            settings(enable_individual_sample_lanes=False, **{name: True})
    with pytest.raises(ValueError, match=r"kv_soft=0.9 and kv_hard=0.8 must be in order"):
        settings(kv_soft=0.9, kv_hard=0.8)
