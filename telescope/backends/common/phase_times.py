"""Phases of one step: the clock on a CPU, CUDA events on a GPU, which are read once, after the step.

A span never waits for the device: that would serialise what it measures.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from telescope.backends.base import Span


@dataclass(frozen=True)
class _Measured:
    """Seconds since the start of the step."""

    name: str
    minibatch: int | None
    row: int | None
    start: float
    seconds: float


@dataclass(frozen=True)
class _OnDevice:
    name: str
    minibatch: int | None
    row: int | None
    start: torch.cuda.Event
    end: torch.cuda.Event


class PhaseTimer:
    """Under names like `forward`. One instance a step."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device.startswith("cuda")
        self._measured: list[_Measured] = []
        self._on_device: list[_OnDevice] = []
        self._place: tuple[int | None, int | None] = (None, None)
        self._first = self._event() if self._on_gpu else None
        self._began_ns, self._started = time.time_ns(), time.perf_counter()

    def at(self, minibatch: int | None = None, row: int | None = None) -> None:
        """What the following spans belong to, counted from 0."""
        self._place = minibatch, row

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Work on the device (or, on a CPU, any work)."""
        if not self._on_gpu:
            with self.host_span(name):
                yield
            return
        start = self._event()
        yield
        self._on_device.append(_OnDevice(name, *self._place, start, self._event()))

    @contextmanager
    def host_span(self, name: str) -> Iterator[None]:
        """Work on the host alone."""
        start = time.perf_counter()
        yield
        self._measured.append(_Measured(name, *self._place, start - self._started, time.perf_counter() - start))

    def finish(self) -> tuple[dict[str, float], tuple[Span, ...]]:
        """`timing_<name>_total`, `timing_<name>_microbatch_mean` of repeated spans and `timing_step_active`; and every span.

        To be called when the device has caught up: right after a value was fetched from it.
        """
        if self._on_device:
            torch.cuda.synchronize()
        active = time.perf_counter() - self._started
        found = [*self._measured, *map(self._read, self._on_device)]
        seconds: dict[str, list[float]] = defaultdict(list)
        for one in found:
            seconds[one.name].append(one.seconds)
        timings = {"timing_step_active": active}
        for name, parts in seconds.items():
            timings[f"timing_{name}_total"] = sum(parts)
            if len(parts) > 1:
                timings[f"timing_{name}_microbatch_mean"] = sum(parts) / len(parts)
        spans = [Span(one.name, self._began_ns + int(1e9 * one.start), one.seconds, one.minibatch, one.row) for one in found]
        return timings, tuple(sorted(spans, key=lambda span: span.started_ns))

    def _read(self, span: _OnDevice) -> _Measured:
        """By the device's clock, whose zero is when it came to the step's first event."""
        assert self._first is not None
        start, seconds = self._first.elapsed_time(span.start) / 1e3, span.start.elapsed_time(span.end) / 1e3
        return _Measured(span.name, span.minibatch, span.row, start, seconds)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
