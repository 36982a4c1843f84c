"""How many groups may be alive. A slot is held from admission until retirement or until the version trained on the group is
committed; docs/decisions/0001-slots-until-commit.md says why not less."""

from __future__ import annotations

from telescope.flow.groups import Group
from telescope.flow.settings import FlowSettings


class Slots:
    """The groups alive, oldest first."""

    def __init__(self, settings: FlowSettings) -> None:
        self._limit = settings.slots
        self._needed = settings.number_of_steps * settings.groups_per_batch
        self._trained = 0
        self.alive: dict[int, Group] = {}

    @property
    def has_room(self) -> bool:
        """Whether one more group may be admitted: a slot is free, and the run still needs a group beyond those alive. The
        second keeps the end of a run from generating what no step would train on."""
        alive = len(self.alive)
        return alive < self._limit and self._trained + alive < self._needed

    def restore(self, trained: int, alive: list[Group]) -> None:
        """`alive`: in order of their ids."""
        self._trained = trained
        self.alive = {group.group_id: group for group in alive}

    def hold(self, group: Group) -> None:
        self.alive[group.group_id] = group

    def release(self, group: Group, trained: bool) -> None:
        del self.alive[group.group_id]
        if trained:
            self._trained += 1
