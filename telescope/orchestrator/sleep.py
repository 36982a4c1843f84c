"""Servers that sleep while the trainer trains (`inference.sleep_while_training`): asked before a step, which waits for them.

They wake by themselves with the next version.

Owns who has been asked and what waits for it. Refuses to know what a step is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from telescope.orchestrator.complaints import Complaints
from telescope.wire.happenings import Delivery
from telescope.wire.hub import Hub, NoCredit
from telescope.wire.messages import Asleep, Sleep

log = logging.getLogger(__name__)


class SleepDesk:
    """One step at a time. A server that does not fall asleep within `timeout_s` is fenced: its end frees the memory too."""

    def __init__(self, hub: Hub, complaints: Complaints, timeout_s: float) -> None:
        self._hub, self._complaints, self._timeout_s = hub, complaints, timeout_s
        self._asked: dict[tuple[str, int], int] = {}
        """The step, by server and number of its order."""
        self._then: Callable[[], None] | None = None
        self._deadline = 0.0
        self._fenced: list[tuple[str, str]] = []

    @property
    def doing(self) -> str:
        """What is waited for; empty where nothing is."""
        return f"waiting for {', '.join(sorted(server for server, _ in self._asked))} to fall asleep" if self._asked else ""

    def begin(self, step: int, servers: Iterable[str], then: Callable[[], None], now: float) -> None:
        """Send the servers to sleep and call `then` when none is awake."""
        self._then, self._deadline = then, now + self._timeout_s
        for server in servers:
            try:
                number = self._hub.send(server, Sleep(step=step))
            except NoCredit:
                self._fenced.append((server, "it leaves its weight orders unanswered"))
                continue
            if number:  # else the server has gone, which will be told next
                self._asked[server, number] = step
        self._go_on()

    def answer(self, delivery: Delivery, body: Asleep) -> None:
        step = self._asked.pop((delivery.peer, delivery.answers), None)
        if step != body.step:
            self._complaints.note(delivery.peer, f"its Asleep of step {body.step} answers no order to sleep; ignored")
        if step is not None:
            log.info("%s sleeps for step %d after %.3f s", delivery.peer, step, body.seconds)
        self._go_on()

    def lost(self, server: str) -> None:
        """The server is gone, and its memory with it."""
        self._asked = {key: step for key, step in self._asked.items() if key[0] != server}
        self._fenced = [(name, why) for name, why in self._fenced if name != server]
        self._go_on()

    def tick(self, now: float) -> None:
        if self._asked and now > self._deadline:
            late = f"it did not fall asleep within weight_sync.update_timeout_s={self._timeout_s:g} s"
            self._fenced.extend((server, late) for server, _ in self._asked)
            self._asked.clear()

    def take_fenced(self) -> list[tuple[str, str]]:
        """Servers that must not run on, and why; whoever takes them says that they are `lost`."""
        fenced, self._fenced = self._fenced, []
        return fenced

    def _go_on(self) -> None:
        if not self._asked and not self._fenced and self._then is not None:
            then, self._then = self._then, None
            then()
