"""Which rollout runs next, and with which worker: the queue, the lanes, the workers' credits, the deadlines of orders.

A rollout with a worker holds its lane and its worker's credit until the worker has answered, a cancelled one too: only the
answer says that it has stopped.

Where rollouts of training and of evals both wait, an eval's starts only while evals have less than their part of the lanes, and
at most each second start is one: so an eval always comes to its end, and training never stands still for one. Lanes that
training leaves idle are an eval's too, each until its sample ends. An eval with servers of its own ("dedicated") has their
lanes and no others, and training has the rest.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from telescope.flow.groups import RolloutAttempt, RolloutGroup, RolloutStatus
from telescope.flow.ranking import Ranking
from telescope.flow.settings import FlowSettings


class WorkerCredits:
    __slots__ = ("capacity", "taken")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken = 0
        """Orders that the worker has not answered."""


EVAL_PARTS = 4
"""While training waits for a lane, no rollout of an eval starts that would give evals more than this part of all lanes; one
they may always have."""


class Line:
    """Rollouts that wait for a lane: retried ones first, then those of the oldest group."""

    def __init__(self) -> None:
        self._fresh: deque[RolloutAttempt] = deque()
        """Never sent out, in order of their arrival, which is that of their ids but for `take_over`."""
        self._retried: list[tuple[int, int, RolloutAttempt]] = []
        self.used = False
        """Whether anything was ever put into it."""

    def put(self, rollout: RolloutAttempt) -> None:
        self.used = True
        if rollout.attempt:
            heappush(self._retried, (rollout.rollout_id, rollout.attempt, rollout))
        else:
            self._fresh.append(rollout)

    def first(self) -> RolloutAttempt | None:
        """The next one, left where it is; those that were given up meanwhile are dropped."""
        retried, fresh, waiting = self._retried, self._fresh, RolloutStatus.WAITING
        while retried and retried[0][2].status is not waiting:
            heappop(retried)
        if retried:
            return retried[0][2]
        while fresh and fresh[0].status is not waiting:
            fresh.popleft()
        return fresh[0] if fresh else None

    def take_over(self, other: Line) -> None:
        """All that waits in the other one waits in this one, behind what does already."""
        while (rollout := other.first()) is not None:
            other.drop_first()
            self.put(rollout)

    def drop_first(self) -> None:
        """The one that `first` has just named leaves the line."""
        if self._retried:
            heappop(self._retried)
        else:
            self._fresh.popleft()


class Lanes:
    """Rollouts waiting and running."""

    def __init__(self, settings: FlowSettings) -> None:
        self._individual = settings.enable_individual_sample_lanes
        self._deadline_s = settings.rollout_deadline_s
        self._cancel_deadline_s = settings.cancel_deadline_s
        self._training, self._evals, self._dedicated = Line(), Line(), Line()
        self._evals_running = 0
        """Attempts of evals that workers hold, but for dedicated ones."""
        self._dedicated_running = 0
        """Of dedicated evals; each keeps its lane until it has ended."""
        self._dedicated_groups = 0
        """Groups of dedicated evals that have a lane."""
        self._eval_was_last = False
        """Whether the last rollout to start was an eval's."""
        self._resting: list[tuple[float, int, RolloutAttempt]] = []
        self._freest = Ranking()
        self._groups_with_lane = 0
        self._generating = 0
        self._sent: deque[RolloutAttempt] = deque()
        """In order of their dispatch; those that have ended are dropped when they come up."""
        self._remind_due: deque[tuple[float, RolloutAttempt]] = deque()
        self._answer_due: deque[tuple[float, RolloutAttempt]] = deque()
        self.workers: dict[str, WorkerCredits] = {}
        self.in_flight: dict[tuple[int, int], RolloutAttempt] = {}
        """All that workers hold, by rollout id and attempt, in order of their dispatch."""
        self.waiting = 0

    # ---- workers

    def join(self, worker: str, capacity: int) -> None:
        self.workers[worker] = WorkerCredits(capacity)
        self._freest.put(worker, -capacity)

    def lose(self, worker: str) -> list[RolloutAttempt]:
        """Forget the worker; its rollouts have ended and are returned in order of their dispatch."""
        lost = [rollout for rollout in self.in_flight.values() if rollout.worker == worker]
        for rollout in lost:
            self.end(rollout)
        self._freest.remove(worker)
        del self.workers[worker]
        return lost

    # ---- the queue

    def queue(self, rollout: RolloutAttempt) -> None:
        """Wait for a lane: retried rollouts first, then those of the oldest group."""
        self.waiting += 1
        self._line_up(rollout)

    def rest(self, rollout: RolloutAttempt, until: float) -> None:
        """Wait for a lane, but not before `until`."""
        self.waiting += 1
        heappush(self._resting, (until, rollout.rollout_id, rollout))

    def wake(self, now: float) -> None:
        """Line up those that have rested long enough."""
        while self._resting and self._resting[0][0] <= now:
            rollout = heappop(self._resting)[2]
            if rollout.status is RolloutStatus.WAITING:  # else its group was retired meanwhile
                self._line_up(rollout)

    def _line_up(self, rollout: RolloutAttempt) -> None:
        group = rollout.group
        (self._dedicated if group.dedicated else self._evals if group.of_eval else self._training).put(rollout)

    def share_dedicated(self) -> None:
        """No eval is dedicated any more: what waits and what runs of those that were is as of any eval."""
        self._evals.take_over(self._dedicated)
        self._evals_running += self._dedicated_running
        self._dedicated_running = self._dedicated_groups = 0

    def give_up(self, rollout: RolloutAttempt) -> None:
        """One that waits will not be played."""
        rollout.status = RolloutStatus.FAILED
        self.waiting -= 1

    @property
    def scoring(self) -> int:
        """Rollouts that run and hold no lane any more."""
        return len(self.in_flight) - self._generating

    def dispatch(
        self, lanes: int, version: int, now: float, evals_first: bool = False, dedicated: int = 0
    ) -> RolloutAttempt | None:
        """Start the first waiting rollout if one of the `lanes` of all servers and a credit are free. `evals_first`: training
        waits for an eval's end, so an eval's rollout goes before any of training's. `dedicated`: lanes beside, of servers that
        are held for evals."""
        chosen = self._choose_dedicated(lanes, dedicated) if dedicated else None
        if chosen is None:
            chosen = self._choose(lanes, evals_first)
        if chosen is None:
            return None
        line, rollout = chosen
        name = self._freest.first()
        if name is None:
            return None
        worker = self.workers[name]
        if worker.taken >= worker.capacity:
            return None
        line.drop_first()
        self._start(rollout, name, version, now)
        return rollout

    def _choose(self, lanes: int, evals_first: bool) -> tuple[Line, RolloutAttempt] | None:
        """The rollout to start next and its line, of those that have a lane."""
        trained = self._training.first()
        played = self._evals.first() if self._evals.used else None
        if played is None:
            return (self._training, trained) if trained is not None and self._has_lane(trained.group, lanes) else None
        turn = self._evals_running < max(1, lanes // EVAL_PARTS) and not self._eval_was_last
        order = [(self._training, trained), (self._evals, played)]
        for line, rollout in reversed(order) if evals_first or turn else order:
            if rollout is not None and self._has_lane(rollout.group, lanes):
                return line, rollout
        return None

    def _choose_dedicated(self, lanes: int, dedicated: int) -> tuple[Line, RolloutAttempt] | None:
        """The next one of a dedicated eval. Servers just held still have rollouts of training, whose lanes are free when they
        end."""
        rollout = self._dedicated.first()
        if rollout is None:
            return None
        if self._individual:
            has_lane = self._dedicated_running < dedicated and self._generating < lanes + dedicated
        else:
            free = self._dedicated_groups < dedicated and self._groups_with_lane < lanes + dedicated
            has_lane = rollout.group.has_lane or free
        return (self._dedicated, rollout) if has_lane else None

    def _has_lane(self, group: RolloutGroup, lanes: int) -> bool:
        if self._individual:
            return self._generating - self._dedicated_running < lanes
        # without servers nothing starts, whatever lane the group holds
        return lanes > 0 and (group.has_lane or self._groups_with_lane - self._dedicated_groups < lanes)

    def _start(self, rollout: RolloutAttempt, name: str, version: int, now: float) -> None:
        rollout.start(name, version, now)
        self.waiting -= 1
        self.in_flight[rollout.rollout_id, rollout.attempt] = rollout
        self._generating += 1
        group = rollout.group
        if group.dedicated:
            self._dedicated_running += 1
        else:
            self._evals_running += group.of_eval
            self._eval_was_last = group.of_eval
        worker = self.workers[name]
        worker.taken += 1
        self._freest.put(name, worker.taken - worker.capacity)
        group.in_flight += 1
        if not group.has_lane:
            group.has_lane = True
            self._groups_with_lane += 1
            self._dedicated_groups += group.dedicated
        self._sent.append(rollout)

    # ---- the end of an attempt

    def end_generation(self, rollout: RolloutAttempt) -> None:
        """It asks for no more tokens: its lane is free now, its worker's credit when that has answered."""
        if not rollout.generated:
            rollout.generated = True
            self._generating -= 1

    def cancel(self, rollout: RolloutAttempt, now: float) -> None:
        """Its worker owes an answer from now on."""
        rollout.cancelled = True
        self._remind_due.append((now + self._cancel_deadline_s / 2, rollout))
        self._answer_due.append((now + self._cancel_deadline_s, rollout))

    def end(self, rollout: RolloutAttempt) -> None:
        """The worker has answered, or is lost: lane and credit are free."""
        rollout.ended = True
        if not rollout.generated:
            self.end_generation(rollout)
        del self.in_flight[rollout.rollout_id, rollout.attempt]
        worker = self.workers[rollout.worker]
        worker.taken -= 1
        self._freest.put(rollout.worker, worker.taken - worker.capacity)
        group = rollout.group
        if group.dedicated:
            self._dedicated_running -= 1
        else:
            self._evals_running -= group.of_eval
        group.in_flight -= 1
        if not group.in_flight:
            self.leave_lane(group)

    def leave_lane(self, group: RolloutGroup) -> None:
        """Free a group's lane once it plays no more and no worker holds an order of it."""
        if group.has_lane and group.in_flight == 0 and not group.playing:
            group.has_lane = False
            self._groups_with_lane -= 1
            self._dedicated_groups -= group.dedicated

    # ---- deadlines

    def take_overdue(self, now: float) -> list[RolloutAttempt]:
        """Rollouts past their deadline and not cancelled yet, each returned once."""
        sent, due = self._sent, list[RolloutAttempt]()
        while sent and (sent[0].ended or sent[0].since + self._deadline_s <= now):
            rollout = sent.popleft()
            if not rollout.ended and not rollout.cancelled:
                due.append(rollout)
        return due

    def take_unreminded(self, now: float) -> list[RolloutAttempt]:
        """Cancelled rollouts unanswered for half their time, each returned once: a cancel can be lost on the wire."""
        return _take_due(self._remind_due, now)

    def take_unanswered(self, now: float) -> list[RolloutAttempt]:
        """Cancelled rollouts whose worker has not answered in time."""
        return _take_due(self._answer_due, now)


def _take_due(line: deque[tuple[float, RolloutAttempt]], now: float) -> list[RolloutAttempt]:
    """Take what is due from a line in order of time; what has ended meanwhile is dropped."""
    due = []
    while line and (line[0][0] <= now or line[0][1].ended):
        rollout = line.popleft()[1]
        if not rollout.ended:
            due.append(rollout)
    return due
