"""What we change in vLLM's own classes: repairs of its worker, and more orders for its EngineCore.

The worker must stay right on a CPU and die with its server; each repair says what breaks without it. The orders put staged
weights in place between two engine steps, without a pause, and let the engine sleep and wake.

The core's loop takes orders between steps, and a step that still runs on the GPU was launched before them: the copy follows it
on the same stream. So each token is sampled by the old weights or the new ones as a whole, and the scheduler knows how many
tokens of each request were ordered before. Owns these orders; refuses to know how weights are loaded:
worker_extension.py does.

Sleeping is the executor's alone here: vLLM's own order to the core would also decide when requests go on, which is for a commit
to say, once the weights are whole again.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the server that started it ends, however it ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def keep_linear_weights_plain() -> None:
    """On a CPU vLLM packs linear weights into a form that can't be written to, and a tied output layer keeps its old copy
    without a word. A plain matrix product in its place reads the weights as they are."""
    import torch
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise RuntimeError("this vLLM has no dispatch_cpu_unquantized_gemm to replace: weights could go stale after an update")
    utils.dispatch_cpu_unquantized_gemm = plain


def keep_seeds_when_prefill_is_split() -> None:
    """After a step that sampled for an unfinished prompt, vLLM winds the request's generator back by an offset that CPU
    generators lack, and the engine dies. Here such rows don't draw from their generator in the first place."""
    import numpy as np
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original = CPUModelRunner.sample_tokens

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        unfinished = np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        held = {row: batch.generators.pop(row) for row in unfinished if row in batch.generators}
        try:
            return original(self, *args, **kwargs)
        finally:
            batch.generators.update(held)

    CPUModelRunner.sample_tokens = sample_tokens


def repair() -> None:
    from vllm.platforms import current_platform

    die_with_parent()
    if current_platform.is_cpu():
        keep_linear_weights_plain()
        keep_seeds_when_prefill_is_split()


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
