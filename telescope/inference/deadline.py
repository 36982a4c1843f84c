"""The last resort of a process whose library may hang: say why, end all children, leave. Runs in a thread of its own."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from telescope.inference.children import kill_tree
from telescope.runlog.layout import RunDirectory, write_atomically

log = logging.getLogger(__name__)

GONE = 70


class Deadline:
    """`with deadline(900, "its engine did not start within …"): …` ends the process where the block takes longer."""

    def __init__(self, directory: RunDirectory, name: str) -> None:
        self._directory = directory
        self._name = name

    @contextmanager
    def __call__(self, limit_s: float, sentence: str, code: int = GONE) -> Iterator[None]:
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
        if code:
            fail(self._directory, self._name, sentence, code)
        else:
            log.warning("%s", sentence)
        logging.shutdown()
        os._exit(code)


def fail(directory: RunDirectory, name: str, sentence: str, code: int) -> int:
    """The sentence to the failure file and, last of all, to stderr. Gives `code`."""
    try:
        write_atomically(directory.failure(name), sentence + "\n")
    except OSError as error:
        log.error("the reason of the failure can't be written: %s", error)
    print(sentence, file=sys.stderr, flush=True)  # noqa: T201 - the supervisor quotes the last line
    return code
