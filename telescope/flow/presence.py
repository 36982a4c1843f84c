"""Who must be there for a run to go on, and what the workers' environments must agree in. Sentences, no decisions."""

from __future__ import annotations

from telescope.flow import events as seen
from telescope.flow.settings import FlowSettings
from telescope.records import EnvironmentCard


class Presence:
    """Compares the workers' cards with each other, and watches for roles that nobody fills."""

    def __init__(self, settings: FlowSettings) -> None:
        self._labels = [label for label, _ in settings.environments]
        self._split = settings.split
        self._deadline_s = settings.absence_deadline_s
        self._first: tuple[str, dict[str, EnvironmentCard]] | None = None
        self._last_seen = {"environment worker": 0.0, "inference server": 0.0, "trainer": 0.0}

    @property
    def split_sizes(self) -> dict[str, int]:
        """Prompts of each environment, by label; once a worker has joined without complaint."""
        cards = self._first[1] if self._first else {}
        return {label: card.split_sizes[self._split] for label, card in cards.items()}

    @property
    def digests(self) -> dict[str, str]:
        cards = self._first[1] if self._first else {}
        return {label: card.digest for label, card in cards.items()}

    def complaint(self, event: seen.WorkerJoined) -> str:
        """Why this worker cannot take part, in a sentence; empty if it can."""
        cards = {card.name: card for card in event.environments}
        if event.capacity < 1:
            return f"{event.worker} joined with capacity {event.capacity}: it must take at least one rollout at once"
        for label in self._labels:
            if label not in cards:
                return f"{event.worker} did not load environments.{label}: it reports {sorted(cards) or 'none'}"
            if cards[label].split_sizes.get(self._split, 0) < 1:
                return f"environments.{label} has no prompt in its split {self._split!r}: there is nothing to draw"
        if self._first is None:
            self._first = (event.worker, {label: cards[label] for label in self._labels})
            return ""
        first, known = self._first
        for label in self._labels:
            if cards[label] != known[label]:
                return (
                    f"environments.{label} differs between {first} (digest {known[label].digest}) and {event.worker} "
                    f"(digest {cards[label].digest}): they would train on different prompts; give both the same data and code"
                )
        return ""

    def absent(self, now: float, *, workers: int, servers: int, trainer: bool) -> str:
        """A sentence about a role unfilled for too long; empty if there is none."""
        present = {"environment worker": workers > 0, "inference server": servers > 0, "trainer": trainer}
        for role, there in present.items():
            if there:
                self._last_seen[role] = now
            elif now - self._last_seen[role] >= self._deadline_s:
                return f"no {role} for {self._deadline_s:g} s: see the logs of the run for why none is there"
        return ""
