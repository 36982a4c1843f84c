"""Seconds by phase of one step: the clock on a CPU, CUDA events on a GPU, which are read once, after the step.

A span never waits for the device: that would serialise what it measures.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Spans:
    """Sums of seconds under names like `forward`. One instance a step."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device.startswith("cuda")
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
        self._started = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Work on the device (or, on a CPU, any work)."""
        if not self._on_gpu:
            with self.host_span(name):
                yield
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        yield
        end.record()
        self._events[name].append((start, end))

    @contextmanager
    def host_span(self, name: str) -> Iterator[None]:
        """Work on the host alone."""
        start = time.perf_counter()
        yield
        self._seconds[name].append(time.perf_counter() - start)

    def timings(self) -> dict[str, float]:
        """`timing_<name>_total`, `timing_<name>_microbatch_mean` of repeated spans, and `timing_step_active`.

        To be called when the device has caught up: right after a value was fetched from it.
        """
        if self._events:
            torch.cuda.synchronize()
        active = time.perf_counter() - self._started
        for name, pairs in self._events.items():
            self._seconds[name] = [start.elapsed_time(end) / 1e3 for start, end in pairs]
        timings = {"timing_step_active": active}
        for name, parts in self._seconds.items():
            timings[f"timing_{name}_total"] = sum(parts)
            if len(parts) > 1:
                timings[f"timing_{name}_microbatch_mean"] = sum(parts) / len(parts)
        return timings
