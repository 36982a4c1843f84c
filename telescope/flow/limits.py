"""What a run can't go on with: workers that disagree, a role that nobody fills for too long, and groups that fail or say
nothing too often in a row. Sentences; core.py and group_lifecycle.py decide."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from telescope.flow import events as seen
from telescope.flow.settings import FlowSettings
from telescope.records import EnvironmentCard

EVAL_SPLIT = "eval"


def name_place(label: str, trained: Collection[str]) -> str:
    """Where an environment stands in the configuration: with those that are `trained` on, or with the eval that alone plays
    it."""
    return f"{'environments' if label in trained else 'evals'}.{label}"


class Membership:
    """Compares the workers' cards with each other, and watches for roles that nobody fills."""

    def __init__(self, settings: FlowSettings) -> None:
        self._trained = [label for label, _ in settings.environments]
        self._evals = {rules.environment: rules.name for rules in reversed(settings.evals)}
        self._labels = list(dict.fromkeys([*self._trained, *self._evals]))
        self._places = {label: name_place(label, self._trained) for label in self._labels}
        """In the configuration."""
        self._split = settings.split
        self._deadline_s = settings.absence_deadline_s
        self._first: tuple[str, dict[str, EnvironmentCard]] | None = None
        self._last_seen = {"environment worker": 0.0, "inference server": 0.0, "trainer": 0.0}

    @property
    def split_sizes(self) -> dict[str, int]:
        """Prompts of each environment, by label; once a worker has joined without complaint."""
        cards = self._first[1] if self._first else {}
        return {label: cards[label].split_sizes[self._split] for label in self._trained if label in cards}

    @property
    def eval_sizes(self) -> dict[str, int]:
        """Prompts in the eval split of each environment that an eval plays."""
        cards = self._first[1] if self._first else {}
        return {label: cards[label].split_sizes[EVAL_SPLIT] for label in self._evals if label in cards}

    @property
    def digests(self) -> dict[str, str]:
        cards = self._first[1] if self._first else {}
        return {label: card.digest for label, card in cards.items()}

    def check(self, event: seen.WorkerJoined) -> str:
        """Why this worker cannot take part, in a sentence; empty if it can."""
        cards = {card.name: card for card in event.environments}
        if event.capacity < 1:
            return f"{event.worker} joined with capacity {event.capacity}: it must take at least one rollout at once"
        for label in self._labels:
            if label not in cards:
                return f"{event.worker} did not load {self._places[label]}: it reports {sorted(cards) or 'none'}"
            sizes = cards[label].split_sizes
            if label in self._trained and sizes.get(self._split, 0) < 1:
                return f"environments.{label} has no prompt in its split {self._split!r}: there is nothing to draw"
            if label in self._evals and sizes.get(EVAL_SPLIT, 0) < 1:
                return (
                    f"evals.{self._evals[label]} plays the eval split of {label}, which has no prompt: hold some out, or leave "
                    "the eval out"
                )
        if self._first is None:
            self._first = (event.worker, {label: cards[label] for label in self._labels})
            return ""
        first, known = self._first
        for label in self._labels:
            if cards[label] != known[label]:
                return (
                    f"{self._places[label]} differs between {first} (digest {known[label].digest}) and {event.worker} "
                    f"(digest {cards[label].digest}): they would train on different prompts; give both the same data and code"
                )
        return ""

    def find_absent(self, now: float, *, workers: int, servers: int, trainer: bool) -> str:
        """A sentence about a role unfilled for too long; empty if there is none."""
        present = {"environment worker": workers > 0, "inference server": servers > 0, "trainer": trainer}
        for role, there in present.items():
            if there:
                self._last_seen[role] = now
            elif now - self._last_seen[role] >= self._deadline_s:
                return f"no {role} for {self._deadline_s:g} s: see the logs of the run for why none is there"
        return ""


WARNINGS = 5
"""Of a row of discards that ends the run, this many parts are announced."""


class FailureLimitsState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows under way, for a checkpoint."""

    failed: dict[str, int]
    discarded: int


class FailureLimits:
    """Failures are counted for each environment: one that always fails ends the run even while others work."""

    def __init__(self, settings: FlowSettings) -> None:
        self._failed = {label: 0 for label, _ in settings.environments}
        self._discarded = 0
        self._failed_limit = settings.failed_batches_limit * settings.prompts_batch_size_for_trainer
        self._discarded_limit = settings.discarded_batches_limit * settings.prompts_batch_size_for_trainer

    @property
    def state(self) -> FailureLimitsState:
        return FailureLimitsState(dict(self._failed), self._discarded)

    def restore(self, state: FailureLimitsState) -> None:
        self._failed |= state.failed
        self._discarded = state.discarded

    def note_completed(self, label: str) -> None:
        self._failed[label] = 0

    def note_kept(self) -> None:
        self._discarded = 0

    def note_failed(self, label: str, cause: str) -> str:
        """Why the run must end now that one more group has failed; empty if it may go on."""
        self._failed[label] += 1
        if self._failed[label] < self._failed_limit:
            return ""
        row = f"{self._failed[label]} groups of environments.{label} failed in a row"
        return f"{row} and none was completed; the last cause: {cause}"

    def note_discarded(self) -> tuple[str, bool]:
        """What to say now that one more group had equal rewards (often nothing), and whether the run must end."""
        self._discarded += 1
        ends = self._discarded >= self._discarded_limit
        if not ends and self._discarded % -(-self._discarded_limit // WARNINGS):
            return "", False
        return (
            f"{self._discarded} groups in a row had equal rewards and were discarded: the task is too easy or too hard for the "
            "model (see the rewards), or its reward cannot tell answers apart"
        ), ends
