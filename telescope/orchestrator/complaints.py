"""The one place where a well-formed message that contradicts what was asked is noted: a log line and an alert.

The wire lets pass what is well formed and comes from a peer of the run; whether it makes sense is checked by who asked for it.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Protocol

from telescope.wire.rules import NOTED_OF_A_PEER

log = logging.getLogger(__name__)


class Alerts(Protocol):
    """The part of the recorder that is used here."""

    def alert(self, level: str, source: str, message: str) -> None: ...


class Complaints:
    def __init__(self, alerts: Alerts) -> None:
        self._alerts = alerts
        self.counts: Counter[str] = Counter()

    def note(self, peer: str, sentence: str) -> None:
        """`peer` has sent what it should not; `sentence` says what, and what was done about it."""
        self.counts[peer] += 1
        if self.counts[peer] > NOTED_OF_A_PEER:
            return
        if self.counts[peer] == NOTED_OF_A_PEER:
            sentence += " (further ones of this process are not noted)"
        log.warning("%s: %s", peer, sentence)
        self._alerts.alert("warning", peer, sentence)
