"""When a checkpoint is due, and what a run that is to end still waits for. Steps and deadlines; performs nothing.

One is under way at a time. The trainer gets no batch while one is owed, so that what it holds, the version served and the
core's own state are of one step.
"""

from __future__ import annotations

from telescope.flow.commands import EndRun
from telescope.flow.settings import FlowSettings


class CheckpointSchedule:
    """`last`: step of the checkpoint that the run goes on from, 0 where it begins."""

    def __init__(self, settings: FlowSettings, last: int = 0) -> None:
        self._every = settings.checkpoint_every
        self.saves_end = settings.saves_end
        """One is made at the last step, and before a stop."""
        self._with = next((rules for rules in settings.evals if rules.name == settings.checkpoint_with), None)
        """The eval at each of whose steps one is due too."""
        self._deadline_s = settings.checkpoint_stop_timeout_s
        self.last = last
        """Step of the latest complete checkpoint."""
        self.owed = False
        """One is to be made before the trainer gets its next batch."""
        self.under_way: int | None = None
        self.leaving: EndRun | None = None
        """How the run ends, once what it waits for is there."""
        self.lost = 0
        """Step of the checkpoint that a run which has trained all ends without; 0: it ends with it, or has not ended."""
        self.give_up_at = float("inf")
        """On the core's clock: when a run that is told to stop ends, saved or not."""
        self._failure = ""

    @property
    def on(self) -> bool:
        return self._every > 0 or self.saves_end

    @property
    def waits(self) -> bool:
        """Whether a checkpoint is to be begun, or an end waits for one."""
        return self.owed or self.leaving is not None

    def note_commit(self, version: int) -> str:
        """A version is served. A sentence where the checkpoint due has to wait for the one before it."""
        if not self.on:
            return ""
        asked_by = self._find_who_asks(version)
        if asked_by or (self.leaving is not None and self.saves_end):
            self.owed = True
        if not asked_by or self.under_way is None:
            return ""
        return (
            f"the checkpoint of step {version} is due while that of step {self.under_way} is still being written: training "
            f"waits for it; raise {', and '.join(asked_by)}"
        )

    def _find_who_asks(self, version: int) -> list[str]:
        """The settings by which a checkpoint is due at the version, whether or not the run ends."""
        asked_by = ["checkpoint.every"] if self._every and version % self._every == 0 else []
        if self._every and self._with is not None and self._with.is_due(version, last=False):
            asked_by.append(f"eval.every or evals.{self._with.name}.every (checkpoint.keep_best makes one for each eval)")
        return asked_by

    def leave(self, stop: EndRun, *, version: int, training: bool, now: float) -> None:
        """The run is to end once its step is trained and saved. One that has trained all waits for its last save as long as for
        any (whoever writes it gives up in time); one that is told to stop, then or before, for `checkpoint_stop_timeout_s`."""
        if not stop.ok:
            self.give_up_at = min(self.give_up_at, now + self._deadline_s)
        if self.leaving is not None:
            return
        self.leaving = stop
        if self.saves_end and not training and version > 0 and version not in (self.last, self.under_way):
            self.owed = True

    def leave_early(self, stop: EndRun) -> None:
        """A run that has trained all and still plays its last evals is told to stop: it ends as soon as it is saved, and as one
        that was stopped."""
        self.leaving = stop

    def begin(self, step: int) -> None:
        self.owed, self.under_way, self._failure = False, step, ""

    def finish(self, step: int, failure: str = "") -> bool:
        """False if it is not the one under way (a repetition)."""
        if step != self.under_way:
            return False
        self.under_way, self._failure = None, failure
        if not failure:
            self.last = step
        return True

    def end_if_done(self, *, version: int, training: bool) -> EndRun | None:
        """The run's end, if nothing is waited for any more."""
        if self.leaving is None or training or self.owed or self.under_way is not None:
            return None
        return self._make_stop(version)

    def end_if_late(self, now: float, version: int) -> EndRun | None:
        """The run's end, if it has waited for long enough."""
        if self.leaving is None or now < self.give_up_at:
            return None
        what = "its step" if self.under_way is None else f"the checkpoint of step {self.under_way}"
        self._failure = self._failure or f"{what} was not done within {self._deadline_s:g} s"
        return self._make_stop(version)

    def _make_stop(self, version: int) -> EndRun:
        assert self.leaving is not None
        reason = self.leaving.reason
        if self.last == version > 0:
            reason = reason if self.leaving.ok else f"{reason}; the checkpoint of step {version} is complete"
            return EndRun(reason, self.leaving.ok, checkpoint=version)
        wanted = self.saves_end or bool(self._find_who_asks(version))
        self.lost = version if self.leaving.ok and wanted else 0
        failure = f"; no checkpoint of it: {self._failure}" if self._failure and wanted else ""
        return EndRun(f"{reason}{failure}", self.leaving.ok)
