"""What a trainer rank did when, and how much memory it held, as rows of the run directory.

Owns the sampling thread. Never waits for the device, and never ends a run: rows that can't be written are done without, and
the orchestrator is told how many.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from telescope.backends.base import Span
from telescope.runlog.writer import RunLog, RunLogFailed, RunLogStalled
from telescope.wire.messages import RowsLost

log = logging.getLogger(__name__)

Reading = dict[str, int]
STATM = Path("/proc/self/statm")
END_S = 5.0
"""For the sampling thread to end, once it is told to."""


class Timeline:
    """`rows`: null where neither is wanted. `sample_s`, `drain_s`: how often memory is read, and what was read is handed on."""

    def __init__(
        self,
        rows: RunLog | None,
        *,
        process: str,
        device: str,
        spans: bool = True,
        sample_s: float = 0.0,
        drain_s: float = 0.5,
        step: int = 0,
        tell: Callable[[RowsLost], object],
    ) -> None:
        """`step`: the last one that has ended. `tell` says what is lost, after steps and at the end, where there is more."""
        self._rows, self._process, self._wants_spans = rows, process, spans
        self._step = step
        self._tell, self._told = tell, RowsLost(unlogged=0, dropped=0)
        self._left_out = 0
        """Rows that the log took no more."""
        self._ending = threading.Event()
        self._read = reader(device)
        self._sample_s, self._drain_s = sample_s, drain_s
        self._thread: threading.Thread | None = None
        if rows is not None and sample_s > 0:
            self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)
            self._thread.start()

    def step(self, step: int, spans: Sequence[Span]) -> None:
        """A step is over."""
        self._step = step
        for span in spans if self._wants_spans else ():
            self._span(step, span)
        if self._rows is not None:
            self._tell_lost(self._rows, self._rows.counters.unlogged)

    def span(self, name: str, step: int, started_ns: int, seconds: float) -> None:
        """A phase outside a step: `publish`, `send`."""
        if self._wants_spans:
            self._span(step, Span(name, started_ns, seconds))

    def close(self) -> None:
        """Hand on what was sampled, and write it all."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(END_S)
        rows, self._rows = self._rows, None
        if rows is not None:
            try:
                rows.close(END_S)
            except (RunLogFailed, RunLogStalled) as error:
                log.error("the last spans and memory samples are lost: %s", error)
            self._tell_lost(rows, rows.last_row - rows.counters.rows - rows.counters.dropped)

    def _tell_lost(self, rows: RunLog, unlogged: int) -> None:
        lost = RowsLost(unlogged=unlogged + self._left_out, dropped=rows.counters.dropped)
        if lost == self._told:
            return
        self._told = lost
        try:
            self._tell(lost)
        except ConnectionError:  # the link is over, which whoever receives on it is told too
            log.debug("nobody hears that rows are lost", exc_info=True)

    def _span(self, step: int, span: Span) -> None:
        row = {"step": step, "process": self._process, "name": span.name}
        row |= {"started_ns": span.started_ns, "seconds": span.seconds}
        places = {"minibatch": span.minibatch, "row": span.row}
        self._append("spans", row | {name: place for name, place in places.items() if place is not None})

    def _append(self, stream: str, row: dict[str, object]) -> None:
        if self._rows is None:
            return
        try:
            self._rows.append(stream, row)
        except (RunLogFailed, RunLogStalled) as error:
            if not self._left_out:
                log.error("spans and memory samples are no longer written: %s", error)
            self._left_out += 1

    def _sample(self) -> None:
        """The thread: reads that wait for the next drain."""
        waiting: list[dict[str, object]] = []
        drained = time.monotonic()
        ending = False
        while not ending:
            ending = self._ending.wait(self._sample_s)
            waiting.append({"process": self._process, "step": self._step, "sampled_ns": time.time_ns(), **self._read()})
            if ending or time.monotonic() - drained >= self._drain_s:
                for row in waiting:
                    self._append("memory", row)
                waiting, drained = [], time.monotonic()


def reader(device: str) -> Callable[[], Reading]:
    """What reads this process's memory: of the host, and on a GPU what PyTorch's allocator counts, which asks no device."""
    if not device.startswith("cuda"):
        return lambda: {"rss": resident()}
    import torch

    def read() -> Reading:
        stats = torch.cuda.memory_stats(device)
        return {
            "rss": resident(),
            "allocated": stats.get("allocated_bytes.all.current", 0),
            "reserved": stats.get("reserved_bytes.all.current", 0),
            "peak_allocated": stats.get("allocated_bytes.all.peak", 0),
            "retries": stats.get("num_alloc_retries", 0),
        }

    return read


def resident() -> int:
    """Bytes of this process in host memory; 0 where the system does not say."""
    try:
        return int(STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
