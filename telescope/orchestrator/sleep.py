"""Servers that sleep while the trainer trains (`inference.sleep_while_training`): asked before a step, which waits for them.

They wake by themselves with the next version. A server that is given up holds its memory until its process has ended.

Owns who has been asked and what waits for it. Refuses to know what a step is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from telescope.orchestrator.peers import ProtocolViolations
from telescope.wire.hub import Hub, NoCredit
from telescope.wire.messages import Asleep, Sleep
from telescope.wire.peer_events import Delivery

log = logging.getLogger(__name__)

END_S = 60.0
"""Beyond the time to fall asleep: for a killed server to end. A supervisor that has not said so by then never will."""


class SleepCoordinator:
    """One step at a time. A server that does not fall asleep within `timeout_s` is fenced: its end frees the memory too.
    `dying` gives the servers that were given up and whose processes have not ended yet; None: no server sleeps in this run."""

    def __init__(
        self, hub: Hub, violations: ProtocolViolations, timeout_s: float, dying: Callable[[], Collection[str]] | None
    ) -> None:
        self._hub, self._violations, self._timeout_s = hub, violations, timeout_s
        self._sleeps, self._dying = dying is not None, dying or tuple
        self._asked: dict[tuple[str, int], int] = {}
        """The step, by server and number of its order."""
        self._then: Callable[[], None] | None = None
        self._deadline = 0.0
        self._fenced: list[tuple[str, str]] = []

    @property
    def doing(self) -> str:
        """What is waited for; empty where nothing is."""
        if self._then is None:
            return ""
        if self._asked:
            return f"waiting for {', '.join(sorted(server for server, _ in self._asked))} to fall asleep"
        return f"waiting for the end of {', '.join(sorted(self._dying()))}"

    def begin(self, step: int, servers: Iterable[str], then: Callable[[], None], now: float) -> None:
        """Send the servers to sleep, where they do, and call `then` when none holds its memory."""
        self._then, self._deadline = then, now + self._timeout_s
        for server in servers if self._sleeps else ():
            try:
                number = self._hub.send(server, Sleep(step=step))
            except NoCredit:
                self._fenced.append((server, "it leaves its weight orders unanswered"))
                continue
            if number:  # else the server has gone, which will be told next
                self._asked[server, number] = step
        self._go_on()

    def hear(self, delivery: Delivery, body: Asleep) -> None:
        step = self._asked.pop((delivery.peer, delivery.answers), None)
        if step != body.step:
            self._violations.note(delivery.peer, f"its Asleep of step {body.step} answers no order to sleep; ignored")
        if step is not None:
            log.info("%s sleeps for step %d after %.3f s", delivery.peer, step, body.seconds)
        self._go_on()

    def lose(self, server: str) -> None:
        """The server is gone; its memory is when its process has ended."""
        self._asked = {key: step for key, step in self._asked.items() if key[0] != server}
        self._fenced = [(name, why) for name, why in self._fenced if name != server]
        self._go_on()

    def tick(self, now: float) -> None:
        if self._asked and now > self._deadline:
            late = f"it did not fall asleep within weight_sync.update_timeout_s={self._timeout_s:g} s"
            self._fenced.extend((server, late) for server, _ in self._asked)
            self._asked.clear()
        if self._then is not None and now > self._deadline + END_S:
            log.warning("nobody has said that %s ended: the step begins all the same", ", ".join(sorted(self._dying())))
            self._begin_step()
        self._go_on()

    def take_fenced(self) -> list[tuple[str, str]]:
        """Servers that must not run on, and why; whoever takes them calls `lose` for them."""
        fenced, self._fenced = self._fenced, []
        return fenced

    def _go_on(self) -> None:
        if self._then is not None and not (self._asked or self._fenced or self._dying()):
            self._begin_step()

    def _begin_step(self) -> None:
        assert self._then is not None
        then, self._then = self._then, None
        then()
