"""Deadlines of tests that wait. What passes one is a `TimeoutError`, which scripts/_streams.py tells from a wrong answer."""

from __future__ import annotations

import time


def refuse_late(deadline: float, what: object = "") -> None:
    """Raises `TimeoutError` with `what` where `time.monotonic()` has reached the `deadline`, in seconds."""
    if time.monotonic() >= deadline:
        raise TimeoutError(what)
