"""The last resort of a process whose library may hang: say why, end all children, leave. Runs in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from telescope.exit_codes import COMPONENT_FAILED
from telescope.inference.children import kill_tree
from telescope.runlog.layout import RunDirectory
from telescope.wire.process import leave, say_why

log = logging.getLogger(__name__)


class Deadline:
    """`with deadline(900, "its engine did not start within …"): …` ends the process where the block takes longer.

    With `code=70` the sentence is the process's failure; with another (done, interrupted) it is a warning in the log.
    """

    def __init__(self, directory: RunDirectory, name: str) -> None:
        self._directory = directory
        self._name = name

    @contextmanager
    def __call__(self, limit_s: float, sentence: str, code: int = COMPONENT_FAILED) -> Iterator[None]:
        timer = threading.Timer(limit_s, self._end, (f"{self._name}: {sentence}={limit_s:g} s", code))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self, sentence: str, code: int) -> None:
        for child in psutil.Process().children():
            kill_tree(child.pid)
        if code == COMPONENT_FAILED:
            say_why(self._directory, self._name, sentence, code)
        else:
            log.warning("%s", sentence)
        leave(code)
