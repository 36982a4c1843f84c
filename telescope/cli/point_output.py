"""What a point of a sweep prints goes to a file of its own: the terminal has one line a point, and while it plays the last line
of what it says.

Owns where the words go while a point plays; refuses to know what they say.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO, cast

from telescope._launch.unblocked_output import UnblockedStream
from telescope.config.redacted_output import RedactedStream


class PointStream(io.TextIOBase):
    """A text stream without a descriptor: each text goes to `file`, and its last line to `show`. Not a terminal."""

    def __init__(self, file: UnblockedStream, show: Callable[[str], None]) -> None:
        self._file, self._show = file, show

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._file.write(text)
        if last := text.rstrip().rpartition("\n")[2]:
            self._show(last)
        return len(text)


def find_log(run_dir: Path) -> Path:
    """Where the words of the point go that runs there."""
    return run_dir.with_name(f"{run_dir.name}.log")


@contextlib.contextmanager
def keep_output(path: Path, show: Callable[[str], None], say: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, `sys.stdout` and `sys.stderr` append to the file, readable by its owner alone and without secrets.
    Where it can't be opened, `say` is told so, and they stay as they are."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        say(f"{path} can't be written ({error.strerror}): what this point says is shown here.")
        yield
        return
    before, handlers = (sys.stdout, sys.stderr), tuple(logging.root.handlers)
    hidden = sys.stderr.hidden if isinstance(sys.stderr, RedactedStream) else frozenset[str]()
    with open(descriptor, "a", encoding="utf-8") as opened:
        file = UnblockedStream(opened)
        kept = RedactedStream(cast(TextIO, PointStream(file, show)), hidden)
        try:
            sys.stdout = sys.stderr = cast(TextIO, kept)
            yield
        finally:
            kept.let_go()
            file.end()
            sys.stdout, sys.stderr = before
            for handler in logging.root.handlers:
                if handler not in handlers and type(handler) is logging.StreamHandler:
                    handler.setStream(sys.stderr)  # a run logs to what was standard error as it began
