"""What a command does about an end by signal while something is under way that must not be left half done: the end waits, or
what has been made goes at once.

A signal that is held is noted, for whoever holds it to act on when its step is whole; the second one acts as if it were not.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from telescope._launch import terminal
from telescope._launch.shim import ENDING_SIGNALS, may_answer

NOTE = "Interrupted: what is under way is taken back, or named where it can't be. Once more leaves at once.\n"


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
        terminal.say_at_once(NOTE)


@contextlib.contextmanager
def hold_signals() -> Iterator[HeldSignals]:
    """Within, SIGINT, SIGTERM and SIGHUP are noted."""
    held = HeldSignals()
    with answered_by(held.note):
        yield held


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Within, SIGINT, SIGTERM and SIGHUP raise `Interrupted` wherever the command is, so that what it has made goes with it."""
    from telescope.wire.process import Interrupted

    def leave(number: int, _: FrameType | None) -> None:
        raise Interrupted(number)

    with answered_by(leave):
        yield


@contextlib.contextmanager
def answered_by(hear: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within, `hear` is called for SIGINT, SIGTERM and SIGHUP. Only in the main thread: no other hears any."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, hear) for number in filter(may_answer, ENDING_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
