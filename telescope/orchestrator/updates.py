"""One weight update as a small state machine: publish, prepare, commit, or abort. Decides; sends and waits for nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from telescope.records import WeightManifest


class Phase(StrEnum):
    """What is being waited for."""

    PUBLISH = "published"
    PREPARE = "prepared"
    COMMIT = "committed"
    DONE = "done"
    FAILED = "failed"


@dataclass
class WeightUpdate:
    """The trainer publishes, then every server prepares, then every server commits: each wait has the same deadline.

    `waiting` holds the peers that have not answered yet. Until the last server has prepared, a failure leaves the old
    version serving everywhere; `cause` says why.
    """

    version: int
    ranks: tuple[str, ...]
    servers: tuple[str, ...]
    timeout_s: float
    now: float
    phase: Phase = Phase.PUBLISH
    waiting: set[str] = field(default_factory=set)
    manifest: WeightManifest | None = None
    cause: str = ""

    def __post_init__(self) -> None:
        self._enter(Phase.PUBLISH, self.ranks, self.now)

    def published(self, rank: str, manifest: WeightManifest | None, now: float) -> None:
        self.manifest = manifest or self.manifest
        self._answered(rank, Phase.PUBLISH, now)

    def prepared(self, server: str, now: float) -> None:
        self._answered(server, Phase.PREPARE, now)

    def committed(self, server: str, checksum: str, now: float) -> None:
        assert self.manifest is not None
        if checksum != self.manifest.checksum:
            self.fail(f"{server} serves weights with checksum {checksum}, the trainer published {self.manifest.checksum}")
            return
        self._answered(server, Phase.COMMIT, now)

    def fail(self, cause: str) -> None:
        if self.phase is not Phase.DONE:
            self.phase, self.cause, self.waiting = Phase.FAILED, cause, set()

    def tick(self, now: float) -> None:
        """Fail the update if its phase has outlived the deadline."""
        if self.phase in (Phase.DONE, Phase.FAILED) or now <= self.deadline:
            return
        late = ", ".join(sorted(self.waiting))
        self.fail(
            f"weights of version {self.version} were not {self.phase.value} by {late} within "
            f"weight_sync.update_timeout_s={self.timeout_s:g} s"
        )

    def _answered(self, peer: str, phase: Phase, now: float) -> None:
        if self.phase is not phase:
            return
        self.waiting.discard(peer)
        if self.waiting:
            return
        if phase is Phase.PUBLISH and self.manifest is None:
            self.fail("no trainer rank named where the weights lie")
        elif phase is Phase.PUBLISH:
            self._enter(Phase.PREPARE, self.servers, now)
        elif phase is Phase.PREPARE:
            self._enter(Phase.COMMIT, self.servers, now)
        else:
            self.phase = Phase.DONE

    def _enter(self, phase: Phase, peers: tuple[str, ...], now: float) -> None:
        self.phase, self.waiting, self.deadline = phase, set(peers), now + self.timeout_s
