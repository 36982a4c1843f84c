"""What a step does, by kernel: the device's own times, the largest first, and how long it had nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

SHOWN = 30


def profiled(step: Callable[[], Any], *, gpu: bool, shown: int = SHOWN) -> str:
    """A table of one step's kernels (on a CPU: operators), in milliseconds."""
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as found:
        started = time.perf_counter()
        step()
        if gpu:
            torch.cuda.synchronize()
        wall = 1e3 * (time.perf_counter() - started)
    rows = [(row.key, _milliseconds(row, gpu), row.count) for row in found.key_averages() if _counts(row, gpu)]
    rows = sorted((row for row in rows if row[1]), key=lambda row: -row[1])
    busy = sum(milliseconds for _, milliseconds, _ in rows)
    lines = [f"{wall:9.2f} ms by the clock with the profiler on; {busy:.2f} ms of kernels, {len(rows)} kinds"]
    lines += [f"{ms:9.2f} ms {ms / busy:6.1%} {count:6d} times  {name[:150]}" for name, ms, count in rows[:shown]]
    return "\n".join(lines) + "\n"


def _counts(row: Any, gpu: bool) -> bool:
    """On a GPU kernels and copies, and not the operators that start them."""
    return not gpu or row.device_type == torch.profiler.DeviceType.CUDA


def _milliseconds(row: Any, gpu: bool) -> float:
    return float(row.self_device_time_total if gpu else row.self_cpu_time_total) / 1e3
