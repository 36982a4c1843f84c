"""What becomes of groups, and of attempts at their rollouts: tried again, given up, kept, discarded, retired, accounted for.

    admit ─▶ rollouts play, fail_attempt tries again ─▶ settle ─▶ keep | discard
                                                     └▶ fail, retire_stale

`GroupStates` moves a group from one state to the next and says so; `GroupLifecycle` decides when. Refuses events, the trainer,
versions and checkpoints, which are core.py's.
"""

from __future__ import annotations

from collections.abc import Callable

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.batches import BatchBuilder, GroupBatch
from telescope.flow.counts import RunTally
from telescope.flow.evals import EvalGroup, Evals
from telescope.flow.groups import GroupState, RolloutAttempt, RolloutGroup, RolloutStatus, is_further, transition
from telescope.flow.lanes import Lanes
from telescope.flow.limits import FailureLimits
from telescope.flow.placement import TokenRequests
from telescope.flow.prompt_sampler import DrawnPrompt, PromptSampler
from telescope.flow.settings import LONGEST_BACKOFF_S, FlowSettings
from telescope.flow.staleness import Slots, is_stale

OFF_POLICY = "off_policy"
ZERO_ADVANTAGE = "zero_advantage"
RUN_ENDED = "the run ended"
REASONS_IN_WORDS = {ZERO_ADVANTAGE: "all rewards equal", OFF_POLICY: "too old"}
"""Of the reasons that rows and counts name in a word of code; the others are words already."""


def describe_reason(counted: str) -> str:
    """For people: `discarded: all rewards equal` of `discarded: zero_advantage`, as `summary.json` has it."""
    state, _, reason = counted.partition(": ")
    return f"{state}: {REASONS_IN_WORDS[reason]}" if reason in REASONS_IN_WORDS else counted


class GroupStates:
    """Each move of a group is allowed, counted and said."""

    def __init__(self, tally: RunTally, say: do.Say) -> None:
        self._tally = tally
        self._say = say
        self.moved = False
        """Whether any group has moved since this was set back."""

    def enter(self, group: RolloutGroup) -> None:
        """A new group is in its first state."""
        self._tally.count_move(None, group.state)
        self._say(do.RecordGroupState(group.group_id, str(group.state), "", group.v_start))

    def move(self, group: RolloutGroup, state: GroupState, reason: str = "") -> None:
        self.moved = True
        self._tally.count_move(group.state, transition(group.state, state))
        group.state = state
        self._say(do.RecordGroupState(group.group_id, str(state), reason, group.v_start))

    def reach(self, group: RolloutGroup, state: GroupState) -> None:
        """The group has come to a point of its play; only the first of its rollouts to do so moves it."""
        if group.of_eval:
            return
        if state is not group.state and is_further(state, group.state) and group.playing:
            self.move(group, state)


class GroupLifecycle:
    """The groups alive and what becomes of them. `stop` ends the run with a reason, as a failure."""

    def __init__(
        self,
        settings: FlowSettings,
        *,
        states: GroupStates,
        slots: Slots,
        batches: BatchBuilder,
        lanes: Lanes,
        requests: TokenRequests,
        evals: Evals,
        limits: FailureLimits,
        tally: RunTally,
        say: do.Say,
        stop: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._states = states
        self._slots = slots
        self._batches = batches
        self._lanes = lanes
        self._requests = requests
        self._evals = evals
        self._limits = limits
        self._tally = tally
        self._say = say
        self._stop = stop
        self.sampler: PromptSampler | None = None
        """Once the first worker has said what there is to draw; no group plays before that."""

    def admit(self, drawn: DrawnPrompt) -> None:
        """A new group takes a slot; its rollouts wait for lanes."""
        group = RolloutGroup(drawn.group_id, drawn.prompt, drawn.returned, self._settings.group_size)
        self._slots.hold(group)
        self._batches.admit(group)
        self._tally.admitted += 1
        self._states.enter(group)
        for rollout in group.rollouts:
            self._lanes.queue(rollout)

    # ---- one attempt at a rollout

    def cancel(self, rollout: RolloutAttempt, reason: str, now: float) -> None:
        """Tell the worker to stop; the rollout keeps its lane and credit until the worker answers."""
        self._lanes.cancel(rollout, now)
        self._say(do.CancelAttempt(rollout.worker, rollout.rollout_id, rollout.attempt, reason))
        self._requests.withdraw(rollout, reason)

    def end_attempt(self, rollout: RolloutAttempt, counts: bool, why: str = "its rollout has ended") -> None:
        """Its worker has answered, or is lost."""
        self._requests.withdraw(rollout, why)
        if not counts and not rollout.group.of_eval:
            self._tally.tokens_lost += rollout.tokens

    def finish(self, rollout: RolloutAttempt, done: seen.RolloutDone) -> None:
        """The rollout has its reward."""
        if isinstance(rollout.group, EvalGroup):
            self._evals.settle(rollout, rollout.group, RolloutStatus.DONE)
            return
        rollout.status, rollout.reward, rollout.tokens = RolloutStatus.DONE, done.reward, done.completion_tokens
        rollout.turn_returns = done.turn_returns or ()
        self._tally.generated += 1
        self._states.reach(rollout.group, GroupState.SCORING)
        self._settle(rollout.group)

    def fail_attempt(self, rollout: RolloutAttempt, cause: str, now: float, again: bool = True) -> None:
        """Try again after a pause, or give the rollout up: its group goes on without it."""
        group, settings = rollout.group, self._settings
        if not group.playing:
            return
        if rollout.aborted and rollout.excused < settings.excused_limit:
            rollout.excused += 1
        else:
            rollout.failures += 1
        if again and rollout.failures < settings.max_attempts:
            self._tally.retried += not group.of_eval
            self._retry(rollout, now)
            return
        if isinstance(group, EvalGroup):
            self._evals.settle(rollout, group, RolloutStatus.FAILED)
            return
        rollout.status = RolloutStatus.FAILED
        group.failed += 1
        if len(group.rollouts) - group.failed < settings.survivors_needed:
            self._fail(group, cause, now)
        else:
            self._settle(group)

    def _retry(self, rollout: RolloutAttempt, now: float) -> None:
        """At once where nothing is broken, else after a pause that doubles with each failure."""
        following, settings = rollout.group.retry(rollout), self._settings
        pause_s = 0.0
        if not rollout.aborted:
            pause_s = min(settings.retry_backoff_s * 2 ** (rollout.failures - 1), LONGEST_BACKOFF_S)
        if pause_s:
            self._lanes.rest(following, now + pause_s)
        else:
            self._lanes.queue(following)

    # ---- groups

    def _settle(self, group: RolloutGroup) -> None:
        """One more rollout has its reward or was given up: the last one completes the group."""
        group.undecided -= 1
        if group.undecided:
            return
        self._states.move(group, GroupState.COMPLETE)
        self._lanes.leave_lane(group)
        self._limits.note_completed(group.prompt.environment)
        if self.sampler is not None and self._settings.curricula:
            self.sampler.record(group.prompt, [rollout.reward for rollout in group.survivors])
        if self._settings.discard_group_zero_advantage and group.rewards_are_equal:
            self._discard(group)
        else:
            self._limits.note_kept()
            self._states.move(group, GroupState.KEPT)
            self._batches.keep(group)

    def _discard(self, group: RolloutGroup) -> None:
        self._states.move(group, GroupState.DISCARDED, ZERO_ADVANTAGE)
        self._tally.count_discarded(group, ZERO_ADVANTAGE)
        self._slots.release(group, trained=False)
        self._batches.discard(group)
        sentence, ends = self._limits.note_discarded()
        if ends:
            self._stop(sentence)
        elif sentence:
            self._say(do.WarnUser(sentence))

    def _fail(self, group: RolloutGroup, cause: str, now: float) -> None:
        self._retire(group, GroupState.FAILED, cause, now)
        if self.sampler is not None:
            self.sampler.drop(group.prompt)
        sentence = self._limits.note_failed(group.prompt.environment, cause)
        if sentence:
            self._stop(sentence)

    def _retire(self, group: RolloutGroup, state: GroupState, reason: str, now: float) -> None:
        """The group ends unfinished: what runs is cancelled, what waits is dropped, what is finished is forgotten."""
        finished = group.survivor_ids
        self._tally.count_retired(group, state, reason)
        for rollout in group.rollouts:
            if rollout.status is RolloutStatus.WAITING:
                self._lanes.give_up(rollout)
            elif rollout.status is RolloutStatus.RUNNING and not rollout.ended:
                self.cancel(rollout, f"its group is {state}: {reason}", now)
        self._states.move(group, state, reason)
        if finished:
            self._say(do.ForgetRollouts(finished))
        self._slots.release(group, trained=False)
        self._lanes.leave_lane(group)
        group.close()

    def retire_stale(self, version: int, now: float) -> None:
        """At the commit of `version`: a stale group goes, whole. Finished siblings go with it: to train on the short ones alone
        would bias the baseline."""
        for group in list(self._slots.alive.values()):
            if is_stale(group, version, self._settings):
                self._retire(group, GroupState.CANCELLED, OFF_POLICY, now)
                if self.sampler is not None:
                    (self.sampler.drop if group.returned else self.sampler.give_back)(group.prompt)

    def retire_all(self, now: float) -> None:
        """The run ends before its last step: what still plays is cancelled, so that evals have its lanes, and its prompts can
        be drawn again by an attempt that goes on."""
        for group in list(self._slots.alive.values()):
            if group.playing:
                self._retire(group, GroupState.CANCELLED, RUN_ENDED, now)
                if self.sampler is not None:
                    (self.sampler.drop if group.returned else self.sampler.give_back)(group.prompt)

    def finish_batch(self, batch: GroupBatch, version: int) -> None:
        """The version trained on the batch is served: its groups' slots are free, and nobody asks for its rollouts again."""
        forgotten: list[int] = []
        for group in batch.groups:
            self._states.move(group, GroupState.TRAINED, f"step {version}")
            self._tally.count_trained(group, age=version - 1 - group.v_start)
            self._slots.release(group, trained=True)
        for group in (*batch.groups, *batch.baseline):
            forgotten.extend(group.survivor_ids)
            group.close()
        self._say(do.ForgetRollouts(tuple(forgotten)))

    def end_run(self) -> None:
        """Account for every group still alive, and for what workers hold. Nothing is cancelled one by one: EndRun ends every
        process."""
        for group in self._slots.alive.values():
            self._states.move(group, GroupState.CANCELLED, RUN_ENDED)
            self._tally.count_retired(group, GroupState.CANCELLED, RUN_ENDED)
        under_way = [rollout for rollout in self._lanes.in_flight.values() if not rollout.group.of_eval]
        self._tally.tokens_lost += sum(rollout.tokens for rollout in under_way)
        self._evals.end_all()
        self._slots.alive.clear()
