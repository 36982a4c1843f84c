"""How many rollouts a server carries: its lanes, and how hard its KV cache is pressed, judged by what its engine reports.

With `adaptive` the lanes follow the reports as a network's congestion window does: one report of a full cache, of requests
thrown out of it or of a lasting queue takes a quarter away at once, calm gives them back a few at a time. Fewer lanes only
keep new rollouts from starting; one that has begun goes on. Refuses to know which rollout runs where.
"""

from __future__ import annotations

from enum import IntEnum

from telescope.flow.events import ServerLoad
from telescope.flow.settings import FlowSettings

SETTLE_S = 2.0
"""After a cut the lanes stay as they are for so long: what was cut off needs its time to end and to show in the reports."""
GROW_S = 1.0
GROWTH_PARTS = 16
"""Calm lanes grow by so small a part of themselves each `GROW_S`, and by one at least: from 1 to 256 in a minute, and beyond
what the cache holds by little."""


class Pressure(IntEnum):
    CALM = 0
    SOFT = 1  # above kv_soft, or a queue that lasts: no new rollouts on this server's share
    HARD = 2  # above kv_hard, or requests were thrown out: fewer lanes


class Share:
    """One server's part of all lanes. Made when it joins, so an engine's counters begin at 0 with it."""

    __slots__ = ("_next_cut", "_next_growth", "_preemptions", "_queued", "_settings", "limit", "pressure")

    def __init__(self, settings: FlowSettings) -> None:
        self._settings = settings
        self.limit = settings.lanes_per_server
        self.pressure = Pressure.CALM
        self._preemptions = 0
        self._queued = False
        self._next_cut = 0.0
        self._next_growth = 0.0

    def lanes(self, outstanding: int) -> int:
        """Lanes the server offers while it has so many requests: under pressure those in use and no more. At least one, so
        that a run whose reports have stopped still goes on."""
        if not self._settings.adaptive:
            return self.limit
        return self.limit if self.pressure is Pressure.CALM else max(1, min(self.limit, outstanding))

    def hear(self, load: ServerLoad, outstanding: int, now: float) -> None:
        """Judge a report; cut or grow the lanes where it is time to. Of a server that has nothing of ours it is late."""
        judged = self._judged(load)
        self.pressure = judged if outstanding else Pressure.CALM
        if not self._settings.adaptive:
            return
        if self.pressure is Pressure.HARD:
            if now >= self._next_cut:
                self.limit = max(1, min(self.limit, outstanding) * 3 // 4)
                self._next_cut = self._next_growth = now + SETTLE_S
        elif self.pressure is Pressure.CALM and load.waiting == 0 and now >= self._next_growth:
            self.limit = min(self._settings.lanes_per_server, self.limit + max(1, self.limit // GROWTH_PARTS))
            self._next_growth = now + GROW_S

    def idle(self) -> None:
        """The server has nothing of ours any more, so its cache is free whatever it last said."""
        self.pressure = Pressure.CALM

    def _judged(self, load: ServerLoad) -> Pressure:
        thrown_out = load.preemptions > self._preemptions
        self._preemptions = max(self._preemptions, load.preemptions)
        # a burst of new requests waits for one report; only what still waits at the next one is a queue
        lasting = self._queued and load.waiting > load.running
        self._queued = load.waiting > load.running
        if load.kv_used >= self._settings.kv_hard or thrown_out:
            return Pressure.HARD
        if lasting:
            return Pressure.HARD if self._settings.adaptive else Pressure.SOFT
        return Pressure.SOFT if load.kv_used >= self._settings.kv_soft else Pressure.CALM
