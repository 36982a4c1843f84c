"""Which groups are trained together: the take order and the forming batch. Knows nothing of trainers and versions."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from telescope.flow.groups import GroupState, RolloutGroup
from telescope.flow.settings import FlowSettings


class GroupBatch:
    """One batch: P groups to train on, and the groups discarded for equal rewards while it formed."""

    __slots__ = ("baseline", "groups")

    def __init__(self) -> None:
        self.groups: list[RolloutGroup] = []
        self.baseline: list[RolloutGroup] = []


class BatchBuilder:
    """Kept groups enter the forming batch one by one, oldest first; `take_order` says which may."""

    def __init__(self, settings: FlowSettings) -> None:
        self._size = settings.prompts_batch_size_for_trainer
        self._in_order = settings.take_order == "admission"
        self._kept: list[tuple[int, RolloutGroup]] = []  # heap by group id; completion order only
        self._unretired: deque[RolloutGroup] = deque()  # by admission; admission order only
        self._discarded: list[RolloutGroup] = []
        self._forming = GroupBatch()

    @property
    def is_full(self) -> bool:
        return len(self._forming.groups) == self._size

    def admit(self, group: RolloutGroup) -> None:
        if self._in_order:
            self._unretired.append(group)

    def keep(self, group: RolloutGroup) -> None:
        if not self._in_order:
            heappush(self._kept, (group.group_id, group))

    def discard(self, group: RolloutGroup) -> None:
        """A group of equal rewards counts in the statistics of the batch that is forming now, or of the next one if that is
        already full."""
        self._discarded.append(group)

    @property
    def waiting(self) -> list[RolloutGroup]:
        """Kept groups that have no place in the forming batch, in order of their ids."""
        groups = (group for _, group in self._kept) if not self._in_order else self._unretired
        return sorted((group for group in groups if group.state is GroupState.KEPT), key=lambda group: group.group_id)

    @property
    def forming(self) -> GroupBatch:
        return self._forming

    @property
    def discards(self) -> list[RolloutGroup]:
        """Those that count in the statistics of the next batch that fills up."""
        return list(self._discarded)

    def restore(self, line: list[RolloutGroup], forming: GroupBatch, discards: list[RolloutGroup]) -> None:
        """`line`: all groups alive that are not in the forming batch, in order of their ids."""
        for group in line:
            self.admit(group)
            if group.state is GroupState.KEPT:
                self.keep(group)
        self._forming, self._discarded = forming, discards

    def enter(self) -> RolloutGroup | None:
        """Let the next group into the forming batch; None if it is full or nobody may enter."""
        group = None if self.is_full else self._next()
        if group is not None:
            self._forming.groups.append(group)
            if self.is_full:
                self._forming.baseline, self._discarded = self._discarded, []
        return group

    def close(self) -> GroupBatch:
        """Hand over the full batch, its groups in order of their ids, and start the next one."""
        batch, self._forming = self._forming, GroupBatch()
        batch.groups.sort(key=lambda group: group.group_id)
        batch.baseline.sort(key=lambda group: group.group_id)
        return batch

    def _next(self) -> RolloutGroup | None:
        if not self._in_order:
            return heappop(self._kept)[1] if self._kept else None
        line = self._unretired
        while line and line[0].final:
            line.popleft()
        return line.popleft() if line and line[0].state is GroupState.KEPT else None
