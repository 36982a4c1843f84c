"""The deadline of waits that can't be given one: a thread looks on, and breaks off what is still waited for at its end.

One thread a communicator, made at its first wait: a thread for each wait would cost more than most waits take.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """`late` is called where a wait is under way at the end of the time, or begins after it; it is to end the wait. The first
    such call is the last one from the clock's own thread."""

    def __init__(self, late: Callable[[], None], seconds: float) -> None:
        self._late = late
        self._changed = threading.Condition()  # guards all below
        self._end = time.monotonic() + seconds
        self._wakes = math.inf
        """When the thread looks next by itself."""
        self._waits = 0
        self._stopped = False
        self._thread: threading.Thread | None = None

    def limit(self, seconds: float) -> None:
        """From now on the time ends after so many seconds, for a wait that is under way, too."""
        with self._changed:
            self._end = time.monotonic() + seconds
            if self._end < self._wakes:
                self._changed.notify_all()

    @property
    def is_up(self) -> bool:
        return time.monotonic() >= self._end

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait."""
        with self._changed:
            counted = int(not self.is_up)
            self._waits += counted
            if self._thread is None and counted and not self._stopped:
                self._thread = threading.Thread(target=self._look_on, daemon=True, name="weights-clock")
                self._thread.start()
        try:
            if not counted:
                self._late()
            yield
        finally:
            with self._changed:
                self._waits -= counted

    def stop(self) -> None:
        """End the thread, which is not waited for."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _look_on(self) -> None:
        with self._changed:
            while not self._stopped:
                left = self._end - time.monotonic()
                if left <= 0 and self._waits:
                    break
                self._wakes = self._end if left > 0 else math.inf  # a wait that begins too late sees to itself
                self._changed.wait(left if left > 0 else None)
            else:
                return
        self._late()
