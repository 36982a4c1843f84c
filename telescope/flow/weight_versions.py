"""Where the trainer and the weights stand: which step is trained, which version is served, which is on its way."""

from __future__ import annotations

from telescope.flow.batches import GroupBatch


class WeightVersions:
    """Step s trains one batch and gives version s; it is over when the servers have committed that version.

    One update travels at a time. A server that joined too late for the last one is behind, and is brought up by another
    update to the same version: at once, or where the trainer itself has to send (`while_training` false), while it has no
    step; the next version brings up everyone in any case.
    """

    def __init__(self, *, while_training: bool = True) -> None:
        self._while_training = while_training
        self.version = 0
        """Served and committed."""
        self.ready = False
        """The trainer is there."""
        self.batch: GroupBatch | None = None
        """In training, or trained and not committed."""
        self.travelling: int | None = None
        """Version on its way to the servers."""
        self.reached: tuple[str, ...] = ()
        """Servers that were there when it set out."""
        self._trained = 0

    def restore(self, version: int) -> None:
        """The trainer will hold the version; no server has it."""
        self.version = self._trained = version

    @property
    def idle(self) -> bool:
        """Whether the trainer may get the next batch: it is busy from TrainOnBatch until the commit, or while it sends."""
        sends = self.travelling is not None and not self._while_training
        return self.ready and self.batch is None and not sends

    @property
    def step(self) -> int:
        """The step in training, or the next one."""
        return self.version + 1

    def train(self, batch: GroupBatch) -> int:
        self.batch = batch
        return self.step

    def finish_step(self, step: int) -> bool:
        """The trainer reports a step; False if it is not the one in training (a repetition)."""
        if self.batch is None or step != self.step or self._trained == step:
            return False
        self._trained = step
        return True

    def start_update(self, servers: dict[str, int]) -> int | None:
        """The version to send now, given what each server serves; None if nothing is to be sent or an update is under way."""
        if self.travelling is not None or not self.ready:
            return None
        can_send = self._while_training or self.batch is None
        behind = can_send and any(version < self.version for version in servers.values())
        if self._trained == self.version and not behind:
            return None
        self.travelling = self._trained
        self.reached = tuple(servers)
        return self._trained

    def forget_server(self, server: str) -> None:
        """The server is lost: a new one of its name has not got what travels now."""
        self.reached = tuple(name for name in self.reached if name != server)

    def finish_update(self, version: int) -> bool:
        """All servers report the version; False if it is not the one on its way."""
        if version != self.travelling:
            return False
        self.travelling = None
        return True

    def commit(self, version: int) -> GroupBatch | None:
        """Serve the version from now on. The batch it was trained on, or None if this was a repetition for late servers."""
        if version == self.version:
            return None
        batch, self.batch = self.batch, None
        self.version = version
        return batch
