"""The server's end of the routing that its workers keep (kept_routing.py): asked for once, when a request has ended.

Owns what a server does where it is not kept: it refuses to start, since a run asked for it. No torch, no vLLM.
"""

from __future__ import annotations

import logging
import math
import time

import numpy as np

from telescope.inference.engine import EngineRefused
from telescope.inference.vllm.batched_take import BatchedTake, Call
from telescope.maths import routing

SHAPE, TAKE = "telescope_routing_shape", "telescope_take_routing"
REMEDY = "set trainer.router_replay=false: sampler and trainer then route each by itself"
SAID_EVERY_S = 10.0
"""How often at most it is said that records lack tokens."""

log = logging.getLogger(__name__)


class RoutingPath:
    """Used from one event loop."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._taking = BatchedTake(call, TAKE)
        self._place = (0, 0)
        self._dtype = np.dtype(np.uint8)
        self.answers = self.lacking = 0
        """Answers so far, and those of them with a token, but for the last one, that was not recorded in every layer."""

        self._said_s = -math.inf

    async def open(self) -> None:
        """Raises `EngineRefused` where the workers keep nothing."""
        cause, layers, experts, top_k = (await self._call(SHAPE))[0]
        if cause:
            raise EngineRefused(
                f"trainer.router_replay=true, and this server can't record which experts it uses: {cause}; {REMEDY}"
            )
        self._place, self._dtype = (layers, top_k), routing.dtype_of(experts)
        log.info("routing is kept in the worker until a request ends: %d of %d experts in %d layers", top_k, experts, layers)

    async def of(self, internal: str, tokens: int) -> np.ndarray:
        """[tokens, L, K] of an ended request's prompt and answer; nothing of the last token, which was never read. `internal`:
        vLLM's name of it."""
        read = tokens - 1
        found = await self._taking.take(internal, (read,), read * math.prod(self._place) * self._dtype.itemsize)
        known = np.frombuffer(found, dtype=self._dtype).reshape(-1, *self._place)
        mark = routing.unrecorded(self._dtype)
        lacks = len(known) != read or bool((known == mark).any())
        self.answers += 1
        self.lacking += lacks
        if lacks and (now := time.monotonic()) - self._said_s >= SAID_EVERY_S:
            self._said_s = now
            log.warning(
                "%d of %d answers have tokens whose experts were not recorded (unless the worker says that it dropped them), "
                "which the trainer will choose by itself",
                self.lacking,
                self.answers,
            )
        routed = np.full((tokens, *self._place), mark, self._dtype)
        routed[: len(known)] = known
        return routed

    def check_trial(self) -> None:
        """Raises `EngineRefused` unless every answer so far was recorded whole: a kernel that routes by itself tells nobody."""
        if self.lacking or not self.answers:
            raise EngineRefused(
                f"trainer.router_replay=true, and of {self.lacking} of this server's {self.answers} trial answers some token's "
                f"experts were not recorded (does a kernel route by itself?); {REMEDY}"
            )
