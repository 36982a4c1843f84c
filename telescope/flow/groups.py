"""A group: G samples of one prompt, and the states it passes through. No scheduling, no counts.

While its samples play, a group's state is the furthest point that any of them has reached, so a group passes each state at
most once and the run directory gets one row a transition.
"""

from __future__ import annotations

from enum import StrEnum

from telescope.records import PromptRef


class State(StrEnum):
    PENDING = "pending"  # admitted: it has an index, a prompt and a slot; no sample is dispatched yet
    QUEUED = "queued"  # a sample is with a worker: v_start is fixed
    GENERATING = "generating"  # a request is placed on a server
    ENV = "env"  # tokens have come back: the environment is at work, more turns may follow
    SCORING = "scoring"  # a sample has its reward; siblings still play
    COMPLETE = "complete"  # every sample has its reward or was given up
    KEPT = "kept"  # worth training on; waits for a place in the forming batch
    BATCHED = "batched"  # in the forming batch or in training
    TRAINED = "trained"  # the version trained on it is committed
    DISCARDED = "discarded"  # complete, but its rewards say nothing
    CANCELLED = "cancelled"  # retired unfinished, on purpose
    FAILED = "failed"  # too few samples survived the infrastructure


_PLAYING = (State.PENDING, State.QUEUED, State.GENERATING, State.ENV, State.SCORING)
_FINAL = frozenset({State.TRAINED, State.DISCARDED, State.CANCELLED, State.FAILED})
_NEXT: dict[State, frozenset[State]] = {
    **{s: frozenset((*_PLAYING[i + 1 :], State.COMPLETE, State.CANCELLED, State.FAILED)) for i, s in enumerate(_PLAYING)},
    State.COMPLETE: frozenset({State.KEPT, State.DISCARDED}),
    # Complete groups are never cancelled for age; only the end of the run does it.
    State.KEPT: frozenset({State.BATCHED, State.CANCELLED}),
    State.BATCHED: frozenset({State.TRAINED, State.CANCELLED}),
    **{s: frozenset() for s in _FINAL},
}
_RANK = {state: rank for rank, state in enumerate(State)}
_COMPLETE = _RANK[State.COMPLETE]


def transition(old: State, new: State) -> State:
    """The new state, if a group may pass into it from the old one. Raises ValueError otherwise."""
    if new not in _NEXT[old]:
        raise ValueError(f"a group cannot pass from {old} to {new}")
    return new


def is_further(new: State, old: State) -> bool:
    """Whether `new` lies behind `old` on the way of a playing group."""
    return _RANK[new] > _RANK[old]


class Fate(StrEnum):
    """Where one sample of a group stands."""

    WAITING = "waiting"  # for a lane
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # given up


class Sample:
    """One of a group's G rollouts. `attempt` names the try that counts; `failures` are those charged to `max_attempts`."""

    __slots__ = ("attempt", "excused", "failures", "fate", "reward", "rollout_id", "tokens")

    def __init__(self, rollout_id: int) -> None:
        self.rollout_id = rollout_id
        self.attempt = 0
        self.failures = 0
        self.excused = 0
        """Tries cut short by weight updates and lost servers."""
        self.fate = Fate.WAITING
        self.reward = 0.0
        self.tokens = 0


class Group:
    """A group alive. Rollout ids are `group_id · G + sample`: they do not depend on the order of dispatch."""

    __slots__ = (
        "cause", "failed", "flights", "group_id", "has_lane", "prompt", "returned", "samples", "server", "state", "undecided",
        "v_start",
    )  # fmt: skip

    def __init__(self, group_id: int, prompt: PromptRef, returned: bool, group_size: int) -> None:
        self.group_id = group_id
        self.prompt = prompt
        self.returned = returned
        """The prompt comes from an off-policy cancel; it does not return to the pool a second time."""
        self.state = State.PENDING
        self.v_start = -1
        """Version served when the first sample was sent to a worker; -1 before."""
        self.samples = [Sample(group_id * group_size + sample) for sample in range(group_size)]
        self.undecided = group_size
        self.failed = 0
        self.flights = 0
        """Orders of this group that workers still hold, cancelled ones included."""
        self.has_lane = False
        self.server: str | None = None
        """Server of its latest request: siblings share its prefix cache."""
        self.cause = ""

    @property
    def playing(self) -> bool:
        """Still incomplete and not retired."""
        return _RANK[self.state] < _COMPLETE

    @property
    def final(self) -> bool:
        return self.state in _FINAL

    @property
    def survivors(self) -> list[Sample]:
        done = Fate.DONE  # looked up once
        return [sample for sample in self.samples if sample.fate is done]

    @property
    def survivor_ids(self) -> tuple[int, ...]:
        return tuple([sample.rollout_id for sample in self.survivors])

    @property
    def rewards_are_equal(self) -> bool:
        """Whether two or more survivors got one and the same reward: no sample beats another. A group of one compares with
        nothing and is never called equal."""
        rewards = [sample.reward for sample in self.survivors]
        return len(rewards) > 1 and max(rewards) == min(rewards)
