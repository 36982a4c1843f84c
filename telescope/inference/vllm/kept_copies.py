"""What a worker keeps of ended requests, copied off its device, until somebody takes it, once.

Owns the copies and how much they may hold; which rows are copied, and when, is kept_logprobs.py's and kept_routing.py's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

ENDED_BYTES = 256 * 2**20
"""Most that copies of ended requests may hold, beside what those that run may bring at once; the oldest go first. Nobody asks
for a request that was called off."""
NAMES = 10_000
"""Of dropped ones that are remembered, the latest."""


class CannotKeep(Exception):
    """This vLLM, or what it was asked for, has no place to take something from; the sentence says why."""


@dataclass
class HostCopy:
    """Values of the tokens from position `first` on, once `ready`."""

    first: int
    values: torch.Tensor
    ready: Any

    def read(self) -> np.ndarray:
        if self.ready is not None:
            self.ready.synchronize()
        return self.values.numpy()


def copy_to_host(values: torch.Tensor, first: int) -> HostCopy:
    """A copy that the current stream makes, behind all that stands in it."""
    if values.device.type == "cpu":
        return HostCopy(first, values.clone(), None)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
    ready.record()
    return HostCopy(first, host, ready)


def send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, by the current stream; nobody waits for it."""
    if device.type == "cpu":
        return host
    return host.clone().pin_memory().to(device, non_blocking=True)


class EndedRequests:
    """Copies of each ended request, by vLLM's name of it. `running_bytes`: what those that run may bring at once."""

    def __init__(self, running_bytes: int = 0) -> None:
        self.most = ENDED_BYTES + running_bytes
        self._ended: OrderedDict[str, list[HostCopy]] = OrderedDict()
        self._held = 0
        self._dropped: OrderedDict[str, int] = OrderedDict()

    def keep(self, name: str, pieces: list[HostCopy]) -> None:
        self._dropped.pop(name, None)
        self._ended[name] = pieces
        self._held += _nbytes(pieces)
        while self._held > self.most and len(self._ended) > 1:
            oldest, dropped = self._ended.popitem(last=False)
            self._dropped[oldest] = _nbytes(dropped)
            self._held -= self._dropped[oldest]
        while len(self._dropped) > NAMES:
            self._dropped.popitem(last=False)

    def forget(self, name: str) -> list[HostCopy]:
        """What was kept of it."""
        pieces = self._ended.pop(name, [])
        self._held -= _nbytes(pieces)
        return pieces

    def find_dropped(self, name: str) -> int:
        """Bytes of a request that were kept, and dropped for others before somebody took them; said once."""
        return self._dropped.pop(name, 0)


def _nbytes(pieces: list[HostCopy]) -> int:
    return sum(piece.values.nbytes for piece in pieces)
