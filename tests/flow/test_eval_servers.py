"""Servers held for evals: each eval between the first step and the last is of one version, and training never waits for it."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from telescope.flow import commands as do
from telescope.flow.evals import EVAL_IDS
from telescope.flow.replay import replay
from telescope.flow.settings import EvalRules
from tests.flow.cases import any_manners, any_settings
from tests.flow.harness import Manners, World, settings

OWN = EvalRules(name="own", environment="countdown", every=2, num_samples=2)
THREE = Manners(servers=3, eval_prompts=8)


def case(**changes: Any) -> Any:
    defaults = {"number_of_steps": 7, "max_concurrent_prompts_per_server": 2, "eval_servers": 1, "evals": (OWN,)}
    return settings(**{**defaults, **changes})


def said(world: World, *kinds: type) -> list[Any]:
    return [command for command in world.said if isinstance(command, kinds)]


def placed(world: World) -> list[tuple[do.PlaceRequest, int]]:
    """Each placement, with the id of its rollout."""
    return [(command, int(command.request_id.partition(".")[0])) for command in said(world, do.PlaceRequest)]


def test_an_eval_of_a_step_is_played_on_one_server_while_the_others_go_on():
    world = World(case(), THREE, 1, journal=True).run()
    assert world.stop is not None
    assert world.stop.ok
    holds = world.rules.holds
    assert [one.evals for one in holds] == [(("own", step),) for step in (2, 4, 6)], "neither the baseline nor the final one"
    assert [one.version for one in holds] == [2, 4, 6]
    assert said(world, do.ReleaseServers) == [do.ReleaseServers(one.servers) for one in holds]
    assert world.rules.updates_beside >= 2
    assert world.rules.trained_beside > 20
    assert replay(world.lines).disagreement is None


def test_baseline_and_final_are_played_on_all_servers():
    world = World(case(evals=(msgspec.structs.replace(OWN, every=0),)), THREE, 2).run()
    assert world.rules.holds == []
    assert {command.server for command, rollout in placed(world) if rollout >= EVAL_IDS} == {
        "server-0", "server-1", "server-2"
    }  # fmt: skip


def test_training_takes_its_share_of_the_steps_under_an_eval_that_takes_for_ever():
    slow = EvalRules(name="slow", environment="countdown", every=1, num_samples=8, baseline=False, final=False)
    world = World(case(number_of_steps=14, evals=(slow,)), Manners(servers=3, eval_prompts=60), 3).run()
    assert said(world, do.BeginEval)[0].step == 1
    ended = {one.step: one.state for one in said(world, do.EndEval)}
    assert (ended[1], ended[2], ended[3], ended[4]) == ("complete", "left out", "left out", "left out"), "steps came meanwhile"
    assert world.rules.updates_beside > 5


def test_two_evals_due_at_once_share_the_server():
    other = EvalRules(name="other", environment="countdown", every=2, baseline=False)
    world = World(case(evals=(OWN, other)), THREE, 4).run()
    assert world.rules.holds[0].evals == (("own", 2), ("other", 2))


def test_an_eval_due_while_another_holds_the_server_is_of_the_version_it_gets_then():
    """It waits for the server's end of the first one and its update, and is of one version too; training waits for nothing."""
    long = EvalRules(name="long", environment="countdown", every=2, num_samples=4, baseline=False, final=False)
    next_one = EvalRules(name="next", environment="countdown", every=3, baseline=False, final=False)
    world = World(case(number_of_steps=12, evals=(long, next_one)), THREE, 5).run()
    later = [(hold.version, step) for hold in world.rules.holds for name, step in hold.evals if name == "next"]
    assert later
    assert any(version > step for version, step in later)
    assert [one.state for one in said(world, do.EndEval) if one.eval == "next"].count("complete") == len(later) + 1, (
        "and at the end"
    )


def kill_at_hold(world: World, *, after_s: float, all_of_them: bool = True) -> list[str]:
    """The servers of the first hold die in mid-eval."""
    killed: list[str] = []
    perform = world._perform

    def watch(command: Any) -> None:
        perform(command)
        if isinstance(command, do.HoldServers) and not killed:
            killed.extend(command.servers if all_of_them else command.servers[:1])
            for name in killed:
                world.after(after_s, lambda name=name: world._server_down(name, world._server_lives[name]))

    world._perform = watch  # type: ignore[method-assign]
    return killed


def test_the_samples_of_a_held_server_that_dies_are_played_on_the_other_one():
    world = World(case(eval_servers=2), Manners(servers=4, eval_prompts=40), 6)
    killed = kill_at_hold(world, after_s=2.0, all_of_them=False)
    world.run()
    first = world.rules.holds[0]
    ended = next(one for one in said(world, do.EndEval) if one.step == 2)
    assert (ended.state, ended.failed) == ("complete", 0)
    other = next(name for name in first.servers if name not in killed)
    ids = range(world.rules.evals_begun[("own", 2)], world.rules.evals_begun[("own", 2)] + 80)
    used = {command.server for command, rollout in placed(world) if rollout in ids}
    assert used == {other, *killed}
    assert not any("go on beside training" in warning for warning in world.rules.warnings)


def test_without_a_held_server_left_the_eval_goes_on_beside_training():
    world = World(case(number_of_steps=9), Manners(servers=3, eval_prompts=30), 7)
    killed = kill_at_hold(world, after_s=2.0)
    world.run()
    assert world.stop is not None
    assert world.stop.ok
    ended = next(one for one in said(world, do.EndEval) if one.step == 2)
    assert (ended.state, ended.failed) == ("complete", 0)
    first = world.rules.evals_begun[("own", 2)]
    scored = [command for command, rollout in placed(world) if rollout in range(first, first + 60)]
    assert len({command.server for command in scored} - set(killed)) == 2
    assert f"{killed[0]} is lost, and evals go on beside training on all servers that are left" in world.rules.warnings[0]
    assert len(world.rules.holds) > 1, "the next eval has a server of its own again"


def test_training_gets_its_servers_back_where_it_has_lost_its_own():
    world = World(case(eval_servers=2), THREE, 8)
    perform, killed = world._perform, list[str]()

    def watch(command: Any) -> None:
        perform(command)
        if isinstance(command, do.HoldServers) and not killed:
            killed.extend({"server-0", "server-1", "server-2"} - set(command.servers))
            world.after(1.0, lambda: world._server_down(killed[0], world._server_lives[killed[0]]))

    world._perform = watch  # type: ignore[method-assign]
    world.run()
    assert world.stop is not None
    assert world.stop.ok
    assert any(f"{killed[0]} is lost" in warning for warning in world.rules.warnings)


def test_with_too_few_servers_at_the_time_evals_play_on_all():
    world = World(case(), Manners(servers=1, eval_prompts=1), 9).run()
    assert world.rules.holds == []
    assert [one.state for one in said(world, do.EndEval)] == ["complete"] * 5


def test_a_server_is_held_for_an_eval_that_a_resumed_run_goes_on_with():
    plain = case(checkpoint_every=1, number_of_steps=8, evals=(msgspec.structs.replace(OWN, every=4),))
    world = World(plain, Manners(servers=3, eval_prompts=80), 10, journal=True)
    world.run(killed_after=3000)
    saved = [one for one in world.checkpoints if one.snapshot.evals.rounds and one.snapshot.step < 8]
    assert saved, "a checkpoint was made in mid-eval"
    snapshot = saved[-1].snapshot
    again = World(plain, Manners(servers=3, eval_prompts=80), 11, journal=True, resumed=snapshot).run()
    assert again.rules.holds[0].evals == (("own", 4),)
    assert again.rules.holds[0].version == snapshot.step
    assert replay(again.lines).disagreement is None
    assert again.stop is not None
    assert again.stop.ok


@pytest.mark.parametrize("seed", range(40))
def test_killed_servers_lose_no_eval_and_block_no_step(seed: int):
    chance = Random(seed)
    picked = msgspec.structs.replace(
        any_settings(chance.choice),
        evals=(OWN, EvalRules(name="b", environment="countdown", every=3, num_samples=3)),
        eval_servers=chance.choice([1, 2, 3]),
        evals_hold_training=False,
        number_of_steps=8,
        prompts_batch_size_for_trainer=2,
        failed_batches_limit=1000,
    )
    manners = Manners(
        servers=4, eval_prompts=8, server_life_s=chance.choice([15.0, 40.0]), fenced_share=0.2, worker_life_s=30.0
    )
    world = World(picked, manners, seed, journal=True).run()
    assert world.stop is not None
    assert world.stop.ok, world.stop.reason
    assert replay(world.lines).disagreement is None


def test_random_runs_hold_servers_often_enough_to_prove_something():
    holds = updates = 0
    for seed in range(60):
        chance = Random(seed)
        world = World(any_settings(chance.choice), any_manners(chance.choice), seed).run()
        holds += len(world.rules.holds)
        updates += world.rules.updates_beside
    assert holds > 20
    assert updates > 5


def test_a_run_without_evals_says_nothing_of_held_servers():
    plain = World(case(evals=()), THREE, 12).run()
    assert said(plain, do.HoldServers, do.ReleaseServers) == []
    assert {command.held for command in said(plain, do.UpdateWeights)} == {()}
