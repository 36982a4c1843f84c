"""How often a server is started again, and how soon. Counts and seconds; starts nothing.

A server that falls over now and then is started again for as long as the run lasts; one that cannot live ends the run.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 3600.0
"""`cluster.max_server_restarts` counts the restarts of one server within this time."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""The first restart within the window comes at once, the next after a second, then twice that each time."""


class Restarts:
    """The budget of each server of a run. `limit`: restarts of one server within an hour."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._spent: dict[str, deque[float]] = {}

    def spend(self, name: str, now: float) -> float | None:
        """Seconds until the server may be started again; None where its restarts are used up. E.g. 0.0, 1.0, 2.0, None."""
        spent = self._spent.setdefault(name, deque())
        while spent and now - spent[0] >= WINDOW_S:
            spent.popleft()
        if len(spent) >= self.limit:
            return None
        spent.append(now)
        return 0.0 if len(spent) == 1 else min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (len(spent) - 2))

    def used_up(self, name: str) -> str:
        """What to add to the reason of a run that ends for this server."""
        if not self.limit:
            return ""
        return f" It was started again {len(self._spent.get(name, ()))} times within an hour (cluster.max_server_restarts)."
