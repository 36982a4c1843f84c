"""The core's events on disk, one line each, before their commands are performed.

A journal that can't be written ends the run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from telescope.config.redaction import Redactor
from telescope.runlog.files import read_lines

_TOLD = re.compile(rb'(?P<key>"(?:cause|reason|sentence)":)(?P<text>"(?:[^"\\]|\\.)*")')
TEXTS = (b'"cause":', b'"reason":', b'"sentence":')
"""Keys of what somebody else's code may have said. Nothing else in a journal is a text of that kind, and nothing else is
touched: a replay compares it."""


class JournalError(RuntimeError):
    """The journal cannot be written; going on would make the run unexplainable and impossible to resume."""


class Journal:
    """Append-only file of lines, owned by one process."""

    def __init__(self, path: Path, redactor: Redactor | None = None) -> None:
        self.path = path
        self._redactor = redactor or Redactor()
        self.broken = False
        """A line could not be written whole: whatever came after it would be lost in its remains."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except OSError as error:
            raise JournalError(_sentence(path, error)) from error

    def append(self, line: bytes) -> None:
        """Write one line (its newline is added here); safe from SIGKILL when this returns."""
        if any(key in line and line.count(key) > line.count(key + b'""') for key in TEXTS):
            line = _TOLD.sub(self._redact, line)
        view = memoryview(line + b"\n")
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            self.broken = True
            raise JournalError(_sentence(self.path, error)) from error

    def close(self) -> None:
        os.close(self._descriptor)

    def _redact(self, match: re.Match[bytes]) -> bytes:
        told = match["text"]
        text: str = json.loads(told) if b"\\" in told else told[1:-1].decode()
        clean = self._redactor.text(text)
        return match.group() if clean == text else match["key"] + json.dumps(clean, ensure_ascii=False).encode()


def journal_lines(path: Path) -> Iterator[bytes]:
    """Whole lines of a journal, without their newline. A torn last line is legal and left out. Raises FileNotFoundError and
    `DamagedFile`."""
    yield from (line[:-1] for line in read_lines(path) if line.endswith(b"\n"))


def _sentence(path: Path, error: OSError) -> str:
    return f"the journal {path} cannot be written ({error.strerror}): free disk space or mend permissions, then start again"
