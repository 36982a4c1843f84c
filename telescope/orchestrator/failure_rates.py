"""How often rollouts end without a score, for each environment: said while it happens, and once more when a run fails.

A streak says nothing of a reward function that raises on every tenth answer, so rates are watched. Pure: writes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from telescope.records import Record

WINDOW = 100
"""Attempts of an environment between two looks."""
ALARMING = 0.05
EVIDENT = 0.1
"""Shares of attempts without a score: of a window that is told of, and of a run whose end tells of them."""
CAUSE_CHARACTERS, CAUSES = 300, 100
"""Of a cause, and how many of an environment are told apart over a run: one that names each prompt would fill the memory."""
OTHERS = "many different ones"


class SavedFailureRates(Record):
    """Of a run: rollouts that were scored by environment, attempts that were not by environment and cause."""

    scored: dict[str, int]
    failed: dict[str, dict[str, int]]


@dataclass
class FailureRates:
    """`scored`, `failed`: of the window under way and of the whole run, by environment; `failed` by cause too."""

    _window: dict[str, tuple[int, Counter[str]]] = field(default_factory=dict)
    _scored: Counter[str] = field(default_factory=Counter)
    _failed: dict[str, Counter[str]] = field(default_factory=dict)
    _told: dict[str, float] = field(default_factory=dict)
    """The rate that was last told of each environment; it is told again once it has doubled, or been low meanwhile."""

    def note_score(self, label: str) -> str:
        """A rollout of the environment was scored. A sentence where a window ends with too many that were not, else empty."""
        self._scored[label] += 1
        scored, failed = self._window.get(label, (0, Counter()))
        return self._look(label, scored + 1, failed)

    def note_failure(self, label: str, cause: str) -> str:
        """An attempt ended without a score. The same sentence."""
        cause = " ".join(cause.split())[:CAUSE_CHARACTERS]
        known = self._failed.setdefault(label, Counter())
        known[cause if cause in known or len(known) < CAUSES else OTHERS] += 1
        scored, failed = self._window.get(label, (0, Counter()))
        failed[cause] += 1
        return self._look(label, scored, failed)

    def save(self) -> SavedFailureRates:
        """What a checkpoint keeps; a window begins anew after it."""
        return SavedFailureRates(dict(self._scored), {label: dict(causes) for label, causes in self._failed.items()})

    def restore(self, saved: SavedFailureRates) -> None:
        self._scored = Counter(saved.scored)
        self._failed = {label: Counter(causes) for label, causes in saved.failed.items()}

    def measure(self, labels: Sequence[str]) -> dict[str, dict[str, float]]:
        """Of each environment its attempts that have ended, scored or not, and how many of them failed."""
        failed = {label: self._failed.get(label, Counter()).total() for label in labels}
        return {
            label: {
                "attempts": self._scored[label] + count,
                "failed": count,
                "failed_pct": 100.0 * count / max(1, self._scored[label] + count),
            }
            for label, count in failed.items()
        }

    def describe(self, reason: str) -> str:
        """What belongs to the `reason` for which a run failed: the environment with most failures and its commonest cause;
        empty where failures are few, or the reason names that cause."""
        worst = max(self._failed, key=lambda label: self._failed[label].total(), default=None)
        if worst is None:
            return ""
        failed = self._failed[worst]
        total = failed.total() + self._scored[worst]
        if failed.total() < EVIDENT * total or failed.most_common(1)[0][0] in " ".join(reason.split()):
            return ""
        return f"in all, {_describe(worst, failed, total)}"

    def _look(self, label: str, scored: int, failed: Counter[str]) -> str:
        attempts = scored + failed.total()
        if attempts < WINDOW:
            self._window[label] = (scored, failed)
            return ""
        self._window[label] = (0, Counter())
        rate = failed.total() / attempts
        if rate < ALARMING:
            self._told.pop(label, None)
            return ""
        if rate < 2 * self._told.get(label, 0.0):
            return ""
        self._told[label] = rate
        return _describe(label, failed, attempts)


def _describe(label: str, failed: Counter[str], attempts: int) -> str:
    cause, count = failed.most_common(1)[0]
    share = (
        f"{failed.total():,} of {attempts:,} rollouts of environments.{label} got no score ({failed.total() / attempts:.0%})"
    )
    return f"{share}, {count:,} of them by one cause: {cause}"


def count_failures(failed: Mapping[tuple[str, str], int], scored: Mapping[str, int], *, each: bool) -> dict[str, float]:
    """Attempts without a score since the step before, by kind, and with `each` by environment with their share of all
    attempts. `failed`: by environment and kind; `scored`: by environment."""
    kinds: Counter[str] = Counter()
    labels: Counter[str] = Counter()
    for (label, kind), count in failed.items():
        kinds[kind] += count
        labels[label] += count
    metrics = {f"rollouts/failed/{kind}": float(count) for kind, count in kinds.items()}
    if each:
        for label in sorted({*labels, *scored}):
            metrics[f"env/{label}/failed"] = float(labels[label])
            metrics[f"env/{label}/failed_pct"] = 100.0 * labels[label] / (labels[label] + scored.get(label, 0))
    return metrics
