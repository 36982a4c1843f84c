"""What a weight update cost whom, as metrics: the trainer's seconds, and the servers' from their orders to their answers.

Owns the names and sums. Refuses clocks: it is told when what happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from telescope.orchestrator.weight_update import UpdatePhase, WeightAnswer, WeightOrder
from telescope.wire.messages import WeightsPublished, WeightsReady, WeightsSent

SECTION = "timing_weight_sync"


@dataclass
class UpdateTimes:
    """Of one version, from the order to publish on. An answer of a later round takes the place of an earlier one's."""

    version: int
    begun: float
    _publish: dict[str, float] = field(default_factory=dict)
    """Seconds by peer, and likewise below."""
    _send: dict[str, float] = field(default_factory=dict)
    _prepare: dict[str, float] = field(default_factory=dict)
    _commit: dict[str, float] = field(default_factory=dict)
    _pause: dict[str, float] = field(default_factory=dict)
    _asked: dict[UpdatePhase, float] = field(default_factory=dict)
    _prepared_from: float | None = None

    def ask(self, order: WeightOrder, now: float) -> None:
        """An order goes out; those of a phase and round go together."""
        self._asked[order.phase] = now
        if order.phase is UpdatePhase.PREPARE and self._prepared_from is None:
            self._prepared_from = now

    def hear(self, order: WeightOrder, body: WeightAnswer, now: float) -> None:
        """The answer that an order of the phase under way was waiting for."""
        match body:
            case WeightsPublished(seconds=seconds):
                self._publish[order.peer] = seconds
            case WeightsSent(seconds=seconds):
                self._send[order.peer] = seconds
            case WeightsReady() if order.phase is UpdatePhase.PREPARE:
                self._prepare[order.peer] = now - self._asked.get(order.phase, now)
            case WeightsReady(pause_s=pause_s) if order.phase is UpdatePhase.COMMIT:
                self._commit[order.peer] = now - self._asked.get(order.phase, now)
                self._pause[order.peer] = pause_s

    def metrics(self, now: float) -> dict[str, float]:
        """The update is done. Of ranks, which work together, the slowest counts; of servers the median one too."""
        found = {f"{SECTION}/version": float(self.version), f"{SECTION}/total": now - self.begun}
        trainer = {"publish": self._publish, "send": self._send}
        found |= {f"{SECTION}/{name}": max(each.values()) for name, each in trainer.items() if each}
        found["timing_weight_sync_trainer_total"] = sum(max(each.values()) for each in trainer.values() if each)
        for name, each in (("prepare", self._prepare), ("commit", self._commit), ("pause", self._pause)):
            found |= _describe(f"{SECTION}/{name}", each)
        if self._prepared_from is not None:
            found["timing_weight_sync_inference_total"] = now - self._prepared_from
        return found


def _describe(name: str, seconds: Mapping[str, float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"{name}/median": median(seconds.values()), f"{name}/max": max(seconds.values())}
