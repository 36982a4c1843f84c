"""Which weight version sampled each token of a request. Two ways, by what the installed vLLM offers; both are exact, because
a version changes only while the engine is paused."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Container
from typing import Any, Protocol

import numpy as np


class Versions(Protocol):
    current: int

    async def begin(self, version: int, ours: Container[str]) -> None:
        """From now on tokens are of `version`. Called while the engine is paused; `ours` are the request ids that will be
        asked for (others come over HTTP)."""
        ...

    def of(self, completion: Any, internal: str, tokens: int, born: int) -> np.ndarray:
        """[tokens] int32 of a finished request; forgets it. `born` was current when it was handed to vLLM."""
        ...


class EngineLabels:
    """vLLM 0.32 on: the engine marks its outputs with a label that we set."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.current = 0

    async def begin(self, version: int, ours: Container[str]) -> None:
        await self._llm.update_weight_version(str(version))
        self.current = version

    def of(self, completion: Any, internal: str, tokens: int, born: int) -> np.ndarray:
        versions = np.full(tokens, -1, dtype=np.int32)
        for span in completion.weight_versions or ():
            versions[span.start : span.end] = int(span.version)
        if (versions < 0).any():
            raise RuntimeError(f"vLLM told the weight version of only {(versions >= 0).sum()} of {tokens} tokens")
        return versions


class CountedTokens:
    """Before: at each pause we note how many tokens each request in flight has."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.current = 0
        self._starts: dict[str, list[tuple[int, int]]] = {}  # internal id -> (first token, version), ascending

    async def begin(self, version: int, ours: Container[str]) -> None:
        await self._settle()
        for internal, state in self._llm.output_processor.request_states.items():
            if state.external_req_id in ours:
                starts = self._starts.setdefault(internal, [(0, self.current)])
                starts.append((state.detokenizer.num_output_tokens(), version))
        self.current = version

    def of(self, completion: Any, internal: str, tokens: int, born: int) -> np.ndarray:
        starts = self._starts.pop(internal, [(0, born)])
        firsts = [first for first, _ in starts]
        return np.asarray([starts[bisect_right(firsts, token) - 1][1] for token in range(tokens)], dtype=np.int32)

    async def _settle(self) -> None:
        """Let vLLM's output task count what the engine sent before it paused. That lies in a queue by the time the pause is
        answered (one socket, in order), and the task takes one turn of the loop for each chunk of it."""
        from vllm import envs

        queue = self._llm.engine_core.outputs_queue
        while not queue.empty():
            await asyncio.sleep(0)
        chunks = self._llm.vllm_config.scheduler_config.max_num_seqs // envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
        for _ in range(chunks + 2):
            await asyncio.sleep(0)
