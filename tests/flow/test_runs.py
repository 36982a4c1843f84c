"""Whole runs in the harness: they end, after exactly the steps asked for, in the situations that have hung other programs."""

from __future__ import annotations

import pytest

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.replay import decode_line
from telescope.flow.settings import FlowSettings
from telescope.records import RolloutOrder
from tests.flow.harness import Manners, World, equal, settings, sometimes_equal


@pytest.mark.parametrize("order", ["completion", "admission"])
@pytest.mark.parametrize(("m", "steps"), [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 3), (3, 4)])
def test_a_run_ends_with_exactly_its_steps_and_no_group_too_many(order: str, m: int, steps: int):
    world = World(settings(number_of_steps=steps, max_async_rollout=m, take_order=order), Manners(straggler_share=0.1)).run()
    assert world.stop == do.StopRun(f"all {steps} steps are trained", ok=True)
    assert [train.step for train in world.rules.steps] == list(range(1, steps + 1))
    counts = world.core.counts()
    kept = counts.groups_by_state["trained"]
    assert kept == 4 * steps
    assert counts.groups_admitted == kept + sum(counts.reasons.values())


def test_with_the_defaults_a_stale_cancel_really_fires():
    case = FlowSettings(number_of_steps=14, environments=(("countdown", 1.0),), rollout_deadline_s=10_000.0)
    assert (case.prompts_batch_size_for_trainer, case.group_size, case.max_async_rollout, case.max_off_policy_steps) == (
        16,
        8,
        2,
        8,
    )
    manners = Manners(capacity=1024, workers=1, straggler_share=0.01, straggler_factor=200.0, most_turns=1)
    world = World(case, manners, seed=1).run()
    counts = world.core.counts()
    assert world.stop.ok
    assert counts.reasons["cancelled: off_policy"] > 0
    assert counts.tokens_lost > 0
    assert counts.age_max <= 2 + 8 - 1


def test_every_rollout_has_one_fate():
    for seed in range(5):
        manners = Manners(straggler_share=0.1, failure_share=0.2, worker_life_s=20.0, reward=sometimes_equal)
        counts = World(settings(number_of_steps=9), manners, seed).run().core.counts()
        fates = counts.rollouts_trained + counts.rollouts_discarded + counts.rollouts_cancelled + counts.rollouts_failed
        assert fates == 3 * counts.groups_admitted
        assert counts.groups_alive == 0


def test_groups_of_equal_rewards_for_many_batches_hold_nothing_up():
    def late_learner(order: RolloutOrder) -> float:
        return float(order.sample) if order.group_id >= 4 * 15 else 0.0

    world = World(settings(), Manners(reward=late_learner)).run()
    assert world.stop.ok
    assert len(world.rules.warnings) == 1
    assert world.rules.warnings[0].startswith("40 groups in a row had equal rewards and were discarded: the task is too easy")
    assert len(world.rules.steps[0].baseline_group_ids) == 60


def test_equal_rewards_for_ever_end_the_run_with_a_sentence():
    world = World(settings(), Manners(reward=equal)).run()
    assert not world.stop.ok
    assert world.stop.reason.startswith("200 groups in a row had equal rewards")
    assert len(world.rules.warnings) == 4


def test_groups_of_one_sample_train():
    assert World(settings(group_size=1), Manners(reward=equal)).run().stop.ok


def test_one_lane_one_credit_one_server_one_worker():
    case = settings(group_size=1, max_concurrent_prompts_per_server=1, enable_individual_sample_lanes=True)
    assert World(case, Manners(workers=1, servers=1, capacity=1)).run().stop.ok
    case = settings(
        group_size=3, max_concurrent_prompts_per_server=1, enable_individual_sample_lanes=False, max_async_rollout=0
    )
    assert World(case, Manners(workers=1, servers=1, capacity=1)).run().stop.ok


def test_rollouts_a_worker_forgets_are_tried_again_after_the_deadline():
    world = World(settings(max_async_rollout=0, rollout_deadline_s=60.0), Manners(mute_share=0.1)).run()
    assert world.stop.ok
    assert world.core.counts().rollouts_retried > 0


def test_a_worker_that_never_answers_ends_the_run():
    world = World(settings(rollout_deadline_s=60.0, cancel_deadline_s=30.0), Manners(mute_share=1.0, deaf=True)).run()
    assert "did not answer the cancel of rollout" in world.stop.reason
    assert world.now < 60 + 30 + 10


def test_a_server_that_answers_long_after_the_cancel():
    """Cancels are answered at once, aborts of requests half a minute later; the places are held until then."""
    case = settings(number_of_steps=8, max_off_policy_steps=1, max_async_rollout=2, max_concurrent_prompts_per_server=4)
    manners = Manners(straggler_share=0.2, abort_s=30.0, cancel_s=0.01, server_capacity=4, timeout_share=0.1)
    for seed in range(5):
        world = World(case, manners, seed).run()
        assert world.stop.ok
        assert world.rules.outstanding_most == 4
    assert world.core.counts().reasons["cancelled: off_policy"] > 0


def test_a_worker_that_answers_long_after_the_cancel_holds_its_credits_and_no_more():
    case = settings(number_of_steps=8, max_off_policy_steps=1, max_async_rollout=2, cancel_deadline_s=120.0)
    world = World(case, Manners(straggler_share=0.2, cancel_s=20.0, capacity=8), seed=1).run()
    assert world.stop.ok
    assert world.core.counts().reasons["cancelled: off_policy"] > 0


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("steps", ["one", "two", "lag", "lag + 1"])
def test_short_runs_with_every_feature_on_end_with_exactly_their_steps(m: int, steps: str):
    """Lag is the bound of a long run: M + D - 1."""
    number = {"one": 1, "two": 2, "lag": m + 2, "lag + 1": m + 3}[steps]
    case = settings(
        number_of_steps=number,
        max_async_rollout=m,
        max_off_policy_steps=3,
        free_lane_after_generation=True,
        adaptive_concurrency=True,
        max_concurrent_prompts_per_server=4,
    )
    manners = Manners(
        straggler_share=0.1, kv_tokens=200, load_lost_share=0.3, closes_share=1.0, repeat_share=0.2, server_life_s=40.0
    )
    for seed in range(4):
        world = World(case, manners, seed).run()
        assert (world.stop.ok, len(world.rules.steps)) == (True, number)


def test_reports_that_stop_under_full_pressure_hold_nothing_up():
    """Each server says once that its cache is full, and nothing ever after."""
    case = settings(number_of_steps=4, adaptive_concurrency=True, max_concurrent_prompts_per_server=4)

    class Silent(World):
        def _place(self, command: do.PlaceRequest) -> None:
            super()._place(command)
            if command.server not in self._reported:
                self._reported[command.server] = full = seen.ServerLoad(command.server, 1.0, 1, 50, 9)
                self.tell(full)

    assert Silent(case, Manners(), seed=2).run().stop.ok


def test_updates_that_take_longer_than_a_step():
    world = World(settings(number_of_steps=8), Manners(step_s=0.1, update_s=30.0)).run()
    assert world.stop.ok


def test_repeated_and_reordered_events():
    for seed in range(5):
        world = World(settings(), Manners(repeat_share=1.0, wire_s=0.5, straggler_share=0.1), seed).run(most_events=10**6)
        assert world.stop.ok


def test_the_last_batch_does_not_wait_for_what_nobody_needs():
    """A run of one step with room for three batches generates one."""
    counts = World(settings(number_of_steps=1, max_async_rollout=2)).run().core.counts()
    assert counts.groups_admitted - counts.groups_by_state.get("discarded", 0) == 4


def batches(world: World) -> list[list[tuple[int, int, int]]]:
    """(prompt, sample seed, reward) of every trained rollout, batch by batch."""
    orders: dict[int, RolloutOrder] = {}
    trains = []
    for number, text in enumerate(world.lines[1:], start=2):
        for command in decode_line(text, number).commands:
            if isinstance(command, do.DispatchRollout):
                orders[command.order.rollout_id] = command.order
            elif isinstance(command, do.TrainGroups):
                rollout_ids = [rollout_id for ids in command.rollout_ids for rollout_id in ids]
                trains.append([(orders[i].prompt.index, orders[i].seed, orders[i].seed % 3) for i in rollout_ids])
    return trains


def test_synchronous_runs_of_one_seed_train_the_same_whatever_finishes_first():
    case = settings(max_async_rollout=0, number_of_steps=8)
    manners = (Manners(), Manners(workers=3, servers=1, straggler_share=0.3, step_s=20.0, failure_share=0.05))
    trained = [batches(World(case, kind, seed, journal=True).run()) for seed, kind in enumerate(manners)]
    assert len(trained[0]) == 8
    assert trained[0] == trained[1]


def test_synchronous_journals_of_one_seed_are_identical():
    case = settings(max_async_rollout=0, number_of_steps=8)
    first, second = (World(case, Manners(straggler_share=0.1), seed=9, journal=True).run().lines for _ in range(2))
    assert first == second
