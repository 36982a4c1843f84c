"""One thread for what touches the run's files while a run is watched: a file system that hangs holds up nothing else.

Calls run one after another. Owns the waiting, with its limit; refuses to know what the calls do.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)

LIMIT_S = 5.0
"""A file system that has not answered by then hangs, and the supervisor goes on without it."""


class FileThread:
    """Its thread dies with the process, even while a call hangs."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._pending: Future[Any] | None = None
        """What was posted last."""
        self._complained = False
        threading.Thread(target=self._run_calls, name="files", daemon=True).start()

    def post(self, call: Callable[[], object]) -> None:
        """Run it when its turn comes, and don't wait."""
        self._pending = Future()
        self._pending.add_done_callback(self._complain)
        self._calls.put((self._pending, call))

    def post_if_idle(self, call: Callable[[], object]) -> None:
        """The same, unless what was posted last is still to be done: for what is done again and again."""
        if self._pending is None or self._pending.done():
            self.post(call)

    def run(self, call: Callable[[], T], limit_s: float = LIMIT_S) -> T:
        """Its result, or what it raises. Raises OSError (ETIMEDOUT) after `limit_s`: it may still happen, later."""
        done: Future[T] = Future()
        self._calls.put((done, call))
        try:
            return done.result(limit_s)
        except TimeoutError:
            if done.done():  # the call has raised it itself
                raise
            raise OSError(errno.ETIMEDOUT, f"the file system has not answered for {limit_s:g} s") from None

    def _complain(self, done: Future[Any]) -> None:
        """Nobody waits for what was posted: its first error is told here."""
        if (error := done.exception()) is not None and not self._complained:
            self._complained = True
            log.error("the run's files could not be looked at", exc_info=error)

    def _run_calls(self) -> None:
        while True:
            done, call = self._calls.get()
            try:
                done.set_result(call())
            except BaseException as error:  # noqa: BLE001 -- whoever waits for it gets it
                done.set_exception(error)
