"""What a server is doing, in one place: the heartbeat says it in a line, `GET /telescope/status` in full."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from telescope.inference.engine import WeightState


@dataclass
class Status:
    """Kept by the server's loop, read by anybody on the same event loop."""

    server: str
    running: int = 0
    answered: int = 0
    updating: str = ""
    """The weight order under way, e.g. `PrepareWeights 7`; else empty."""
    asleep: bool = False
    """The GPU's memory is given back until the next version."""
    weights: WeightState = field(default_factory=lambda: WeightState(version=0, prepared=None, checksum="", pause_s=0.0))
    progressed: float = field(default_factory=time.monotonic)
    """When something last came forward: a step, an answer, a weight order."""

    def doing(self) -> str:
        """E.g. `serving version 7: 12 requests running, 340 answered; PrepareWeights 8`."""
        line = f"serving version {self.weights.version}: {self.running} requests running, {self.answered} answered"
        line = f"asleep, {line}" if self.asleep else line
        return f"{line}; {self.updating}" if self.updating else line

    def move(self) -> str:
        """Note progress; the line for the heartbeat."""
        self.progressed = time.monotonic()
        return self.doing()

    def facts(self) -> dict[str, object]:
        """What the HTTP route answers."""
        return {
            "server": self.server,
            "doing": "updating" if self.updating else "asleep" if self.asleep else "serving",
            "order": self.updating or None,
            "version": self.weights.version,
            "prepared": self.weights.prepared,
            "checksum": self.weights.checksum,
            "last_pause_s": self.weights.pause_s,
            "running": self.running,
            "answered": self.answered,
            "idle_s": round(time.monotonic() - self.progressed, 3),
        }
