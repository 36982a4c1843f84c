"""From a core's parts to a snapshot, and back into the parts of a new core. Between two steps only; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from telescope.flow.admission import Slots
from telescope.flow.batches import Batch, Batches
from telescope.flow.counts import Tally
from telescope.flow.draws import Draws
from telescope.flow.groups import Group, State
from telescope.flow.lanes import Lanes
from telescope.flow.patience import Patience
from telescope.flow.presence import Presence
from telescope.flow.settings import FlowSettings
from telescope.flow.snapshot import SavedGroup, Snapshot, all_saved, restored
from telescope.flow.updates import Updates


@dataclass(frozen=True)
class Parts:
    settings: FlowSettings
    slots: Slots
    batches: Batches
    lanes: Lanes
    updates: Updates
    presence: Presence
    tally: Tally
    patience: Patience


def take(parts: Parts, draws: Draws, version: int) -> Snapshot:
    """The core as it is, without what belongs to processes. No batch is in training."""
    batches, presence = parts.batches, parts.presence
    playing = [group for group in parts.slots.alive.values() if group.playing]
    under_way = sum(flight.tokens for flight in parts.lanes.flights.values() if flight.group.playing)
    return Snapshot(
        settings=parts.settings,
        step=version,
        split_sizes=presence.split_sizes,
        digests=presence.digests,
        position=draws.position,
        playing=all_saved(playing),
        kept=all_saved(batches.waiting),
        forming=all_saved(batches.forming.groups),
        baseline=all_saved(batches.forming.baseline),
        discarded=all_saved(batches.discards),
        tally=parts.tally.state(playing, under_way),
        patience=parts.patience.state,
    )


def put_back(parts: Parts, snapshot: Snapshot) -> None:
    """Into the parts of a core that has seen no event. Groups that were begun wait for a lane, as when they were admitted."""

    def again(groups: tuple[SavedGroup, ...], state: State) -> list[Group]:
        return list(restored(groups, state, parts.settings.group_size))

    forming = Batch()
    forming.groups = again(snapshot.forming, State.BATCHED)
    forming.baseline = again(snapshot.baseline, State.DISCARDED)
    line = _in_order(again(snapshot.playing, State.PENDING) + again(snapshot.kept, State.KEPT))
    parts.batches.restore(line, forming, again(snapshot.discarded, State.DISCARDED))
    parts.slots.restore(snapshot.step * parts.settings.groups_per_batch, _in_order(line + forming.groups))
    parts.updates.restore(snapshot.step)
    parts.tally.restore(snapshot.tally)
    parts.patience.restore(snapshot.patience)
    for group in line:
        for sample in group.samples if group.playing else ():
            parts.lanes.queue(group, sample)


def draw_on(draws: Draws, snapshot: Snapshot) -> None:
    """Go on drawing where the snapshot was; the prompts of groups that start anew are in play again."""
    draws.restore(snapshot.position)
    for group in snapshot.playing:
        draws.resumed(group.prompt)


def _in_order(groups: list[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.group_id)
