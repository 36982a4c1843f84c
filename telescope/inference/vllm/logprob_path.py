"""By which way the log-probs of sampled tokens come: kept in the worker until a request ends, or with each token by vLLM.

The first is as fast as no log-probs at all (docs/inference.md), the second is what every vLLM can do. At the start some
requests go both ways, and only where all numbers are the same to the bit is the first one taken. Owns that choice and the
server's end of the first way; what the worker does is kept_logprobs.py's. No torch, no vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from telescope.inference.vllm.batched_take import BatchedTake, Call

KEEP, TAKE, DROP = "telescope_keep_logprobs", "telescope_take_logprobs", "telescope_drop_logprobs"

log = logging.getLogger(__name__)


class LogprobPath:
    """Used from one event loop. `asked`: whether requests ask vLLM for log-probs."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._taking = BatchedTake(call, TAKE)
        self.compared = self.apart = 0
        """Answers that came both ways, and those of them whose numbers were not the same to the bit."""
        self.asked = True
        self.kept = False

    async def begin_trial(self) -> None:
        """From now on both ways are gone, if the workers can."""
        cause = (await self._call(KEEP))[0]
        self.kept = not cause
        if cause:
            log.info("log-probs come with each token, through vLLM: %s", cause)

    async def end_trial(self) -> None:
        """Choose one, by what the requests since `begin_trial` showed. None of them may be under way."""
        if not self.kept:
            return
        if self.compared and not self.apart:
            self.asked = False
            log.info("log-probs are kept in the worker until a request ends; %d answers came both ways, alike", self.compared)
            return
        await self.give_up(f"{self.apart} of {self.compared} answers had other numbers in the worker")

    async def give_up(self, cause: str) -> None:
        """From now on log-probs are asked of vLLM."""
        self.asked, self.kept = True, False
        log.warning("log-probs come with each token, through vLLM, which costs up to half of all tokens per second: %s", cause)
        await self._call(DROP)

    async def of(self, completion: Any, internal: str, prompt_tokens: int) -> np.ndarray:
        """[tokens] float32 of an ended request's completion; NaN, or fewer, where some are missing. `internal`: vLLM's name
        of it."""
        ids = completion.token_ids
        kept = await self._take(internal, prompt_tokens, len(ids)) if self.kept and ids else np.empty(0, np.float32)
        if not self.asked:
            return kept
        told = completion.logprobs
        numbers = np.asarray([told.logprobs[i] for i in told.start_indices] if told else [], dtype=np.float32)
        if self.kept:
            self.compared += 1
            self.apart += not np.array_equal(numbers, kept)
        return numbers

    async def _take(self, internal: str, first: int, count: int) -> np.ndarray:
        return np.frombuffer(await self._taking.take(internal, (first, count), 4 * count), dtype=np.float32)
