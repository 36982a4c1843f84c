"""Rows into live segments, segments into sealed blocks: one background thread, one writer name, no row lost in silence.

`append` costs the caller one queue entry. A row is on disk when `write()` has returned (it survives SIGKILL, not power loss);
only then is its `written` callback called. A disk that takes no row does not stop a run: rows wait in memory, are called
written, and are tried again; what is more than memory should hold is counted as unlogged. So is a row that no JSON can hold;
text that is not Unicode loses only the characters at fault. Whatever else ends the thread is raised by the next `append` and by
`close`. Refuses to know what rows mean (schema.py does) and where files lie (layout.py does).
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from telescope.config.redaction import Redactor
from telescope.runlog.layout import RunDirectory
from telescope.runlog.schema import STREAMS
from telescope.runlog.sealing import seal

log = logging.getLogger(__name__)

ROWS_PER_BLOCK = 20_000
SECONDS_PER_BLOCK = 1800.0
QUEUE_ROWS = 65_536
FLUSH_S = 0.2
PACE_S = 0.01
"""From one write to the next: rows of a burst are written together. A thread that woke for each of them would take the
interpreter from the one that appends, each time."""
STALL_S = 30.0
WAITING_BYTES = 64 * 2**20
"""Of rows that a disk does not take. It may be full for a moment only, or the process out of descriptors."""

OF_NUMBERS = frozenset({"turns", "tokens", "batches", "step_metrics", "policy", "spans", "memory"})
"""Streams without a text of anybody's."""
OF_WORKERS = frozenset({"rollouts", "eval_samples"})
"""Streams whose texts a worker has seen to, but for the cause of a failure."""

Written = Callable[[], None]


class RunLogStalled(RuntimeError):
    """The disk has taken no row for `STALL_S` seconds and the queue is full."""


class RunLogFailed(RuntimeError):
    """The writer's thread has ended with an error: no row is written any more."""


@dataclass
class RowCounters:
    rows: int = 0
    dropped: int = 0
    unlogged: int = 0
    waiting: int = 0
    """In memory, as the disk does not take them."""
    sealed_blocks: int = 0


@dataclass
class _LiveSegment:
    number: int
    descriptor: int
    opened: float
    rows: int = 0
    torn: bool = False


@dataclass
class _Entry:
    stream: str
    row: dict[str, Any]
    written: Written | None


@dataclass
class RunLog:
    """Writes the streams of one writer, e.g. `orchestrator`."""

    run: RunDirectory
    writer: str
    rows_per_block: int = ROWS_PER_BLOCK
    seconds_per_block: float = SECONDS_PER_BLOCK
    seals_at_end: bool = True
    """False: what is unsealed when it is closed stays as it is; readers read it as well, and a process of a short run need not
    load the library that seals."""
    redactor: Redactor = field(default_factory=Redactor)
    """Of what no row may hold."""
    counters: RowCounters = field(default_factory=RowCounters)

    def __post_init__(self) -> None:
        self._queue: queue.Queue[_Entry | None] = queue.Queue(maxsize=QUEUE_ROWS)
        self._segments: dict[str, _LiveSegment] = {}
        self._numbers: dict[str, int] = {}
        self._seq = 0
        self._waiting: dict[str, list[bytes]] = {}
        self._waiting_bytes = 0
        self._refused: set[str] = set()
        """Streams whose rows the disk did not take the last time."""
        self.trouble = ""
        """Why the latest row that waits is not on disk; empty where none waits."""
        self._alerted_of_encoding = False
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"runlog-{self.writer}", daemon=True)
        self._thread.start()

    @property
    def last_row(self) -> int:
        """`seq` of the row appended last."""
        return self._seq

    def append(self, stream: str, row: Mapping[str, Any], written: Written | None = None) -> None:
        """Queue a row. `written` is called from the writer's thread once the row is safe (or counted as unlogged).

        Raises `KeyError` for a column that the stream lacks, `RunLogStalled`, and `RunLogFailed` where the thread has ended.
        """
        self._check()
        definition = STREAMS[stream]
        unknown = row.keys() - definition.columns.keys()
        if unknown:
            raise KeyError(f"stream {stream} has no column {sorted(unknown)}; add it to telescope/runlog/schema.py")
        self._seq += 1
        full = {"seq": self._seq, "time_ns": time.time_ns(), "mono_ns": time.monotonic_ns(), **row}
        entry = _Entry(stream, full, written)
        try:
            self._queue.put(entry, block=not definition.droppable, timeout=STALL_S)
        except queue.Full:
            self._check()
            if not definition.droppable:
                raise self._stalled() from None
            self.counters.dropped += 1

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is queued, seal every segment, end the thread. Raises `RunLogStalled`, and `RunLogFailed` where rows
        are missing because the thread has ended before."""
        self._check()
        self._closing.set()
        try:
            self._queue.put(None, timeout=STALL_S)
        except queue.Full:
            self._check()
            raise self._stalled() from None
        self._thread.join(timeout_s)
        self._check()
        if self._thread.is_alive():
            log.warning("the run log was still sealing after %.0f s; its live segments stay readable", timeout_s)

    def _check(self) -> None:
        if self._failure is not None:
            raise RunLogFailed(
                f"the rows of {self.run.path} are no longer written, because the run log's thread ended with "
                f"{type(self._failure).__name__}: {self._failure}; its traceback stands in the log of {self.writer}"
            ) from self._failure

    def _stalled(self) -> RunLogStalled:
        return RunLogStalled(
            f"the disk under {self.run.path} has taken no row for {STALL_S:.0f} s: see whether it hangs, then start again"
        )

    # ---- the writer's thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._write_until_closed()
        except Exception as error:  # a thread's edge: nobody above would see it
            log.exception("the run log's thread ends: no row is written any more")
            self._failure = error

    def _write_until_closed(self) -> None:
        open_for_rows = True
        while open_for_rows:
            batch, open_for_rows = self._drain()
            self._write(batch)
            for stream in [name for name, segment in self._segments.items() if self._is_due(segment)]:
                self._seal(stream)
            if batch and open_for_rows:
                self._closing.wait(PACE_S)
        self._write([])
        self.counters.unlogged += self.counters.waiting  # nobody tries them again
        self.counters.waiting = 0
        if self.seals_at_end:
            for stream in list(self._segments):
                self._seal(stream)

    def _drain(self) -> tuple[list[_Entry], bool]:
        """What has queued up since the last write, waiting up to FLUSH_S for the first row."""
        batch: list[_Entry] = []
        try:
            entry = self._queue.get(timeout=FLUSH_S)
            while entry is not None:
                batch.append(entry)
                entry = self._queue.get_nowait()
        except queue.Empty:
            return batch, True
        return batch, False

    def _write(self, batch: list[_Entry]) -> None:
        by_stream: dict[str, list[_Entry]] = {}
        for entry in batch:
            by_stream.setdefault(entry.stream, []).append(entry)
        for stream in (*by_stream, *(name for name in self._waiting if name not in by_stream)):
            lines = [line for entry in by_stream.get(stream, ()) if (line := self._encode(entry)) is not None]
            if lines := self._waiting.pop(stream, []) + lines:
                self._keep(stream, self._write_lines(stream, lines))
        self.counters.waiting = sum(map(len, self._waiting.values()))
        self._waiting_bytes = sum(len(line) for lines in self._waiting.values() for line in lines)
        if not self._waiting:
            self.trouble = ""
        for entry in batch:
            if entry.written is not None:
                entry.written()

    def _encode(self, entry: _Entry) -> bytes | None:
        """The row's line; None, and counted, where no JSON can hold it."""
        try:
            line = _line(entry.row)
            return line if is_clean(entry.stream, entry.row) else self.redactor.json_line(line)
        except (TypeError, ValueError, RecursionError) as error:
            self.counters.unlogged += 1
            level = logging.DEBUG if self._alerted_of_encoding else logging.ERROR
            log.log(level, "a row of %s cannot be written as JSON (%s): it is counted as unlogged", entry.stream, error)
            self._alerted_of_encoding = True
            return None

    def _keep(self, stream: str, lines: list[bytes]) -> None:
        """What the disk has not taken, as far as memory should hold it."""
        kept = []
        for line in lines:
            if self._waiting_bytes + len(line) > WAITING_BYTES:
                break
            self._waiting_bytes += len(line)
            kept.append(line)
        self.counters.unlogged += len(lines) - len(kept)
        if kept:
            self._waiting[stream] = kept

    def _write_lines(self, stream: str, lines: list[bytes]) -> list[bytes]:
        """Gives the lines that are not on disk whole."""
        data, done = b"".join(lines), 0
        try:
            segment = self._segments.get(stream) or self._open(stream)
            if segment.torn:
                os.write(segment.descriptor, b"\n")
                segment.torn = False
            try:
                while done < len(data):
                    done += os.write(segment.descriptor, data[done:] if done else data)
            finally:
                whole = data.count(b"\n", 0, done)
                segment.torn = done > 0 and data[done - 1] != ord("\n")
                segment.rows += whole
                self.counters.rows += whole
        except OSError as error:
            self.trouble = f"rows of {stream} cannot be written ({error})"
            if stream not in self._refused:
                log.error("%s: training goes on, and they are tried again", self.trouble)
                self._refused.add(stream)
            return lines[data.count(b"\n", 0, done) :]
        if stream in self._refused:
            self._refused.remove(stream)
            log.warning("rows of %s are written again", stream)
        return []

    def _open(self, stream: str) -> _LiveSegment:
        number = self._numbers.get(stream, 0)
        path = self.run.live(self.writer, stream, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._segments[stream] = _LiveSegment(number, descriptor, time.monotonic())
        return self._segments[stream]

    def _is_due(self, segment: _LiveSegment) -> bool:
        old = time.monotonic() - segment.opened > self.seconds_per_block and segment.rows > 0
        return old or segment.rows >= self.rows_per_block

    def _seal(self, stream: str) -> None:
        """Turn the stream's segment into a block. A block that can't be written leaves its segment, which stays readable."""
        segment = self._segments.pop(stream)
        self._numbers[stream] = segment.number + 1
        try:
            os.close(segment.descriptor)
            seal(self.run, self.writer, STREAMS[stream], segment.number)
            self.counters.sealed_blocks += 1
        except Exception as error:  # noqa: BLE001 whatever keeps a block from being made, the rows are safe as they are
            log.error("segment %d of %s stays unsealed (%s); it is still readable", segment.number, stream, error)


def is_clean(stream: str, row: Mapping[str, Any]) -> bool:
    """Whether nothing is to be looked for in a row: it is of numbers and names, says nothing, or a worker has seen to its
    texts."""
    if stream == "groups":
        return not row.get("reason")
    return stream in OF_NUMBERS or (stream in OF_WORKERS and "cause" not in row)


def _line(row: dict[str, Any]) -> bytes:
    broken = list(_not_finite(row, ""))
    if broken:
        row = {**row, "not_finite": broken}
    options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    try:
        return orjson.dumps(row, option=options)
    except TypeError:
        return orjson.dumps(_mended(row), option=options)


def _not_finite(value: Any, path: str) -> Iterator[str]:
    """Where NaN and infinities lie: `reward`, `metrics.exact`; a list or an array is named as a whole."""
    if isinstance(value, float | np.floating):
        if not math.isfinite(value):
            yield path
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _not_finite(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        if any(True for inner in value for _ in _not_finite(inner, path)):
            yield path
    elif isinstance(value, np.ndarray) and value.dtype.kind == "f" and not np.isfinite(value).all():
        yield path


def _mended(value: Any) -> Any:
    """The same in what JSON has: lone surrogates become `?`, other keys, numbers beyond 64 bits and foreign objects text."""
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_mended(str(name)): _mended(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_mended(inner) for inner in value]
    if isinstance(value, bool | float | np.generic | np.ndarray) or value is None:
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    return _mended(repr(value))
