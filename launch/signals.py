"""The signals that end a run, as a process hears them that supervises others: through a pipe, between two looks of its loop."""

from __future__ import annotations

import signal

from telescope._launch import child

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """While a run goes on, signals arrive through a pipe and orphans of the run come to this process."""

    def __init__(self, warning: int | None = None) -> None:
        """`warning`: a further signal, which says that the time is nearly up."""
        self._numbers = INTERRUPTS if warning is None else (*INTERRUPTS, warning)

    def __enter__(self) -> child.Wakeup:
        self._handlers = {number: signal.getsignal(number) for number in self._numbers}
        child.set_process_flag(child.PR_SET_CHILD_SUBREAPER, 1)
        return child.Wakeup(self._numbers)

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        child.set_process_flag(child.PR_SET_CHILD_SUBREAPER, 0)
