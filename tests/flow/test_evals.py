"""Evals beside training: when they are due, that both come to their end, and what becomes of an eval at a stop."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.evals import EVAL_IDS, eval_seed
from telescope.flow.replay import replay
from telescope.flow.settings import EvalRules
from telescope.records import RolloutOrder
from tests.flow.cases import any_manners, any_settings
from tests.flow.harness import Manners, World, settings

OWN = EvalRules(name="own", environment="countdown", every=2, num_samples=2)


def evals_of(world: World) -> list[tuple[str, int, str]]:
    return [(said.eval, said.step, said.state) for said in world.said if isinstance(said, do.EndEval)]


def orders_of(world: World, *, of_evals: bool) -> list[RolloutOrder]:
    orders = [said.order for said in world.said if isinstance(said, do.DispatchRollout)]
    return [order for order in orders if bool(order.eval) == of_evals]


def trained_by(world: World) -> list[Any]:
    return [said for said in world.said if isinstance(said, do.TrainOnBatch)]


def test_an_eval_is_due_before_the_first_step_each_so_many_steps_and_after_the_last():
    world = World(settings(number_of_steps=5, evals=(OWN,))).run()
    assert world.stop is not None
    assert world.stop.ok
    assert sorted(evals_of(world)) == [("own", step, "complete") for step in (0, 2, 4, 5)]


@pytest.mark.parametrize(
    ("changes", "steps"),
    [({"baseline": False}, (2, 4, 5)), ({"final": False}, (0, 2, 4)), ({"every": 0}, (0, 5)), ({"every": 5}, (0, 5))],
)
def test_which_ones_is_set_for_each_eval(changes: dict[str, Any], steps: tuple[int, ...]):
    world = World(settings(number_of_steps=5, evals=(msgspec.structs.replace(OWN, **changes),))).run()
    assert [step for _, step, _ in sorted(evals_of(world))] == list(steps)


def test_each_round_plays_the_same_prompts_with_the_same_seeds():
    world = World(settings(number_of_steps=2, evals=(OWN,)), Manners(eval_prompts=3)).run()
    orders = orders_of(world, of_evals=True)
    first, last = orders[:6], orders[6:]
    assert [(order.prompt.index, order.sample, order.seed) for order in first] == [
        (index, sample, eval_seed(0, "own", index, sample)) for index in range(3) for sample in range(2)
    ]
    assert [(one.prompt, one.sample, one.seed) for one in first] == [(one.prompt, one.sample, one.seed) for one in last]
    assert len({order.rollout_id for order in orders}) == 12
    assert min(order.rollout_id for order in orders) == EVAL_IDS


def test_the_number_of_prompts_can_be_less_than_the_split_and_never_more():
    for wanted, played in ((2, 2), (0, 3), (50, 3)):
        rules = msgspec.structs.replace(OWN, num_prompts=wanted, every=0, final=False)
        world = World(settings(evals=(rules,)), Manners(eval_prompts=3)).run()
        assert {order.prompt.index for order in orders_of(world, of_evals=True)} == set(range(played))


def test_the_baseline_is_of_the_first_weights_alone():
    """No batch is trained before it has ended, however long one of its samples takes."""
    for seed in range(20):
        manners = Manners(straggler_share=0.2, straggler_factor=50.0, step_s=0.0, update_s=0.0)
        world = World(settings(evals=(OWN,)), manners, seed).run()
        ended = next(at for at, said in enumerate(world.said) if isinstance(said, do.EndEval))
        trained = next(at for at, said in enumerate(world.said) if isinstance(said, do.TrainOnBatch))
        assert ended < trained


def test_training_goes_on_under_an_eval_that_takes_for_ever():
    """Stragglers of an eval hold no more than its part of the lanes while training waits, so steps go on."""
    slow = EvalRules(name="slow", environment="countdown", every=1, num_samples=8, baseline=False, final=False)
    case = settings(number_of_steps=12, evals=(slow,), max_concurrent_prompts_per_server=2)
    world = World(case, Manners(servers=1, eval_prompts=40), 3)
    world.run()
    states = evals_of(world)
    assert ("slow", 2, "left out") in states, "a step came before the eval of the step before had ended"
    assert world.stop is not None
    assert world.stop.ok
    assert [name for name, _, state in states if state == "complete"] == ["slow"] * sum(
        isinstance(said, do.BeginEval) for said in world.said
    )


def test_lanes_are_shared_by_the_rule():
    """While both wait, an eval holds a quarter of the lanes at most, and training never has to wait for two of its starts."""
    rules = EvalRules(name="own", environment="countdown", every=1, num_samples=8, baseline=False, final=False)
    case = settings(number_of_steps=4, group_size=4, max_concurrent_prompts_per_server=2, max_async_rollout=3, evals=(rules,))
    world = World(case, Manners(servers=1, eval_prompts=30, most_turns=1), 1)
    running: dict[tuple[int, int], bool] = {}
    starts: list[bool] = []

    def watch(event: Any) -> None:
        if isinstance(event, seen.RolloutDone | seen.RolloutFailed):
            running.pop((event.rollout_id, event.attempt), None)
        before, started = len(world.said), list[bool]()
        World.tell(world, event)
        for said in world.said[before:]:
            if isinstance(said, do.DispatchRollout):
                order = said.order
                running[order.rollout_id, order.attempt] = bool(order.eval)
                started.append(bool(order.eval))
        counts = world.core.counts()
        waits = counts.rollouts_waiting > counts.eval_samples_left - sum(running.values())
        if waits and any(started):
            assert sum(running.values()) <= 2, "a quarter of eight lanes"
        starts.extend(of_eval and waits for of_eval in started)

    world.tell = watch  # type: ignore[method-assign]
    world.run()
    assert any(starts)
    assert not any(one and other for one, other in pairwise(starts))


def test_a_single_lane_serves_both():
    rules = msgspec.structs.replace(OWN, every=1)
    case = settings(group_size=1, max_concurrent_prompts_per_server=1, number_of_steps=8, evals=(rules,))
    world = World(case, Manners(servers=1, eval_prompts=20), 5).run()
    assert world.stop is not None
    assert world.stop.ok
    assert ("own", 8, "complete") in evals_of(world)


def test_what_is_trained_is_no_evals():
    world = World(settings(evals=(OWN,)), seed=4).run()
    counts = world.core.counts()
    trained = {rollout for batch in trained_by(world) for group in batch.rollout_ids for rollout in group}
    assert max(trained) < EVAL_IDS
    assert {order.prompt.split for order in orders_of(world, of_evals=True)} == {"eval"}
    assert {order.prompt.split for order in orders_of(world, of_evals=False)} == {"train"}
    without = World(settings(), seed=4).run().core.counts()
    assert counts.rollouts_generated == sum(len(group.rewards) for group in world.rules.groups.values())
    assert counts.rollouts_trained == without.rollouts_trained
    assert sum(counts.groups_by_state.values()) == counts.groups_admitted
    groups = {said.group_id for said in world.said if isinstance(said, do.RecordGroupState)}
    assert max(groups) < EVAL_IDS


def test_a_run_that_waits_for_each_batch_trains_the_same_ones_with_and_without_evals():
    """M = 0: which groups a batch has does not depend on what ends first, so evals change none of them."""
    case = settings(max_async_rollout=0, take_order="admission", discard_group_zero_advantage=False)
    for seed in range(5):
        plain = World(case, seed=seed).run()
        beside = World(msgspec.structs.replace(case, evals=(OWN,)), seed=seed + 100).run()
        assert [batch.rollout_ids for batch in trained_by(beside)] == [batch.rollout_ids for batch in trained_by(plain)]
        assert prompts_and_seeds(beside) == prompts_and_seeds(plain)


def prompts_and_seeds(world: World) -> set[tuple[int, int, int]]:
    return {(order.rollout_id, order.prompt.index, order.seed) for order in orders_of(world, of_evals=False)}


def test_a_failed_sample_is_tried_again_and_then_counted_and_ends_no_run():
    world = World(settings(evals=(msgspec.structs.replace(OWN, every=0, final=False),), max_attempts=2))
    first = orders_to_fail(world)
    world.run()
    ended = next(said for said in world.said if isinstance(said, do.EndEval))
    assert (ended.failed, ended.unfinished, ended.state) == (6, 0, "complete")
    assert max(first.values()) == 1  # two attempts of each
    assert world.stop is not None
    assert world.stop.ok
    counts = world.core.counts()
    assert (counts.failures, counts.rollouts_failed, counts.rollouts_retried) == ({}, 0, 0)


def orders_to_fail(world: World) -> dict[int, int]:
    """Each order of an eval fails; gives the last attempt of each."""
    attempts: dict[int, int] = {}
    perform = world._perform

    def answer(command: Any) -> None:
        if isinstance(command, do.DispatchRollout) and command.order.eval:
            order = command.order
            attempts[order.rollout_id] = order.attempt
            failed = seen.RolloutFailed(order.rollout_id, order.attempt, "the sandbox is down")
            world.after(0.1, lambda: world.tell(failed))
        else:
            perform(command)

    world._perform = answer  # type: ignore[method-assign]
    return attempts


def test_a_run_that_is_stopped_says_which_eval_it_cut_off():
    world = World(settings(evals=(OWN,)), Manners(eval_prompts=40))
    world.after(1.0, lambda: world.tell(seen.StopRequested("enough", ok=False)))
    world.run()
    ended = next(said for said in world.said if isinstance(said, do.EndEval))
    assert (ended.state, ended.step) == ("cut off", 0)
    assert ended.unfinished > 0


def test_a_stop_in_the_last_eval_is_a_stop_and_the_eval_goes_on_after_it():
    case = settings(number_of_steps=3, checkpoint_every=5, evals=(msgspec.structs.replace(OWN, every=0, baseline=False),))
    world = World(case, Manners(eval_prompts=60), journal=True)
    perform = world._perform

    def stop_early(command: Any) -> None:
        perform(command)
        if isinstance(command, do.BeginEval):
            world.after(5.0, lambda: world.tell(seen.StopRequested("interrupted", ok=False, save=True)))

    world._perform = stop_early  # type: ignore[method-assign]
    world.run()
    assert world.stop is not None
    assert (world.stop.ok, world.stop.checkpoint) == (False, 3)
    assert evals_of(world) == [("own", 3, "cut off")]
    again = World(case, Manners(eval_prompts=60), seed=1, resumed=world.checkpoints[-1].snapshot).run()
    assert again.stop is not None
    assert (again.stop.ok, again.stop.reason) == (True, "all 3 steps are trained")
    assert evals_of(again) == [("own", 3, "complete")]
    assert trained_by(again) == []


def test_a_finished_run_without_an_eval_to_play_can_still_not_be_gone_on_from():
    case = settings(number_of_steps=3, checkpoint_every=3)
    snapshot = World(case).run().checkpoints[-1].snapshot
    with pytest.raises(ValueError, match="number_of_steps=3 is reached"):
        World(case, resumed=snapshot)


@pytest.mark.parametrize("seed", range(40))
def test_killed_runs_play_each_sample_once_and_lose_no_eval(seed: int):
    """Counted are commands up to the checkpoint that the next attempt goes on from, as rows are."""
    chance = Random(seed)
    case = settings(
        number_of_steps=8,
        checkpoint_every=chance.choice([1, 2, 3]),
        evals=(msgspec.structs.replace(OWN, every=chance.choice([1, 2, 3])), EvalRules(name="b", environment="math", every=3)),
        max_async_rollout=chance.choice([0, 1, 3]),
    )
    manners = Manners(eval_prompts=8, straggler_share=0.1)
    kept: list[Any] = []
    scored: list[int] = []
    snapshot = None
    for attempt in range(6):
        world = World(case, manners, seed * 100 + attempt, journal=True, resumed=snapshot)
        heard: list[tuple[int, int]] = []

        def note(event: Any, world: World = world, heard: list[tuple[int, int]] = heard) -> None:
            before = len(world.said)
            World.tell(world, event)
            counts = isinstance(event, seen.RolloutDone) and event.rollout_id >= EVAL_IDS
            if counts and not any(isinstance(said, do.IgnoreResult) for said in world.said[before:]):
                heard.append((len(world.said), event.rollout_id))

        world.tell = note  # type: ignore[method-assign]
        world.run(killed_after=float("inf") if attempt == 5 else chance.randint(100, 2500))
        assert replay(world.lines).disagreement is None
        if world.stop is not None:
            kept += world.said
            scored += [rollout for _, rollout in heard]
            break
        if world.checkpoints:
            saved = world.checkpoints[-1]
            snapshot = saved.snapshot
            kept += world.said[: saved.commands]
            scored += [rollout for at, rollout in heard if at <= saved.commands]
    assert world.stop is not None
    assert world.stop.ok
    begun = {(said.eval, said.step): said.prompts * said.samples for said in kept if isinstance(said, do.BeginEval)}
    ended = [said for said in kept if isinstance(said, do.EndEval)]
    complete = [(said.eval, said.step) for said in ended if said.state == "complete"]
    assert sorted(complete) == sorted(begun), "each that has begun is complete, once"
    due = {(rules.name, step) for rules in case.evals for step in range(9) if rules.is_due(step, last=step == 8)}
    assert {(said.eval, said.step) for said in ended} == due
    failed = sum(said.failed for said in ended)
    assert len(scored) == len(set(scored)) == sum(begun.values()) - failed


def test_an_eval_that_has_changed_since_the_checkpoint_is_cut_off():
    case = settings(number_of_steps=3, checkpoint_every=1, evals=(msgspec.structs.replace(OWN, every=1, baseline=False),))
    world = World(case, Manners(eval_prompts=60)).run()
    saved = next(one.snapshot for one in world.checkpoints if one.snapshot.evals.rounds)
    other = msgspec.structs.replace(case, number_of_steps=5, evals=(msgspec.structs.replace(OWN, num_samples=3),))
    again = World(other, Manners(eval_prompts=60), resumed=saved).run()
    assert ("own", saved.evals.rounds[0].step, "changed") in evals_of(again)
    assert any("has other settings or prompts" in warning for warning in again.rules.warnings)


@pytest.mark.parametrize("change", ["sampling", "digest", ""])
def test_an_eval_goes_on_only_where_it_is_sampled_from_the_same_prompts_in_the_same_way(change: str):
    case = settings(number_of_steps=3, checkpoint_every=1, evals=(msgspec.structs.replace(OWN, every=1, baseline=False),))
    world = World(case, Manners(eval_prompts=60)).run()
    saved = next(one.snapshot for one in world.checkpoints if one.snapshot.evals.rounds)
    under_way = [(one.rules.name, one.step) for one in saved.evals.rounds]
    rules = msgspec.structs.replace(case.evals[0], sampling="other" if change == "sampling" else "")
    again = World(msgspec.structs.replace(case, evals=(rules,)), Manners(eval_prompts=60), resumed=saved)
    if change == "digest":
        cards = tuple(msgspec.structs.replace(card, digest="other") for card in again.cards())
        again.cards = lambda: cards  # type: ignore[method-assign]
    again.run()
    state = "changed" if change else "complete"
    assert {(name, step, state) for name, step in under_way} <= set(evals_of(again))


def test_an_eval_without_prompts_ends_the_run_by_its_name():
    world = World(settings(evals=(OWN,)), Manners(eval_prompts=0)).run()
    assert world.stop is not None
    assert world.stop.reason.startswith("evals.own plays the eval split of countdown, which has no prompt")


def test_no_mixture_of_evals_and_trouble_breaks_a_rule():
    """Random runs, of which those with evals count; every one of them ends, and what began has ended."""
    seen_states: set[str] = set()
    for seed in range(150):
        chance = Random(seed)
        case, manners = any_settings(chance.choice), any_manners(chance.choice)
        if not case.evals:
            continue
        world = World(case, manners, seed, journal=seed % 10 == 0).run()
        assert not world.rules.evals
        seen_states |= {state for _, _, state in evals_of(world)}
        if world.lines:
            assert replay(world.lines).disagreement is None
    assert seen_states == {"complete", "cut off", "left out"}


@pytest.mark.parametrize("name", ["every", "num_samples", "num_prompts"])
def test_numbers_that_make_no_sense_are_refused(name: str):
    with pytest.raises(ValueError, match=rf"evals\.own\.{name}=-1 must be at least"):
        msgspec.structs.replace(OWN, **{name: -1})
