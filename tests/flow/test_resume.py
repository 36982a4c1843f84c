"""Checkpoints and what goes on from them: nothing is trained twice or lost, and every rule of rules.py holds from the first
resumed step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.checkpoint_schedule import CheckpointSchedule
from telescope.flow.core import Core
from telescope.flow.curriculum import PassRatePool, PassRateRules
from telescope.flow.limits import FailureLimitsState
from telescope.flow.replay import replay
from telescope.flow.settings import EvalRules
from telescope.flow.snapshot import Snapshot
from tests.flow.cases import any_manners, any_settings
from tests.flow.harness import Manners, World, mixed, settings, sometimes_equal
from tests.flow.rules import FINAL

POOLS = PassRateRules((PassRatePool("hard", 0.3, 1.0), PassRatePool("rest", 1.0, 1.0)))


def kill_and_resume(case: Any, manners: Manners, seed: int, most_kills: int = 6) -> tuple[list[World], list[Any]]:
    """A run that is killed at random instants and goes on from its last complete checkpoint, to its end. Gives its attempts,
    and the commands that count: of each attempt those up to the checkpoint that the next one went on from."""
    chance, attempts, counted = Random(seed), [], []
    kept: list[Any] = []
    snapshot: Snapshot | None = None
    while True:
        last = len(attempts) == most_kills
        world = World(case, manners, seed * 1000 + len(attempts), journal=True, resumed=snapshot)
        world.run(killed_after=float("inf") if last else chance.randint(1, 600))
        attempts.append(world)
        if world.stop is not None:
            return attempts, kept + world.said
        if world.checkpoints:
            saved = world.checkpoints[-1]
            snapshot, counted = saved.snapshot, world.said[: saved.commands]
            kept = kept + counted


def any_case(seed: int, largest_batch: int = 32) -> tuple[Any, Manners]:
    chance = Random(seed)
    case = any_settings(chance.choice)
    case = msgspec.structs.replace(
        case,
        prompts_batch_size_for_trainer=min(case.prompts_batch_size_for_trainer, largest_batch),
        checkpoint_every=chance.choice([1, 1, 2, 3]),
        number_of_steps=min(case.number_of_steps, 80 // case.prompts_batch_size_for_trainer + 1) + chance.choice([2, 6]),
        prompt_prefetch_buffer_size=chance.choice([0, 3]),
        curricula=chance.choice([{}, {"countdown": POOLS}]),
    )
    manners = any_manners(chance.choice)
    reward = chance.choice([mixed, sometimes_equal, sometimes_equal])
    saves = {"save_s": chance.choice([0.0, 1.0, 30.0]), "save_failure_share": chance.choice([0.0, 0.2])}
    return case, replace(manners, reward=reward, **saves)


def prompts(case: Any, commands: list[Any]) -> dict[int, Any]:
    """The prompt of each group of training that was sent out; one group has one prompt, in whatever attempt."""
    found: dict[int, Any] = {}
    for command in commands:
        if isinstance(command, do.DispatchRollout) and not command.order.eval:
            assert found.setdefault(command.order.group_id, command.order.prompt) == command.order.prompt
    return found


def assert_nothing_lost_or_twice(case: Any, manners: Manners, commands: list[Any], done: bool) -> None:
    steps = [command for command in commands if isinstance(command, do.TrainOnBatch)]
    if done:
        assert [step.step for step in steps] == list(range(1, case.number_of_steps + 1))
    trained = Counter(group for step in steps for group in step.group_ids)
    assert all(times == 1 for times in trained.values())
    admitted = [
        command.group_id for command in commands if isinstance(command, do.RecordGroupState) and command.state == "pending"
    ]
    assert admitted == list(range(len(admitted)))
    ends = Counter(
        command.group_id for command in commands if isinstance(command, do.RecordGroupState) and command.state in FINAL
    )
    assert ends == Counter(admitted)
    seeds: dict[int, int] = {}
    for command in commands:
        if isinstance(command, do.DispatchRollout):
            assert seeds.setdefault(command.order.rollout_id, command.order.seed) == command.order.seed
    assert_discards_count_once(commands)
    if done and not case.curricula:
        assert_each_prompt_once_an_epoch(case, manners, commands)


def assert_discards_count_once(commands: list[Any]) -> None:
    """In the statistics of one batch; not in any yet where they were discarded when the last batch was full."""
    counted = Counter(group for step in commands if isinstance(step, do.TrainOnBatch) for group in step.baseline_group_ids)
    assert all(times == 1 for times in counted.values())
    discarded = [c.group_id for c in commands if isinstance(c, do.RecordGroupState) and c.state == "discarded"]
    assert [group in counted for group in discarded] == [True] * len(counted) + [False] * (len(discarded) - len(counted))


def assert_each_prompt_once_an_epoch(case: Any, manners: Manners, commands: list[Any]) -> None:
    """Of the groups that were not given back: the first `prompts` of an environment are all different, and so on."""
    found = prompts(case, commands)
    back = {
        c.group_id
        for c in commands
        if isinstance(c, do.RecordGroupState) and (c.state, c.reason) == ("cancelled", "off_policy")
    }
    if back or len(found) < 1:
        return
    for label, _ in case.environments:
        drawn = [found[group].index for group in sorted(found) if found[group].environment == label]
        for start in range(0, len(drawn), manners.prompts):
            epoch = drawn[start : start + manners.prompts]
            assert len(set(epoch)) == len(epoch)


def many(first: int, count: int, largest_batch: int = 32) -> Iterator[tuple[Any, list[World], list[Any]]]:
    for seed in range(first, first + count):
        case, manners = any_case(seed, largest_batch)
        attempts, commands = kill_and_resume(case, manners, seed, most_kills=4)
        assert_nothing_lost_or_twice(case, manners, commands, attempts[-1].stop.ok)
        for world in attempts:
            found = replay(world.lines)
            assert found.disagreement is None, str(found.disagreement)
        yield case, attempts, commands


def test_runs_killed_at_random_instants_train_each_group_once_and_lose_none():
    """The rules (staleness, slots, seeds, shelf) are checked within each attempt, from its first event on."""
    seen_all = list(many(140, 20, largest_batch=3))
    resumed = [world for _, attempts, _ in seen_all for world in attempts if world.resumed is not None]
    made_of = what_was_resumed(resumed)
    assert min(made_of.values()) > 2, made_of
    assert sum(attempts[-1].stop.ok for _, attempts, _ in seen_all) > 5


def what_was_resumed(worlds: list[World]) -> Counter[str]:
    """What the snapshots held, so that tame ones cannot pass for a proof."""
    made_of = Counter({world.settings.take_order: 0 for world in worlds})
    for world in worlds:
        again = world.resumed
        made_of["playing"] += bool(again.playing)
        made_of["waiting"] += bool(again.kept or again.forming)
        made_of["discarded"] += bool(again.baseline or again.discarded)
        made_of[world.settings.take_order] += 1
    return made_of


BEFORE_WORKERS = ("split_sizes", "digests")
"""What a core knows again when its workers have said hello."""


def test_a_core_that_goes_on_has_all_that_the_snapshot_has():
    """Each snapshot also with its discarded groups the other way round, and with rows of failures and discards under way:
    at the end of a step both are rare."""
    found = [world.resumed for _, attempts, _ in many(140, 20, 3) for world in attempts if world.resumed is not None]
    assert sum(bool(snapshot.baseline or snapshot.discarded) for snapshot in found) > 2
    assert sum(bool(snapshot.playing) for snapshot in found) > 2
    for snapshot in found:
        impatient = FailureLimitsState({label: 2 for label, _ in snapshot.settings.environments}, 3)
        full = {"baseline": snapshot.discarded, "discarded": snapshot.baseline, "limits": impatient}
        for one in (snapshot, msgspec.structs.replace(snapshot, **full)):
            core = Core.restore(one.settings, one)
            core._sampler = SimpleNamespace(position=one.position)
            again = core.snapshot()
            same = {name: getattr(one, name) for name in BEFORE_WORKERS}
            assert msgspec.structs.replace(again, **same) == one


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_larger_runs_killed_at_random_instants():
    """Of all sizes of batches."""
    resumed = [world for _, attempts, _ in many(10_000, 200) for world in attempts if world.resumed is not None]
    assert min(what_was_resumed(resumed).values()) > 2


def test_a_synchronous_run_goes_on_with_the_same_prompts_and_batches():
    """Rewards follow from seeds, as those of a real engine do, so that the two runs can be compared step by step."""
    case = settings(
        max_async_rollout=0, checkpoint_every=1, number_of_steps=8, environments=(("countdown", 1.0), ("math", 0.5))
    )
    manners = Manners(reward=sometimes_equal)
    whole = World(case, manners, seed=1).run()
    _, commands = kill_and_resume(case, manners, seed=5, most_kills=5)
    batches = [[c for c in said if isinstance(c, do.TrainOnBatch)] for said in (whole.said, commands)]
    assert batches[0] == batches[1]
    assert prompts(case, whole.said) == prompts(case, commands)


def test_a_checkpoint_is_made_each_so_many_steps_and_at_the_last():
    world = World(settings(number_of_steps=7, checkpoint_every=3), seed=2).run()
    assert [saved.step for saved in world.checkpoints] == [3, 6, 7]
    assert world.stop == do.EndRun("all 7 steps are trained", ok=True, checkpoint=7)
    assert world.core.lost_checkpoint == 0


def test_without_checkpoints_there_are_none():
    world = World(settings(number_of_steps=3), seed=2).run()
    assert not world.checkpoints
    assert world.stop == do.EndRun("all 3 steps are trained", ok=True)


def test_training_waits_for_a_save_under_way_when_the_next_is_due():
    world = World(settings(number_of_steps=4, checkpoint_every=1), Manners(save_s=500.0, tick_s=50.0), seed=3)
    world.settings = msgspec.structs.replace(world.settings, checkpoint_stop_timeout_s=1e6)
    world = World(world.settings, world.manners, seed=3).run()
    assert [saved.step for saved in world.checkpoints] == [1, 2, 3, 4]
    assert any(sentence.endswith("training waits for it; raise checkpoint.every") for sentence in world.rules.warnings)


def test_where_the_next_save_is_due_by_an_eval_the_advice_names_the_eval():
    own = EvalRules(name="own", environment="countdown", every=2)
    schedule = CheckpointSchedule(settings(number_of_steps=9, evals=(own,), checkpoint_every=3, checkpoint_with="own"))
    schedule.begin(1)
    by_eval = "raise eval.every or evals.own.every (checkpoint.keep_best makes one for each eval)"
    assert schedule.note_commit(2).endswith(f"step 1 is still being written: training waits for it; {by_eval}")
    assert schedule.note_commit(3).endswith("; raise checkpoint.every")
    assert schedule.note_commit(6).endswith(f"; raise checkpoint.every, and {by_eval.removeprefix('raise ')}")
    assert schedule.note_commit(7) == ""


def test_a_failed_save_lets_the_run_go_on():
    world = World(settings(number_of_steps=4, checkpoint_every=1), Manners(save_failure_share=1.0), seed=3).run()
    assert world.checkpoints == []
    assert world.stop == do.EndRun("all 4 steps are trained; no checkpoint of it: the disk is full", ok=True)
    assert world.core.lost_checkpoint == 4


def told_to_stop(world: World, step: int) -> World:
    """Plays until so many steps are trained, then asks for a stop in good order."""

    def ask() -> None:
        if world.core.version >= step:
            world.tell(seen.StopRequested("interrupted by SIGTERM", ok=False, save=True))
        else:
            world.after(0.5, ask)

    world.after(0.5, ask)
    return world.run()


def test_a_stop_in_good_order_trains_its_step_to_the_end_and_saves_it():
    world = told_to_stop(World(settings(number_of_steps=50, checkpoint_every=10), Manners(step_s=20.0), seed=4), 3)
    step = world.stop.checkpoint
    assert step in (3, 4)
    assert world.stop == do.EndRun(
        f"interrupted by SIGTERM; the checkpoint of step {step} is complete", ok=False, checkpoint=step
    )
    assert [saved.step for saved in world.checkpoints] == [step]
    assert max(command.step for command in world.said if isinstance(command, do.TrainOnBatch)) == step


def test_a_stop_in_good_order_does_not_wait_for_ever():
    world = told_to_stop(World(settings(number_of_steps=50, checkpoint_every=10), Manners(save_s=1e7, tick_s=10.0), seed=4), 3)
    assert world.stop.checkpoint == 0
    assert "was not done within 120 s" in world.stop.reason
    assert world.core.lost_checkpoint == 0  # it has not trained all: a run that was stopped, and says so anyway


def test_the_last_checkpoint_of_a_run_that_is_done_has_as_long_as_any():
    """Not the time that a stop has: the run is not in a hurry."""
    case = settings(number_of_steps=3, checkpoint_every=10, checkpoint_stop_timeout_s=20.0)
    world = World(case, Manners(save_s=1e4, tick_s=5.0), seed=6).run()
    assert world.now > 100
    assert world.stop == do.EndRun("all 3 steps are trained", ok=True, checkpoint=3)


def test_who_is_told_to_stop_at_its_last_save_waits_as_long_as_for_any_stop():
    world = told_to_stop(World(settings(number_of_steps=3, checkpoint_every=10), Manners(save_s=1e7, tick_s=10.0), seed=4), 3)
    assert world.stop.ok
    assert world.stop.reason == (
        "all 3 steps are trained; no checkpoint of it: the checkpoint of step 3 was not done within 120 s"
    )
    assert world.core.lost_checkpoint == 3


def test_a_fault_waits_for_nothing():
    world = World(settings(number_of_steps=50, checkpoint_every=1), Manners(save_s=1e7), seed=4)
    world.after(5.0, lambda: world.tell(seen.StopRequested("trainer-0 was killed", ok=False)))
    assert world.run().stop == do.EndRun("trainer-0 was killed", ok=False)


def snapshot_of(**changes: Any) -> Snapshot:
    return World(settings(number_of_steps=4, checkpoint_every=2, **changes), seed=2).run().checkpoints[0].snapshot


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"group_size": 5}, "made with group_size=3, and this run has 5"),
        ({"max_async_rollout": 3}, "made with max_async_rollout=1, and this run has 3"),
        ({"environments": (("math", 1.0),)}, "made with environments countdown, and this run has math"),
        ({"number_of_steps": 2}, "number_of_steps=2 is reached: the checkpoint is of step 2"),
    ],
)
def test_settings_that_cannot_go_on_are_refused(changes: dict[str, Any], sentence: str):
    case = settings(**{"number_of_steps": 4, "checkpoint_every": 2, **changes})
    with pytest.raises(ValueError, match=sentence):
        Core.restore(case, snapshot_of())


def test_other_prompts_than_the_checkpoints_end_the_run_with_a_sentence():
    case = settings(number_of_steps=4, checkpoint_every=2)
    world = World(case, Manners(prompts=51), seed=1, resumed=snapshot_of()).run()
    assert world.stop.reason.startswith("environments.countdown has 51 prompts and had 50 at the checkpoint of step 2")


# ---- a checkpoint at the end alone, or none there


def test_without_steps_of_its_own_a_checkpoint_is_made_at_the_end_alone():
    world = World(settings(number_of_steps=7, checkpoint_at_end=True), seed=2).run()
    assert [saved.step for saved in world.checkpoints] == [7]
    assert world.stop == do.EndRun("all 7 steps are trained", ok=True, checkpoint=7)


def test_without_steps_of_its_own_a_stop_is_saved_and_the_run_goes_on_from_there():
    case = settings(number_of_steps=8, checkpoint_at_end=True)
    world = told_to_stop(World(case, Manners(step_s=20.0), seed=4), 3)
    (saved,) = world.checkpoints
    assert world.stop.checkpoint == saved.step
    assert world.core.give_up_at > world.now
    on = World(case, Manners(), seed=5, resumed=saved.snapshot).run()
    assert [saved.step for saved in on.checkpoints] == [8]
    assert on.stop == do.EndRun("all 8 steps are trained", ok=True, checkpoint=8)


def test_a_lost_save_at_the_end_is_told_without_steps_of_its_own_too():
    world = World(settings(number_of_steps=4, checkpoint_at_end=True), Manners(save_failure_share=1.0), seed=3).run()
    assert world.stop == do.EndRun("all 4 steps are trained; no checkpoint of it: the disk is full", ok=True)
    assert world.core.lost_checkpoint == 4


def test_without_a_save_at_the_end_only_those_by_the_steps_are_made():
    world = World(settings(number_of_steps=7, checkpoint_every=3, checkpoint_at_end=False), seed=2).run()
    assert [saved.step for saved in world.checkpoints] == [3, 6]
    assert world.stop == do.EndRun("all 7 steps are trained", ok=True)
    assert world.core.lost_checkpoint == 0
    world = World(settings(number_of_steps=6, checkpoint_every=3, checkpoint_at_end=False), seed=2).run()
    assert [saved.step for saved in world.checkpoints] == [3, 6]
    assert world.stop == do.EndRun("all 6 steps are trained", ok=True, checkpoint=6)


def test_the_last_checkpoint_by_the_steps_is_lost_without_a_save_at_the_end_too():
    case = settings(number_of_steps=6, checkpoint_every=3, checkpoint_at_end=False)
    world = World(case, Manners(save_failure_share=1.0), seed=3).run()
    assert world.core.lost_checkpoint == 6
    world = World(msgspec.structs.replace(case, number_of_steps=7), Manners(save_failure_share=1.0), seed=3).run()
    assert world.stop == do.EndRun("all 7 steps are trained", ok=True)  # nobody wanted one of step 7
    assert world.core.lost_checkpoint == 0


def test_a_stop_without_a_save_waits_for_no_step():
    case = settings(number_of_steps=50, checkpoint_every=100, checkpoint_at_end=False)
    world = told_to_stop(World(case, Manners(step_s=1e7, tick_s=10.0), seed=4), 0)
    assert world.stop == do.EndRun("interrupted by SIGTERM", ok=False)
    assert world.now < 100
