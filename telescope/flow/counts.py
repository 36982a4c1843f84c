"""What has become of the work: counters for the progress display and the run's summary. They decide nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from telescope.flow.groups import GroupState, RolloutGroup


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A snapshot. Every rollout of an ended group is in exactly one of trained, discarded, cancelled, failed."""

    version: int
    groups_admitted: int
    groups_alive: int
    groups_by_state: dict[str, int]
    """Of all groups ever admitted, by state."""
    reasons: dict[str, int]
    """Groups retired, by `state: reason`; failures by `failed: cause`, at most `REASONS_KEPT` kinds."""
    rollouts_waiting: int
    rollouts_running: int
    """With a worker; those that are being scored included."""
    rollouts_scoring: int
    """Of those, the ones that ask for no more tokens and hold no lane."""
    lanes: int
    """Rollouts (or groups, without individual lanes) that the servers take at once."""
    requests_waiting: int
    requests_placed: int
    rollouts_generated: int
    """Scored, and counted."""
    rollouts_trained: int
    rollouts_discarded: int
    """Their group's rewards were all equal."""
    rollouts_cancelled: int
    """Their group was retired for other reasons."""
    rollouts_failed: int
    """Given up after `max_attempts`, or at the first failure of the grader."""
    failures: dict[str, int] = {}
    """Attempts that a worker reported failed, by kind."""
    rollouts_retried: int
    """Attempts made beyond the first."""
    results_ignored: int
    """Answers of attempts that did not count any more."""
    tokens_trained: int
    tokens_discarded: int
    tokens_lost: int
    """Sampled tokens of failed and cancelled attempts and groups."""
    eval_samples_left: int | None = None
    """None in a run without evals. Of the evals under way: samples without an outcome. All other counts of rollouts, groups and
    tokens are training's, but for those that wait, run or score at the moment."""
    age_mean: float
    """Mean age of the trained groups, in versions; 0 before the first."""
    age_max: int
    ages: dict[str, int]
    """Trained groups by age; the ages as text, since JSON has no other keys."""

    def as_fields(self) -> dict[str, Any]:
        """By name, without those that say nothing of this run."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


REASONS_KEPT = 100


class RunTallyState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of a tally, for a checkpoint."""

    admitted: int
    states: dict[str, int]
    reasons: dict[str, int]
    generated: int
    trained: int
    discarded: int
    cancelled: int
    failed: int
    retried: int
    ignored: int
    tokens_trained: int
    tokens_discarded: int
    tokens_lost: int
    ages: dict[int, int]
    failures: dict[str, int]


class RunTally:
    """The counters that are not derived from other state."""

    def __init__(self) -> None:
        self.admitted = 0
        self.states: dict[str, int] = {}
        self.reasons: dict[str, int] = {}
        self.generated = 0
        self.trained = 0
        self.discarded = 0
        self.cancelled = 0
        self.failed = 0
        self.retried = 0
        self.ignored = 0
        self.tokens_trained = 0
        self.tokens_discarded = 0
        self.tokens_lost = 0
        self.ages: dict[int, int] = {}
        self.failures: dict[str, int] = {}

    def save(self, playing: Sequence[RolloutGroup], tokens_under_way: int) -> RunTallyState:
        """As of a run that goes on from here: groups that play start anew, and what they have sampled is lost."""
        states = dict(self.states)
        for group in playing:
            states[group.state] -= 1
            states[GroupState.PENDING] = states.get(GroupState.PENDING, 0) + 1
        lost = tokens_under_way + sum(rollout.tokens for group in playing for rollout in group.survivors)
        fields: dict[str, Any] = {name: getattr(self, name) for name in RunTallyState.__struct_fields__}
        fields |= {"states": {str(state): number for state, number in states.items()}, "ages": dict(self.ages)}
        fields |= {"reasons": dict(self.reasons), "failures": dict(self.failures), "tokens_lost": self.tokens_lost + lost}
        return RunTallyState(**fields)

    def restore(self, state: RunTallyState) -> None:
        for name in RunTallyState.__struct_fields__:
            value = getattr(state, name)
            setattr(self, name, dict(value) if isinstance(value, dict) else value)

    def count_failure(self, kind: str) -> None:
        self.failures[kind] = self.failures.get(kind, 0) + 1

    def count_move(self, old: str | None, new: str) -> None:
        if old is not None:
            self.states[old] -= 1
        self.states[new] = self.states.get(new, 0) + 1

    def _count_reason(self, state: str, reason: str) -> None:
        key = f"{state}: {reason}"
        if key not in self.reasons and len(self.reasons) >= REASONS_KEPT:
            key = f"{state}: other"
        self.reasons[key] = self.reasons.get(key, 0) + 1

    def count_trained(self, group: RolloutGroup, age: int) -> None:
        survivors = group.survivors
        self.trained += len(survivors)
        self.failed += group.failed
        self.tokens_trained += sum(rollout.tokens for rollout in survivors)
        self.ages[age] = self.ages.get(age, 0) + 1

    def count_discarded(self, group: RolloutGroup, reason: str) -> None:
        survivors = group.survivors
        self._count_reason(GroupState.DISCARDED, reason)
        self.discarded += len(survivors)
        self.failed += group.failed
        self.tokens_discarded += sum(rollout.tokens for rollout in survivors)

    def count_retired(self, group: RolloutGroup, state: GroupState, reason: str) -> None:
        """Failed or cancelled, before its waiting rollouts are given up."""
        self._count_reason(state, reason)
        self.cancelled += len(group.rollouts) - group.failed
        self.failed += group.failed
        self.tokens_lost += sum(rollout.tokens for rollout in group.survivors)

    @property
    def age_mean(self) -> float:
        groups = sum(self.ages.values())
        return sum(age * count for age, count in self.ages.items()) / groups if groups else 0.0

    def counts(
        self,
        *,
        version: int,
        groups_alive: int,
        rollouts_waiting: int,
        rollouts_running: int,
        rollouts_scoring: int,
        lanes: int,
        requests_waiting: int,
        requests_placed: int,
        eval_samples_left: int | None,
    ) -> Counts:
        """A snapshot, completed by what the core holds at the moment."""
        return Counts(
            version=version,
            groups_admitted=self.admitted,
            groups_alive=groups_alive,
            groups_by_state={str(state): number for state, number in self.states.items()},
            reasons=dict(self.reasons),
            rollouts_waiting=rollouts_waiting,
            rollouts_running=rollouts_running,
            rollouts_scoring=rollouts_scoring,
            lanes=lanes,
            requests_waiting=requests_waiting,
            requests_placed=requests_placed,
            eval_samples_left=eval_samples_left,
            rollouts_generated=self.generated,
            rollouts_trained=self.trained,
            rollouts_discarded=self.discarded,
            rollouts_cancelled=self.cancelled,
            rollouts_failed=self.failed,
            failures=dict(sorted(self.failures.items())),
            rollouts_retried=self.retried,
            results_ignored=self.ignored,
            tokens_trained=self.tokens_trained,
            tokens_discarded=self.tokens_discarded,
            tokens_lost=self.tokens_lost,
            age_mean=self.age_mean,
            age_max=max(self.ages, default=0),
            ages={str(age): groups for age, groups in sorted(self.ages.items())},
        )
