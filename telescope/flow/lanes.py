"""Which rollout runs next, and with which worker: the queue, the lanes, the workers' credits, the deadlines of orders.

A rollout with a worker holds its lane and its worker's credit until the worker has answered, a cancelled one too: only the
answer says that it has stopped.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from telescope.flow.groups import Rollout, RolloutGroup, RolloutStatus
from telescope.flow.ranking import Ranking
from telescope.flow.settings import FlowSettings


class WorkerCredits:
    __slots__ = ("capacity", "taken")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken = 0
        """Orders that the worker has not answered."""


class Lanes:
    """Rollouts waiting and running."""

    def __init__(self, settings: FlowSettings) -> None:
        self._individual = settings.enable_individual_sample_lanes
        self._deadline_s = settings.rollout_deadline_s
        self._cancel_deadline_s = settings.cancel_deadline_s
        self._fresh: deque[Rollout] = deque()
        """Never sent out; they come in order of their ids."""
        self._retried: list[tuple[int, int, Rollout]] = []
        self._resting: list[tuple[float, int, Rollout]] = []
        self._freest = Ranking()
        self._groups_with_lane = 0
        self._generating = 0
        self._sent: deque[Rollout] = deque()
        """In order of their dispatch; those that have ended are dropped when they come up."""
        self._remind_due: deque[tuple[float, Rollout]] = deque()
        self._answer_due: deque[tuple[float, Rollout]] = deque()
        self.workers: dict[str, WorkerCredits] = {}
        self.in_flight: dict[tuple[int, int], Rollout] = {}
        """All that workers hold, by rollout id and attempt, in order of their dispatch."""
        self.waiting = 0

    # ---- workers

    def join(self, worker: str, capacity: int) -> None:
        self.workers[worker] = WorkerCredits(capacity)
        self._freest.put(worker, -capacity)

    def lose(self, worker: str) -> list[Rollout]:
        """Forget the worker; its rollouts have ended and are returned in order of their dispatch."""
        lost = [rollout for rollout in self.in_flight.values() if rollout.worker == worker]
        for rollout in lost:
            self.end(rollout)
        self._freest.remove(worker)
        del self.workers[worker]
        return lost

    # ---- the queue

    def queue(self, rollout: Rollout) -> None:
        """Wait for a lane: retried rollouts first, then those of the oldest group."""
        self.waiting += 1
        self._line_up(rollout)

    def rest(self, rollout: Rollout, until: float) -> None:
        """Wait for a lane, but not before `until`."""
        self.waiting += 1
        heappush(self._resting, (until, rollout.rollout_id, rollout))

    def wake(self, now: float) -> None:
        """Line up those that have rested long enough."""
        while self._resting and self._resting[0][0] <= now:
            rollout = heappop(self._resting)[2]
            if rollout.status is RolloutStatus.WAITING:  # else its group was retired meanwhile
                self._line_up(rollout)

    def _line_up(self, rollout: Rollout) -> None:
        if rollout.attempt:
            heappush(self._retried, (rollout.rollout_id, rollout.attempt, rollout))
        else:
            self._fresh.append(rollout)

    def give_up(self, rollout: Rollout) -> None:
        """One that waits will not be played."""
        rollout.status = RolloutStatus.FAILED
        self.waiting -= 1

    @property
    def scoring(self) -> int:
        """Rollouts that run and hold no lane any more."""
        return len(self.in_flight) - self._generating

    def dispatch(self, lanes: int, version: int, now: float) -> Rollout | None:
        """Start the first waiting rollout if one of the `lanes` of all servers and a credit are free."""
        retried, fresh, waiting = self._retried, self._fresh, RolloutStatus.WAITING
        while retried and retried[0][2].status is not waiting:
            heappop(retried)
        while not retried and fresh and fresh[0].status is not waiting:
            fresh.popleft()
        if not retried and not fresh:
            return None
        rollout = retried[0][2] if retried else fresh[0]
        if not self._has_lane(rollout.group, lanes):
            return None
        name = self._freest.first()
        if name is None:
            return None
        worker = self.workers[name]
        if worker.taken >= worker.capacity:
            return None
        if retried:
            heappop(retried)
        else:
            fresh.popleft()
        self._start(rollout, name, version, now)
        return rollout

    def _has_lane(self, group: RolloutGroup, lanes: int) -> bool:
        if self._individual:
            return self._generating < lanes
        # without servers nothing starts, whatever lane the group holds
        return lanes > 0 and (group.has_lane or self._groups_with_lane < lanes)

    def _start(self, rollout: Rollout, name: str, version: int, now: float) -> None:
        rollout.start(name, version, now)
        self.waiting -= 1
        self.in_flight[rollout.key] = rollout
        self._generating += 1
        worker = self.workers[name]
        worker.taken += 1
        self._freest.put(name, worker.taken - worker.capacity)
        group = rollout.group
        group.in_flight += 1
        if not group.has_lane:
            group.has_lane = True
            self._groups_with_lane += 1
        self._sent.append(rollout)

    # ---- the end of an attempt

    def end_generation(self, rollout: Rollout) -> None:
        """It asks for no more tokens: its lane is free now, its worker's credit when that has answered."""
        if not rollout.generated:
            rollout.generated = True
            self._generating -= 1

    def cancel(self, rollout: Rollout, now: float) -> None:
        """Its worker owes an answer from now on."""
        rollout.cancelled = True
        self._remind_due.append((now + self._cancel_deadline_s / 2, rollout))
        self._answer_due.append((now + self._cancel_deadline_s, rollout))

    def end(self, rollout: Rollout) -> None:
        """The worker has answered, or is lost: lane and credit are free."""
        rollout.ended = True
        if not rollout.generated:
            self.end_generation(rollout)
        del self.in_flight[rollout.key]
        worker = self.workers[rollout.worker]
        worker.taken -= 1
        self._freest.put(rollout.worker, worker.taken - worker.capacity)
        group = rollout.group
        group.in_flight -= 1
        if not group.in_flight:
            self.leave_lane(group)

    def leave_lane(self, group: RolloutGroup) -> None:
        """Free a group's lane once it plays no more and no worker holds an order of it."""
        if group.has_lane and group.in_flight == 0 and not group.playing:
            group.has_lane = False
            self._groups_with_lane -= 1

    # ---- deadlines

    def take_overdue(self, now: float) -> list[Rollout]:
        """Rollouts past their deadline and not cancelled yet, each returned once."""
        sent, due = self._sent, list[Rollout]()
        while sent and (sent[0].ended or sent[0].since + self._deadline_s <= now):
            rollout = sent.popleft()
            if not rollout.ended and not rollout.cancelled:
                due.append(rollout)
        return due

    def take_unreminded(self, now: float) -> list[Rollout]:
        """Cancelled rollouts unanswered for half their time, each returned once: a cancel can be lost on the wire."""
        return _take_due(self._remind_due, now)

    def take_unanswered(self, now: float) -> list[Rollout]:
        """Cancelled rollouts whose worker has not answered in time."""
        return _take_due(self._answer_due, now)


def _take_due(line: deque[tuple[float, Rollout]], now: float) -> list[Rollout]:
    """Take what is due from a line in order of time; what has ended meanwhile is dropped."""
    due = []
    while line and (line[0][0] <= now or line[0][1].ended):
        rollout = line.popleft()[1]
        if not rollout.ended:
            due.append(rollout)
    return due
