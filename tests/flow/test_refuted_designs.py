"""The designs that rule 5 calls refuted, built once more: the rules of rules.py must notice each of them.

Each is the real core with one part exchanged. Every one of them trains, and most of its runs look well.
"""

from __future__ import annotations

from random import Random

import pytest

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.batches import BatchBuilder, GroupBatch
from telescope.flow.core import Core
from telescope.flow.groups import GroupState, RolloutAttempt, RolloutGroup
from telescope.flow.placement import Placement
from telescope.flow.settings import FlowSettings
from telescope.flow.staleness import Slots
from tests.flow.harness import Manners, World, settings
from tests.flow.rules import Broken, Known, Rules


class SlotsByTaking(Slots):
    """Counts a group as gone once it has been released, however often that happens."""

    def release(self, group: RolloutGroup, trained: bool) -> None:
        if group.group_id in self.alive:
            super().release(group, trained)


def exchange(core: Core, name: str, part: object) -> None:
    """Put the part in its place in the core and in the objects that share it."""
    for holder in (core, core._groups, core._requests, core._eval_servers):
        if hasattr(holder, name):
            setattr(holder, name, part)


class FreesSlotsOnTaking(Core):
    """A slot is free as soon as its group is handed to the trainer."""

    def __init__(self, settings: FlowSettings) -> None:
        super().__init__(settings)
        exchange(self, "_slots", SlotsByTaking(settings))

    def _train(self, batch: GroupBatch) -> None:
        super()._train(batch)
        for group in batch.groups:
            self._slots.release(group, trained=True)
        self._admit()


class WindowByRank(BatchBuilder):
    """A kept group may enter if it is among the oldest W = (M + 1)·P living groups. As no more than W ever live, this window
    shuts nobody out: what the test shows is that completion order without the stale cancel is noticed."""

    def __init__(self, settings: FlowSettings) -> None:
        super().__init__(settings)
        self._living: list[RolloutGroup] = []
        self._window = settings.slots

    def admit(self, group: RolloutGroup) -> None:
        self._living.append(group)

    def _next(self) -> RolloutGroup | None:
        self._living = [group for group in self._living if not group.final and group.state is not GroupState.BATCHED]
        return next((group for group in self._living[: self._window] if group.state is GroupState.KEPT), None)


class TrustsTheWindow(Core):
    """The window is to bound the age, so nothing is cancelled for it."""

    def __init__(self, settings: FlowSettings) -> None:
        super().__init__(settings)
        exchange(self, "_batches", WindowByRank(settings))
        self._groups.retire_stale = lambda version, now: None


class BatchesFromAdmission(BatchBuilder):
    """A group belongs to a batch from its admission; a retired one leaves its place to the next. A whole batch is taken."""

    def __init__(self, settings: FlowSettings) -> None:
        super().__init__(settings)
        self._planned: list[list[RolloutGroup]] = []
        self._ready: list[RolloutGroup] = []

    def admit(self, group: RolloutGroup) -> None:
        for places in self._planned:
            places[:] = [member for member in places if not member.final]
            if len(places) < self._size:
                places.append(group)
                return
        self._planned.append([group])

    def _next(self) -> RolloutGroup | None:
        if not self._ready:
            whole = (
                places for places in self._planned if [member.state for member in places] == [GroupState.KEPT] * self._size
            )
            self._ready = next(whole, [])
            self._planned = [places for places in self._planned if places is not self._ready]
        return self._ready.pop(0) if self._ready else None


class TakesWholeBatches(Core):
    def __init__(self, settings: FlowSettings) -> None:
        super().__init__(settings)
        exchange(self, "_batches", BatchesFromAdmission(settings))


class FreesRoomWithTheRollout(Core):
    """A rollout that ends takes its requests off the servers, though these still generate for it."""

    def __init__(self, settings: FlowSettings) -> None:
        super().__init__(settings)
        end_attempt = self._groups.end_attempt

        def end_with_requests(rollout: RolloutAttempt, counts: bool, why: str = "its rollout has ended") -> None:
            end_attempt(rollout, counts, why)
            for request_id in rollout.requests:
                self._placement.finish(request_id, 0)

        self._groups.end_attempt = end_with_requests


class FollowsTheLoad(Placement):
    """Each request goes where it is emptiest, whatever its siblings have left in another server's cache."""

    def _choose(self, group: RolloutGroup) -> str | None:
        return self._least_loaded.first_that(lambda server: self._takes(server, group))


class FreezesTurns(Placement):
    """A pressed server takes nothing, the next turn of what has begun included."""

    def _takes(self, server: str, group: RolloutGroup) -> bool:
        return super()._takes(server, group) and not self.servers[server].lanes.pressure


class StartsUnderPressure(Placement):
    """All lanes stay open, whatever the engines say."""

    @property
    def lanes(self) -> int:
        return len(self.servers) * self._settings.lanes_per_server

    @lanes.setter
    def lanes(self, value: int) -> None: ...


def with_placement(placement: type[Placement]) -> type[Core]:
    class Exchanged(Core):
        def __init__(self, settings: FlowSettings) -> None:
            super().__init__(settings)
            exchange(self, "_placement", placement(settings))

    return Exchanged


class FreesLanesUnasked(Core):
    """A lane is free when the tokens are there, though the settings say that it is not."""

    def _end_generation(self, event: seen.GenerationOver) -> None:
        rollout = self._lanes.in_flight.get((event.rollout_id, event.attempt))
        if rollout is not None:
            self._lanes.end_generation(rollout)


class OnlyAges(Rules):
    """Looks away from the count of slots, so that what shows is what it does to the ages."""

    def _group_state(self, command: do.RecordGroupState) -> None:
        if command.state == "pending":
            self.groups[command.group_id] = Known()
        else:
            super()._group_state(command)


def trial(core_class: type[Core], rules_class: type[Rules], seed: int) -> str:
    """What the rules say of one random run; empty if they are content."""
    chance = Random(seed)
    case = settings(
        number_of_steps=15,
        prompts_batch_size_for_trainer=chance.choice([1, 2, 4]),
        max_async_rollout=chance.choice([1, 2, 3]),
        max_off_policy_steps=chance.choice([1, 2, 3]),
    )
    manners = Manners(
        straggler_share=0.1, straggler_factor=40.0, step_s=2.0, capacity=512, update_s=0.5, server_capacity=4, timeout_share=0.1
    )
    world = World(case, manners, seed, core_class=core_class)
    world.rules = rules_class(case)
    try:
        world.run()
    except Broken as broken:
        return str(broken)
    return ""


def complaints(core_class: type[Core], rules_class: type[Rules] = Rules) -> list[str]:
    return [said for seed in range(40) if (said := trial(core_class, rules_class, seed))]


def test_the_design_as_it_is_breaks_nothing_in_the_same_runs():
    assert complaints(Core) == []


def test_slots_freed_on_taking_are_noticed_as_too_many_groups_alive():
    assert any("groups are alive in" in said for said in complaints(FreesSlotsOnTaking))


@pytest.mark.parametrize("core_class", [FreesSlotsOnTaking, TrustsTheWindow, TakesWholeBatches])
def test_refuted_designs_are_noticed_by_the_age_of_what_they_train(core_class: type[Core]):
    assert any("versions old at step" in said for said in complaints(core_class, OnlyAges))


def test_room_that_is_freed_before_the_server_has_answered_is_noticed():
    assert any("requests at once and has" in said for said in complaints(FreesRoomWithTheRollout))


PRESSED = Manners(kv_tokens=150, closes_share=1.0, score_s=3.0, most_turns=3, capacity=512)


def complaints_under_pressure(core_class: type[Core]) -> list[str]:
    found = []
    for seed in range(12):
        case = settings(
            adaptive_concurrency=True, max_concurrent_prompts_per_server=4, prompts_batch_size_for_trainer=8, seed=seed
        )
        try:
            World(case, PRESSED, seed, core_class=core_class).run(most_events=20_000)
        except AssertionError as broken:  # Broken, or the run does not end
            found.append(str(broken))
    return found


def test_the_design_as_it_is_breaks_nothing_under_pressure():
    assert complaints_under_pressure(Core) == []


@pytest.mark.parametrize(
    ("core_class", "sentence"),
    [
        (with_placement(FollowsTheLoad), "which has room and is calm"),
        (with_placement(FreezesTurns), "could answer it"),
        (with_placement(StartsUnderPressure), "lanes are used"),
        (FreesLanesUnasked, "lanes are used"),
    ],
)
def test_designs_that_forget_caches_turns_and_lanes_are_noticed(core_class: type[Core], sentence: str):
    assert any(sentence in said for said in complaints_under_pressure(core_class))
