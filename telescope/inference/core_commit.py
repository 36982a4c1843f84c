"""One order more for vLLM's EngineCore: put the staged weights in place between two engine steps, without a pause.

The core's loop takes orders between steps, and a step that still runs on the GPU was launched before them: the copy follows it
on the same stream. So each token is sampled by the old weights or the new ones as a whole, and the scheduler knows how many
tokens of each request were ordered before. Owns that order; refuses to know how weights are loaded (extension.py does).
"""

from __future__ import annotations

from typing import Any

COMMIT = "telescope_commit"


def teach_core() -> None:
    """Give EngineCore the order. Call before vLLM starts its process (which inherits it), and wherever a worker is imported."""
    from vllm.v1.engine.core import EngineCore

    if not hasattr(EngineCore, COMMIT):
        setattr(EngineCore, COMMIT, commit_between_steps)


def commit_between_steps(core: Any, version: int, timeout_s: float) -> dict[str, int]:
    """Load a version that all workers have staged. The answer: for each request in the engine (by vLLM's id) how many of its
    tokens the weights before have sampled, those of a step still on its way included."""
    held = core.scheduler.requests
    sampled = {name: int(request.num_output_tokens + request.num_output_placeholders) for name, request in held.items()}
    core.model_executor.collective_rpc("telescope_load", timeout=timeout_s, args=(version,))
    for request in held.values():
        if not request.num_computed_tokens:
            salt_anew(request, version)
    return sampled


def salt(version: int, own: str | None) -> str:
    """What keeps the cached prefixes of versions apart, e.g. `7:`, with the salt that the request came with."""
    return f"{version}:{own or ''}"


def salt_anew(request: Any, version: int) -> None:
    """A request that waits with nothing computed will be computed by the new weights: it must not find blocks of the old."""
    if request.cache_salt is not None:
        request.cache_salt = salt(version, request.cache_salt.partition(":")[2])
        request.block_hashes.clear()
        request.update_block_hashes()
