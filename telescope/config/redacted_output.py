"""Standard output and error of a command of ours: no secret that the command knows of is printed, whoever prints it.

The one door through which the words of a command go, those of plug-ins that it imports included. What a process writes to its
descriptors without Python, or its children do, does not come by here: in a run the shim has them (launch/shim.py). Owns which
variables are hidden; what is hidden of them is redaction.py's.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TextIO, cast

from telescope.config.redaction import RedactedLines, Redactor


def hide_variables(names: Iterable[str]) -> None:
    """From now on the values of these variables are not printed: some setting refers to them."""
    wanted = frozenset(names)
    for stream in _find_streams():
        stream.hide(wanted)


def redact(text: str) -> str:
    """What may be written down of it, where a command or a job writes what an exception says."""
    return _current_redactor().text(text)


def _current_redactor() -> Redactor:
    stream = next(_find_streams(), None)
    return Redactor.of(os.environ) if stream is None else stream.redactor


def _print_redacted(redactor: Redactor, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For an exception that nobody catches."""
    sys.stderr.write(redactor.text("".join(traceback.format_exception(kind, error, trace))))


def _find_streams() -> Iterator[RedactedStream]:
    return (stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, RedactedStream))


_CONTROL = re.compile(r"\x1b(?!\[K)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
"""What moves a terminal's cursor, colours it or renames it, but for the erasing of our own live line."""


class RedactedStream(io.TextIOBase):
    """Stands in for a text stream. A line goes out when it is whole, on a terminal also as far as it was flushed, and there
    without what an exception's text may do to it."""

    def __init__(self, stream: TextIO, hidden: frozenset[str] = frozenset()) -> None:
        self.stream, self.hidden = stream, hidden
        self.failure: OSError | None = None
        """Why something was not printed: the disk is full, or the reader is gone."""
        self._lines = RedactedLines(Redactor.of(os.environ, hidden), self._let_go)
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        self._one_at_a_time = threading.RLock()
        self.buffer = _Buffer(self)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute
        return self.stream.encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # the same
        return self.stream.errors

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.feed(text.encode("utf-8", "surrogatepass"))
        return len(text)

    def feed(self, data: bytes) -> None:
        with self._one_at_a_time:
            self._lines.feed(data)

    @property
    def redactor(self) -> Redactor:
        return self._lines.redactor

    def hide(self, names: frozenset[str]) -> None:
        if names <= self.hidden:
            return
        with self._one_at_a_time:
            self.hidden |= names
            self._lines.redactor = Redactor.of(os.environ, self.hidden)

    def flush(self) -> None:
        if self.stream.closed:
            return  # Python flushes once more when this object goes
        if not self.closed and self.isatty():
            self.let_go()
        with self._note_failure():
            self.stream.flush()

    @contextlib.contextmanager
    def _note_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            raise

    def let_go(self) -> None:
        """What is there of a line that is not whole."""
        with self._one_at_a_time:
            self._lines.close()

    def _let_go(self, data: bytes) -> None:
        text = self._decoder.decode(data)
        with self._note_failure():
            self.stream.write(_CONTROL.sub("", text) if self.isatty() else text)


class _Buffer(io.RawIOBase):
    """For those who print bytes."""

    def __init__(self, stream: RedactedStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # any buffer
        self._stream.feed(bytes(data).decode("utf-8", "replace").encode())
        return len(data)

    def flush(self) -> None:
        self._stream.flush()


@contextlib.contextmanager
def redact_output(hidden: Iterable[str] = ()) -> Iterator[None]:
    """While the block runs, `sys.stdout` and `sys.stderr` show no value of a variable that is `hidden` or hidden later, nor
    what has the shape of a key. Within such a block it changes nothing else."""
    before = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = _redact(before[0]), _redact(before[1])
        hide_variables(hidden)
        yield
    except BaseException:
        sys.excepthook = functools.partial(_print_redacted, _current_redactor())  # printed when the streams are back
        raise
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, RedactedStream):
                with contextlib.suppress(OSError, ValueError):  # the reader is gone
                    stream.let_go()
                    stream.flush()
        sys.stdout, sys.stderr = before


def _redact(stream: TextIO) -> TextIO:
    return stream if isinstance(stream, RedactedStream) else cast(TextIO, RedactedStream(stream))
