"""Standard output and error of a process that watches a run: a write to them never waits.

Ctrl-S in the terminal, a pipe that nobody reads or an ssh connection that hangs would else stop the supervisor inside a write,
and with it restarts, signals and deadlines. Each stream gets a thread that does the waiting. Owns what is left out where an
output takes nothing for long, and its count; refuses to know what the lines say.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TextIO, cast

from telescope.config.redacted_output import RedactedStream

KEPT_BYTES = 1024 * 1024
"""What waits for an output that takes nothing; more is left out."""
WRITTEN_BYTES = 4096
"""At a time: a terminal that is stopped within a longer write has it half."""
DRAIN_S = 2.0
"""At the end of a run: so long without a byte taken, and what still waits is left out."""


class UnblockedStream(io.TextIOBase):
    """Stands in for a text stream: what is written waits in memory for the thread that writes it to the descriptor."""

    def __init__(self, stream: TextIO, kept_bytes: int = KEPT_BYTES) -> None:
        """Raises OSError (`io.UnsupportedOperation`) for a stream without a descriptor."""
        self._stream = stream
        self._descriptor = os.dup(stream.fileno())
        self._kept_bytes = kept_bytes
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._taken = 0
        self._gone = False
        self._untold = 0
        """Lines left out that the reader has not been told of."""
        self.dropped = 0
        """Lines left out in all."""
        threading.Thread(target=self._write_all, name=f"output-{stream.fileno()}", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode(self.encoding, "backslashreplace")
        with self._changed:
            if self._gone or not data:
                return len(text)
            if self._waiting_bytes + len(data) > self._kept_bytes:
                self.dropped += text.count("\n")
                self._untold += text.count("\n")
            else:
                self._waiting.append(data)
                self._waiting_bytes += len(data)
                self._changed.notify_all()
        return len(text)

    def drain(self, limit_s: float = DRAIN_S) -> None:
        """Until all is written, or nothing was for `limit_s`."""
        with self._changed:
            taken, since = self._taken, time.monotonic()
            while self._waiting_bytes and not self._gone:
                left_s = since + limit_s - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)
                if self._taken != taken:
                    taken, since = self._taken, time.monotonic()

    def end(self) -> None:
        """Drain it, and let its thread and its descriptor go: what is written later is left out."""
        self.drain()
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _write_all(self) -> None:
        while (data := self._next()) is not None:
            self._write_part_by_part(data)
            with self._changed:
                told = self._untold if not self._waiting else 0
                if told:
                    note = f"… {told} lines were left out here while this output took none\n"
                    self._waiting.append(note.encode(self.encoding, "backslashreplace"))
                    self._waiting_bytes += len(self._waiting[0])
                    self._untold = 0
                self._changed.notify_all()
        os.close(self._descriptor)

    def _next(self) -> bytes | None:
        """What is to be written; None when nothing is any more."""
        with self._changed:
            while not self._waiting and not self._gone:
                self._changed.wait()
            return None if self._gone else self._waiting.popleft()

    def _write_part_by_part(self, data: bytes) -> None:
        while data:
            try:
                written = os.write(self._descriptor, data[:WRITTEN_BYTES])
            except BlockingIOError:  # somebody has made the descriptor non-blocking: this thread waits all the same
                select.select([], [self._descriptor], [])
                continue
            except OSError:  # the terminal is gone; the run is not
                written, self._gone = len(data), True
            data = data[written:]
            with self._changed:
                self._taken += written
                self._waiting_bytes -= written
                self._changed.notify_all()


@contextlib.contextmanager
def unblock_output() -> Iterator[None]:
    """While the block runs, `sys.stdout` and `sys.stderr` never make a writer wait. At its end what waits is written as far as
    the outputs take it. Within such a block it changes nothing."""
    before = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = _unblock(before[0]), _unblock(before[1])
        yield
    finally:
        drain_output()
        sys.stdout, sys.stderr = before


def drain_output() -> None:
    """Wait until what was written is out, or until the outputs have taken nothing for `DRAIN_S`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, RedactedStream):
            stream.let_go()
    for unblocked in _list_unblocked():
        unblocked.drain()


def _unblock(stream: TextIO) -> TextIO:
    if isinstance(stream, UnblockedStream):
        return stream
    if isinstance(stream, RedactedStream):
        stream.let_go()
        return cast(TextIO, RedactedStream(_unblock(stream.stream), stream.hidden))
    try:
        stream.flush()
        return UnblockedStream(stream)  # type: ignore[return-value]  # TextIOBase has all that TextIO promises
    except (OSError, ValueError):  # no descriptor, or closed: nothing to wait for
        return stream


def count_dropped_lines() -> int:
    """Lines that the outputs of this process were not shown."""
    return sum(stream.dropped for stream in _list_unblocked())


def _list_unblocked() -> list[UnblockedStream]:
    inner = (stream.stream if isinstance(stream, RedactedStream) else stream for stream in (sys.stdout, sys.stderr))
    return [stream for stream in inner if isinstance(stream, UnblockedStream)]
