"""Which rollout runs next, and with which worker: the queue, the lanes, the workers' credits, the deadlines of orders.

An order (a `Flight`) holds its lane and its worker's credit until the worker has answered it, a cancelled one too: only the
answer says that the rollout has stopped.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from telescope.flow.groups import Fate, Group, Sample
from telescope.flow.ranking import Ranking
from telescope.flow.settings import FlowSettings


class Flight:
    """One attempt at a rollout, from `Run` to the worker's answer."""

    __slots__ = (
        "aborted", "attempt", "ended", "generated", "group", "key", "requests", "sample", "since", "stopping", "tokens",
        "version", "worker",
    )  # fmt: skip

    def __init__(self, group: Group, sample: Sample, worker: str, version: int, since: float) -> None:
        self.group = group
        self.sample = sample
        self.attempt = sample.attempt
        self.key = sample.rollout_id, sample.attempt
        self.worker = worker
        self.version = version  # served at the dispatch
        self.since = since
        self.stopping = False  # cancelled, not answered yet
        self.ended = False
        self.generated = False  # asks for no more tokens: its lane is free, its credit is not
        self.aborted = False  # an update or a lost server cut a request short: its failure is nobody's fault
        self.tokens = 0  # sampled so far
        self.requests: tuple[str, ...] = ()  # ids of all requests it ever made


class Worker:
    __slots__ = ("capacity", "taken")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken = 0
        """Credits: orders that it has not answered."""


class Lanes:
    """Rollouts waiting and running."""

    def __init__(self, settings: FlowSettings) -> None:
        self._individual = settings.individual_lanes
        self._deadline_s = settings.rollout_deadline_s
        self._cancel_deadline_s = settings.cancel_deadline_s
        self._fresh: deque[tuple[Group, Sample]] = deque()
        """Never sent out; they come in order of their ids."""
        self._retried: list[tuple[int, int, Group, Sample]] = []
        self._resting: list[tuple[float, int, Group, Sample]] = []
        self._freest = Ranking()
        self._groups_with_lane = 0
        self._generating = 0
        self._sent: deque[Flight] = deque()
        """In order of their dispatch; those that have ended are dropped when they come up."""
        self._remind_due: deque[tuple[float, Flight]] = deque()
        self._stop_due: deque[tuple[float, Flight]] = deque()
        self.workers: dict[str, Worker] = {}
        self.flights: dict[tuple[int, int], Flight] = {}
        self.waiting = 0

    # ---- workers

    def join(self, worker: str, capacity: int) -> None:
        self.workers[worker] = Worker(capacity)
        self._freest.put(worker, -capacity)

    def lose(self, worker: str) -> list[Flight]:
        """Forget the worker; its flights have ended and are returned in order of their dispatch."""
        flights = [flight for flight in self.flights.values() if flight.worker == worker]
        for flight in flights:
            self.end(flight)
        self._freest.remove(worker)
        del self.workers[worker]
        return flights

    # ---- the queue

    def queue(self, group: Group, sample: Sample) -> None:
        """Wait for a lane: retried rollouts first, then those of the oldest group."""
        sample.fate = Fate.WAITING
        self.waiting += 1
        self._line_up(group, sample)

    def rest(self, group: Group, sample: Sample, until: float) -> None:
        """Wait for a lane, but not before `until`."""
        sample.fate = Fate.WAITING
        self.waiting += 1
        heappush(self._resting, (until, sample.rollout_id, group, sample))

    def wake(self, now: float) -> None:
        """Line up those that have rested long enough."""
        while self._resting and self._resting[0][0] <= now:
            _, _, group, sample = heappop(self._resting)
            if sample.fate is Fate.WAITING:  # else its group was retired meanwhile
                self._line_up(group, sample)

    def _line_up(self, group: Group, sample: Sample) -> None:
        if sample.attempt:
            heappush(self._retried, (sample.rollout_id, sample.attempt, group, sample))
        else:
            self._fresh.append((group, sample))

    def unqueue(self, sample: Sample) -> None:
        """Give up a waiting sample."""
        sample.fate = Fate.FAILED
        self.waiting -= 1

    def flight_of(self, sample: Sample) -> Flight | None:
        """The sample's present attempt, while a worker has it."""
        return self.flights.get((sample.rollout_id, sample.attempt))

    @property
    def scoring(self) -> int:
        """Rollouts that run and hold no lane any more."""
        return len(self.flights) - self._generating

    def dispatch(self, lanes: int, version: int, now: float) -> Flight | None:
        """Start the first waiting rollout if one of the `lanes` of all servers and a credit are free."""
        retried, fresh, waiting = self._retried, self._fresh, Fate.WAITING
        while retried and retried[0][3].fate is not waiting:
            heappop(retried)
        while not retried and fresh and fresh[0][1].fate is not waiting:
            fresh.popleft()
        if not retried and not fresh:
            return None
        if not self._has_lane(retried[0][2] if retried else fresh[0][0], lanes):
            return None
        name = self._freest.first()
        if name is None:
            return None
        worker = self.workers[name]
        if worker.taken >= worker.capacity:
            return None
        group, sample = heappop(retried)[2:] if retried else fresh.popleft()
        return self._start(group, sample, name, version, now)

    def _has_lane(self, group: Group, lanes: int) -> bool:
        if self._individual:
            return self._generating < lanes
        # without servers nothing starts, whatever lane the group holds
        return lanes > 0 and (group.has_lane or self._groups_with_lane < lanes)

    def _start(self, group: Group, sample: Sample, name: str, version: int, now: float) -> Flight:
        flight = Flight(group, sample, name, version, now)
        sample.fate = Fate.RUNNING
        self.waiting -= 1
        self.flights[flight.key] = flight
        self._generating += 1
        worker = self.workers[name]
        worker.taken += 1
        self._freest.put(name, worker.taken - worker.capacity)
        group.flights += 1
        if not group.has_lane:
            group.has_lane = True
            self._groups_with_lane += 1
        self._sent.append(flight)
        return flight

    # ---- the end of a flight

    def generation_over(self, flight: Flight) -> None:
        """It asks for no more tokens: its lane is free now, its worker's credit when that has answered."""
        if not flight.generated:
            flight.generated = True
            self._generating -= 1

    def stop(self, flight: Flight, now: float) -> None:
        """The flight is cancelled; its worker owes an answer."""
        flight.stopping = True
        self._remind_due.append((now + self._cancel_deadline_s / 2, flight))
        self._stop_due.append((now + self._cancel_deadline_s, flight))

    def end(self, flight: Flight) -> None:
        """The worker has answered, or is lost: lane and credit are free."""
        flight.ended = True
        if not flight.generated:
            self.generation_over(flight)
        del self.flights[flight.key]
        worker = self.workers[flight.worker]
        worker.taken -= 1
        self._freest.put(flight.worker, worker.taken - worker.capacity)
        group = flight.group
        group.flights -= 1
        if not group.flights:
            self.leave_lane(group)

    def leave_lane(self, group: Group) -> None:
        """Free a group's lane once it plays no more and no worker holds an order of it."""
        if group.has_lane and group.flights == 0 and not group.playing:
            group.has_lane = False
            self._groups_with_lane -= 1

    def overdue(self, now: float) -> list[Flight]:
        """Flights past their deadline and not cancelled yet, each returned once."""
        sent, due = self._sent, list[Flight]()
        while sent and (sent[0].ended or sent[0].since + self._deadline_s <= now):
            flight = sent.popleft()
            if not flight.ended and not flight.stopping:
                due.append(flight)
        return due

    def to_remind(self, now: float) -> list[Flight]:
        """Cancelled flights unanswered for half their time, each returned once: a cancel can be lost on the wire."""
        return _due(self._remind_due, now)

    def unanswered(self, now: float) -> list[Flight]:
        """Cancelled flights whose worker has not answered in time."""
        return _due(self._stop_due, now)


def _due(line: deque[tuple[float, Flight]], now: float) -> list[Flight]:
    """Take what is due from a line in order of time; what has ended meanwhile is dropped."""
    due = []
    while line and (line[0][0] <= now or line[0][1].ended):
        flight = line.popleft()[1]
        if not flight.ended:
            due.append(flight)
    return due
