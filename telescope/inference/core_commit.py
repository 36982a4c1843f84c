"""More orders for vLLM's EngineCore: put staged weights in place between two engine steps, without a pause; sleep, and wake.

The core's loop takes orders between steps, and a step that still runs on the GPU was launched before them: the copy follows it
on the same stream. So each token is sampled by the old weights or the new ones as a whole, and the scheduler knows how many
tokens of each request were ordered before. Owns these orders; refuses to know how weights are loaded (extension.py does).

Sleeping is the executor's alone here: vLLM's own order to the core would also decide when requests go on, which is for a commit
to say, once the weights are whole again.
"""

from __future__ import annotations

from typing import Any

COMMIT, SLEEP, WAKE = "telescope_commit", "telescope_sleep", "telescope_wake"


def teach_core() -> None:
    """Give EngineCore them. Call before vLLM starts its process (which inherits it), and wherever a worker is imported."""
    from vllm.v1.engine.core import EngineCore

    for name, order in ((COMMIT, commit_between_steps), (SLEEP, sleep), (WAKE, wake)):
        if not hasattr(EngineCore, name):
            setattr(EngineCore, name, order)


def sleep(core: Any, level: int) -> None:
    """Give GPU memory back. The scheduler must be paused with nothing to do. Level 1: weights go to host memory; 2: they go."""
    core.model_executor.sleep(level)


def wake(core: Any) -> None:
    """Have the memory again; an engine that is awake is left alone. The scheduler stays paused."""
    if core.model_executor.is_sleeping:
        core.model_executor.wake_up(None)


def commit_between_steps(core: Any, version: int, timeout_s: float) -> dict[str, int]:
    """Load a version that all workers have staged. The answer: for each request in the engine (by vLLM's id) how many of its
    tokens the weights before have sampled, those of a step still on its way included."""
    held = core.scheduler.requests
    sampled = {name: int(request.num_output_tokens + request.num_output_placeholders) for name, request in held.items()}
    wake(core)
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
