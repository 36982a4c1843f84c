"""Room on a GPU that a trainer uses by turns: an engine that is started in the middle of a step waits for its end.

Asks the driver (NVML), never CUDA, which must not be up in a process that forks. Owns the waiting; refuses to free anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from telescope.inference.engine import EngineRefused

LOOK_S = 0.25
"""The driver tells nobody when memory is given back: it is asked again after so long."""
GIB = 2**30

log = logging.getLogger(__name__)


async def room_made(free: Callable[[], int], needed: int, limit_s: float) -> float:
    """Return once `free()` bytes are at least those `needed`; the seconds it took. Raises `EngineRefused` after `limit_s`."""
    started = time.monotonic()
    if (found := free()) < needed:
        log.info("waiting for room on the GPU: %.2f GiB are free, %.2f are needed", found / GIB, needed / GIB)
    while found < needed:
        if time.monotonic() - started >= limit_s:
            raise EngineRefused(
                f"the server's GPU has {found / GIB:.2f} GiB free after {limit_s:g} s, and inference.gpu_memory_utilization "
                f"asks for {needed / GIB:.2f}: another process holds the rest; lower it, or end that process"
            )
        await asyncio.sleep(LOOK_S)
        found = free()
    return time.monotonic() - started


def card_bytes() -> int:
    """Of one of this process's GPUs, free or not."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def free_on_cards(count: int) -> int:
    """Bytes free on the fullest of this process's first `count` GPUs."""
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import import_pynvml

    pynvml: Any = import_pynvml()
    pynvml.nvmlInit()
    try:
        cards = [current_platform.device_id_to_physical_device_id(index) for index in range(count)]
        handles = [pynvml.nvmlDeviceGetHandleByIndex(card) for card in cards]
        return min(int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles)
    finally:
        pynvml.nvmlShutdown()
