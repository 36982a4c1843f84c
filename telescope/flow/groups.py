"""A group: G rollouts of one prompt, and the states it passes through. No scheduling, no counts.

While its rollouts play, a group's state is the furthest point that any of them has reached, so a group passes each state at
most once and the run directory gets one row a transition.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from telescope.maths.rounding import is_rounding
from telescope.records import PromptRef


class GroupState(StrEnum):
    PENDING = "pending"  # admitted: it has an index, a prompt and a slot; no rollout is dispatched yet
    QUEUED = "queued"  # a rollout is with a worker: v_start is fixed
    GENERATING = "generating"  # a request is placed on a server
    ENV = "env"  # tokens have come back: the environment is at work, more turns may follow
    SCORING = "scoring"  # a rollout has its reward; siblings still play
    COMPLETE = "complete"  # every rollout has its reward or was given up
    KEPT = "kept"  # worth training on; waits for a place in the forming batch
    BATCHED = "batched"  # in the forming batch or in training
    TRAINED = "trained"  # the version trained on it is committed
    DISCARDED = "discarded"  # complete, but its rewards say nothing
    CANCELLED = "cancelled"  # retired unfinished, on purpose
    FAILED = "failed"  # too few rollouts survived the infrastructure


_PLAYING = (GroupState.PENDING, GroupState.QUEUED, GroupState.GENERATING, GroupState.ENV, GroupState.SCORING)
_ENDS_OF_PLAY = (GroupState.COMPLETE, GroupState.CANCELLED, GroupState.FAILED)
_FINAL = frozenset({GroupState.TRAINED, GroupState.DISCARDED, GroupState.CANCELLED, GroupState.FAILED})
_NEXT: dict[GroupState, frozenset[GroupState]] = {
    **{s: frozenset((*_PLAYING[i + 1 :], *_ENDS_OF_PLAY)) for i, s in enumerate(_PLAYING)},
    GroupState.COMPLETE: frozenset({GroupState.KEPT, GroupState.DISCARDED}),
    # Complete groups are never cancelled for age; only the end of the run does it.
    GroupState.KEPT: frozenset({GroupState.BATCHED, GroupState.CANCELLED}),
    GroupState.BATCHED: frozenset({GroupState.TRAINED, GroupState.CANCELLED}),
    **{s: frozenset() for s in _FINAL},
}
_RANK = {state: rank for rank, state in enumerate(GroupState)}
_COMPLETE = _RANK[GroupState.COMPLETE]


def transition(old: GroupState, new: GroupState) -> GroupState:
    """The new state, if a group may pass into it from the old one. Raises ValueError otherwise."""
    if new not in _NEXT[old]:
        raise ValueError(f"a group cannot pass from {old} to {new}")
    return new


def is_further(new: GroupState, old: GroupState) -> bool:
    """Whether `new` lies behind `old` on the way of a playing group."""
    return _RANK[new] > _RANK[old]


class RolloutStatus(StrEnum):
    """Where a rollout stands."""

    WAITING = "waiting"  # for a lane
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # given up


class RolloutAttempt:
    """One of a group's G rollouts, in one attempt: the record of it that grows from the queue to the batch.

    A retry is a new record (`RolloutGroup.retry`); the old one stays with its worker until that has answered.
    """

    __slots__ = (
        "aborted", "attempt", "cancelled", "ended", "excused", "failures", "generated", "group", "requests", "reward",
        "rollout_id", "since", "status", "tokens", "turn_returns", "version", "worker",
    )  # fmt: skip

    def __init__(self, group: RolloutGroup, rollout_id: int, attempt: int = 0, failures: int = 0, excused: int = 0) -> None:
        self.group = group
        self.rollout_id = rollout_id
        self.attempt = attempt
        self.failures = failures
        """Attempts charged to `max_attempts`."""
        self.excused = excused
        """Attempts cut short by weight updates and lost servers."""
        self.status = RolloutStatus.WAITING
        self.worker, self.version, self.since = "", -1, 0.0
        self.tokens = 0
        """Sampled so far."""
        self.requests: tuple[str, ...] = ()
        """Ids of all requests for tokens that the attempt ever made."""
        self.aborted = False
        """A weight update or a lost server cut a request short: a failure now is not the rollout's."""
        self.generated = False
        """It asks for no more tokens: its lane is free, its worker's credit is not."""
        self.cancelled = False
        """Its worker owes an answer that will not count."""
        self.ended = False
        """Its worker has answered, or is lost."""
        self.reward = 0.0
        self.turn_returns: tuple[float, ...] = ()
        """By what its turns are compared with those of its group; empty: its reward is compared."""

    def start(self, worker: str, version: int, now: float) -> None:
        """It goes to the worker at `now`, while `version` is served."""
        self.status = RolloutStatus.RUNNING
        self.worker, self.version, self.since = worker, version, now


class RolloutGroup:
    """A group alive. Rollout ids are `group_id · G + sample`: they do not depend on the order of dispatch."""

    of_eval: ClassVar[bool] = False
    """Whether it is an eval's, and none of training."""

    __slots__ = (
        "dedicated", "failed", "first_rollout", "group_id", "has_lane", "in_flight", "prompt", "returned", "rollouts", "server",
        "state", "undecided", "v_start",
    )  # fmt: skip

    def __init__(
        self, group_id: int, prompt: PromptRef, returned: bool, group_size: int, first_rollout: int | None = None
    ) -> None:
        self.group_id = group_id
        self.first_rollout = group_id * group_size if first_rollout is None else first_rollout
        """Id of its first rollout; the others follow."""
        self.prompt = prompt
        self.returned = returned
        """The prompt comes from an off-policy cancel; it does not return to the pool a second time."""
        self.state = GroupState.PENDING
        self.v_start = -1
        """Version served when the first rollout was sent to a worker; -1 before."""
        self.rollouts = [RolloutAttempt(self, self.first_rollout + sample) for sample in range(group_size)]
        """Each in its present attempt."""
        self.undecided = group_size
        self.failed = 0
        self.in_flight = 0
        """Attempts of this group that workers still hold, cancelled ones included."""
        self.has_lane = False
        self.server: str | None = None
        """Server of its latest request: siblings share its prefix cache."""
        self.dedicated = False
        """An eval's, which is played on the servers held for it and on their lanes."""

    def retry(self, rollout: RolloutAttempt) -> RolloutAttempt:
        """The rollout's next attempt, in its place."""
        following = RolloutAttempt(self, rollout.rollout_id, rollout.attempt + 1, rollout.failures, rollout.excused)
        self.rollouts[rollout.rollout_id - self.first_rollout] = following
        return following

    def close(self) -> None:
        """Its rollouts are forgotten. They name their group: so nothing is left for the collector of cycles, which a simulation
        does without."""
        self.rollouts = []

    @property
    def playing(self) -> bool:
        """Still incomplete and not retired."""
        return _RANK[self.state] < _COMPLETE

    @property
    def final(self) -> bool:
        return self.state in _FINAL

    @property
    def survivors(self) -> list[RolloutAttempt]:
        done = RolloutStatus.DONE  # looked up once
        return [rollout for rollout in self.rollouts if rollout.status is done]

    @property
    def survivor_ids(self) -> tuple[int, ...]:
        return tuple([rollout.rollout_id for rollout in self.survivors])

    @property
    def rewards_are_equal(self) -> bool:
        """Whether two or more survivors got one and the same reward, but for rounding: no rollout beats another. Where turns
        are compared, whether no turn beats the same turn of another rollout. A group of one compares with nothing and is
        never called equal."""
        compared = [rollout.turn_returns or (rollout.reward,) for rollout in self.survivors]
        if len(compared) < 2:
            return False
        for turn in range(max(map(len, compared))):
            found = [numbers[turn] for numbers in compared if turn < len(numbers)]
            if not is_rounding(min(found), max(found)):
                return False
        return True
