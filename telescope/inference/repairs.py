"""What vLLM needs in its worker to stay right on a CPU, and to die with its server. Each repair says what breaks without it."""

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
