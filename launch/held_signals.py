"""Keeps an end by signal waiting while something is set up that must not be left half done.

The first signal is noted, for whoever holds it to act on when its step is whole; the second one acts as if it were not held.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from telescope._launch.shim import ENDING_SIGNALS

NOTE = b"Interrupted: what is under way is taken back, or named where it can't be. Once more leaves at once.\n"


class HeldSignals:
    """`number`: the signal that came, None until one has."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.before = {int(number): signal.getsignal(number) for number in ENDING_SIGNALS}

    @property
    def exit_code(self) -> int:
        """That of a process which the signal ended; 0 where none came."""
        return 0 if self.number is None else 128 + self.number

    def note(self, number: int, _: FrameType | None) -> None:
        if self.number is not None:
            signal.signal(number, self.before[number])
            signal.raise_signal(number)
            return
        self.number = number
        with contextlib.suppress(OSError):  # the terminal may be gone, and one that is stopped takes nothing
            if select.select([], [2], [], 0)[1]:
                os.write(2, NOTE)


@contextlib.contextmanager
def hold_signals() -> Iterator[HeldSignals]:
    """Within, SIGHUP, SIGINT and SIGTERM are noted; those that the process ignores stay ignored. Only the main thread can hold
    them: elsewhere nothing is held."""
    held = HeldSignals()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    caught = [number for number, handler in held.before.items() if handler not in (signal.SIG_IGN, None)]
    for number in caught:
        signal.signal(number, held.note)
    try:
        yield held
    finally:
        for number in caught:
            signal.signal(number, held.before[number])
