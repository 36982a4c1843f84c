"""How long a run goes on without getting anywhere: groups that fail or say nothing, in a row. Sentences, no decisions."""

from __future__ import annotations

import msgspec

from telescope.flow.settings import FlowSettings

WARNINGS = 5
"""Of a row of discards that ends the run, this many parts are announced."""


class PatienceState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows under way, for a checkpoint."""

    failed: dict[str, int]
    discarded: int


class Patience:
    """Failures are counted for each environment: one that always fails ends the run even while others work."""

    def __init__(self, settings: FlowSettings) -> None:
        self._failed = {label: 0 for label, _ in settings.environments}
        self._discarded = 0
        self._failed_limit = settings.failed_batches_limit * settings.groups_per_batch
        self._discarded_limit = settings.discarded_batches_limit * settings.groups_per_batch

    @property
    def state(self) -> PatienceState:
        return PatienceState(dict(self._failed), self._discarded)

    def restore(self, state: PatienceState) -> None:
        self._failed |= state.failed
        self._discarded = state.discarded

    def completed(self, label: str) -> None:
        self._failed[label] = 0

    def kept(self) -> None:
        self._discarded = 0

    def failed(self, label: str, cause: str) -> str:
        """Why the run must end now that one more group has failed; empty if it may go on."""
        self._failed[label] += 1
        if self._failed[label] < self._failed_limit:
            return ""
        row = f"{self._failed[label]} groups of environments.{label} failed in a row"
        return f"{row} and none was completed; the last cause: {cause}"

    def discarded(self) -> tuple[str, bool]:
        """What to say now that one more group had equal rewards (often nothing), and whether the run must end."""
        self._discarded += 1
        ends = self._discarded >= self._discarded_limit
        if not ends and self._discarded % -(-self._discarded_limit // WARNINGS):
            return "", False
        return (
            f"{self._discarded} groups in a row had equal rewards and were discarded: the task is too easy or too hard for the "
            "model (see the rewards), or its reward cannot tell answers apart"
        ), ends
