"""What becomes of groups, and of attempts at their rollouts: tried again, given up, kept, discarded, retired, accounted for.

The lower half of the core: it owns the parts that hold groups, and the commands that are said of them. It refuses to know
events, batches' training, versions and checkpoints, which are core.py's.
"""

from __future__ import annotations

from telescope.flow import commands as do
from telescope.flow.admission import Slots
from telescope.flow.batches import Batches
from telescope.flow.counts import Tally
from telescope.flow.draws import Draws
from telescope.flow.groups import Fate, Group, Sample, State, is_further, transition
from telescope.flow.lanes import Flight, Lanes
from telescope.flow.patience import Patience
from telescope.flow.placement import Placement
from telescope.flow.settings import LONGEST_BACKOFF_S, FlowSettings
from telescope.flow.turns import Turns

STALE = "off_policy"
ZERO_ADVANTAGE = "zero_advantage"


class Fates:
    """The groups alive and what they wait for. `_now` and `_out` are those of the event at hand."""

    def __init__(self, settings: FlowSettings) -> None:
        self.settings = settings
        self._slots = Slots(settings)
        self._batches = Batches(settings)
        self._lanes = Lanes(settings)
        self._placement = Placement(settings)
        self._turns = Turns(self._lanes, self._placement, self._say, self._reach)
        self._patience = Patience(settings)
        self._tally = Tally()
        self._draws: Draws | None = None
        self._now = 0.0
        self._groups_moved = False  # since what follows from the event before was done
        self._ending: do.StopRun | None = None
        self._out: list[do.AnyCommand] = []

    # ---- one attempt at a rollout

    def _cancel(self, flight: Flight, reason: str) -> None:
        """Tell the worker to stop; the flight keeps its lane and credit until it answers."""
        self._lanes.stop(flight, self._now)
        self._out.append(do.CancelAttempt(flight.worker, flight.sample.rollout_id, flight.attempt, reason))
        self._turns.withdraw(flight, reason)

    def _flight_ended(self, flight: Flight, counted: bool, why: str = "its rollout has ended") -> None:
        self._turns.withdraw(flight, why)
        if not counted:
            self._tally.tokens_lost += flight.tokens

    def _attempt_failed(self, flight: Flight, cause: str, again: bool = True) -> None:
        """Try again after a pause, or give the sample up: its group goes on without it."""
        group, sample = flight.group, flight.sample
        if not group.playing:
            return
        if flight.aborted and sample.excused < self.settings.excused_limit:
            sample.excused += 1
        else:
            sample.failures += 1
        if again and sample.failures < self.settings.max_attempts:
            sample.attempt += 1
            self._tally.retried += 1
            self._try_again(group, sample, rested=flight.aborted)
            return
        sample.fate = Fate.FAILED
        group.failed += 1
        if len(group.samples) - group.failed < self.settings.survivors_needed:
            self._fail(group, cause)
        else:
            self._decided(group)

    def _try_again(self, group: Group, sample: Sample, rested: bool) -> None:
        """At once where nothing is broken, else after a pause that doubles with each failure."""
        pause_s = 0.0 if rested else min(self.settings.retry_backoff_s * 2 ** (sample.failures - 1), LONGEST_BACKOFF_S)
        if pause_s:
            self._lanes.rest(group, sample, self._now + pause_s)
        else:
            self._lanes.queue(group, sample)

    # ---- groups

    def _move(self, group: Group, state: State, reason: str = "") -> None:
        self._groups_moved = True
        self._tally.moved(group.state, transition(group.state, state))
        group.state = state
        self._out.append(do.RecordGroupState(group.group_id, str(state), reason, group.v_start))

    def _reach(self, group: Group, state: State) -> None:
        """The group has come to a point of its play; only the first of its samples to do so moves it."""
        if state is not group.state and is_further(state, group.state) and group.playing:
            self._move(group, state)

    def _decided(self, group: Group) -> None:
        """One more sample has its reward or was given up."""
        group.undecided -= 1
        if group.undecided:
            return
        self._move(group, State.COMPLETE)
        self._lanes.leave_lane(group)
        self._patience.completed(group.prompt.environment)
        if self._draws is not None and self.settings.curricula:
            self._draws.played(group.prompt, [sample.reward for sample in group.survivors])
        if self.settings.discard_zero_advantage and group.rewards_are_equal:
            self._discard(group)
        else:
            self._patience.kept()
            self._move(group, State.KEPT)
            self._batches.kept(group)

    def _discard(self, group: Group) -> None:
        self._move(group, State.DISCARDED, ZERO_ADVANTAGE)
        self._tally.group_discarded(group, ZERO_ADVANTAGE)
        self._slots.release(group, trained=False)
        self._batches.discarded(group)
        sentence, ends = self._patience.discarded()
        if ends:
            self._stop(sentence, ok=False)
        elif sentence:
            self._out.append(do.WarnUser(sentence))

    def _fail(self, group: Group, cause: str) -> None:
        self._retire(group, State.FAILED, cause)
        if self._draws is not None:
            self._draws.without_result(group.prompt)
        sentence = self._patience.failed(group.prompt.environment, cause)
        if sentence:
            self._stop(sentence, ok=False)

    def _retire(self, group: Group, state: State, reason: str) -> None:
        """The group ends unfinished: what runs is cancelled, what waits is dropped, what is finished is forgotten."""
        finished = group.survivors
        self._tally.group_retired(group, state, reason)
        for sample in group.samples:
            if sample.fate is Fate.WAITING:
                self._lanes.unqueue(sample)
            elif sample.fate is Fate.RUNNING and (flight := self._lanes.flight_of(sample)) is not None:
                self._cancel(flight, f"its group is {state}: {reason}")
        self._move(group, state, reason)
        if finished:
            self._out.append(do.ForgetRollouts(tuple(sample.rollout_id for sample in finished)))
        self._slots.release(group, trained=False)
        self._lanes.leave_lane(group)

    def _retire_stale(self, version: int) -> None:
        """Rule 5: an incomplete group whose first dispatch is D versions old goes, whole. Finished siblings go with it: to
        train on the short ones alone would bias the baseline. A complete group stays, however old."""
        for group in list(self._slots.alive.values()):
            age = version - group.v_start
            if group.playing and group.v_start >= 0 and age >= self.settings.max_off_policy_steps:
                self._retire(group, State.CANCELLED, STALE)
                if self._draws is not None:
                    (self._draws.without_result if group.returned else self._draws.give_back)(group.prompt)

    # ---- the end

    def _say(self, command: do.AnyCommand) -> None:
        self._out.append(command)

    def _stop(self, reason: str, ok: bool) -> None:
        """End the run after this event; the first reason counts."""
        if self._ending is None:
            self._ending = do.StopRun(reason, ok)

    def _end_run(self, stop: do.StopRun) -> None:
        """Account for every group still alive. Nothing is cancelled one by one: Stop ends every process."""
        for group in self._slots.alive.values():
            self._move(group, State.CANCELLED, "the run ended")
            self._tally.group_retired(group, State.CANCELLED, "the run ended")
        self._tally.tokens_lost += sum(flight.tokens for flight in self._lanes.flights.values())
        self._slots.alive.clear()
        self._out.append(stop)
