"""Our methods inside each vLLM worker process: take a published version of the weights, check it whole, load it.

vLLM imports this module in the worker and adds `WeightExtension` to its worker class; `collective_rpc` calls the methods by
name. Arguments and answers are strings and numbers, so that no pickle is needed. Owns what happens inside the worker; refuses
to decide when (vllm_engine.py does, while generation is paused).

Importing it is the only hook that vLLM gives before the model is loaded, so the repairs at the end run at import.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from telescope.inference.checkpoint import checkpoint_tensors, disagreements, is_tied, read_tensor
from telescope.inference.core_commit import teach_core
from telescope.records import TensorSpec, WeightManifest
from telescope.weights.shared_memory import SharedMemoryReader

PR_SET_PDEATHSIG = 1


class _Staged:
    """A version on its way into this worker: mapped and checked by a thread, so that generation goes on meanwhile."""

    def __init__(self, manifest: WeightManifest, run: str, folder: Path) -> None:
        self.manifest = manifest
        self.cause = ""
        self._tensors: list[tuple[TensorSpec, memoryview]] = []
        self._thread = threading.Thread(target=self._check, args=(run, folder), daemon=True, name=f"stage-{manifest.version}")
        self._thread.start()

    def _check(self, run: str, folder: Path) -> None:
        try:
            found = disagreements(self.manifest, checkpoint_tensors(folder), is_tied(folder))
            if found:
                self.cause = f"weights version {self.manifest.version} don't fit the model: {'; '.join(found)}"
                return
            self._tensors = list(SharedMemoryReader(run).read(self.manifest))
        except Exception as error:  # noqa: BLE001 - the edge of a thread: the cause travels to the one who asks
            self.cause = f"{error}" or type(error).__name__

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def flat(self) -> Callable[[str], Any]:
        """Each tensor as a row of elements, a view of the segment; who loads it copies."""
        import torch

        def one(name: str) -> Any:
            spec, view = named[name]
            return torch.frombuffer(view, dtype=getattr(torch, spec.dtype))

        named = {spec.name: (spec, view) for spec, view in self._tensors}
        return one

    def tensors(self) -> Iterator[tuple[str, Any]]:
        flat = self.flat()
        return ((spec.name, flat(spec.name).reshape(spec.shape)) for spec, _ in self._tensors)


class WeightExtension:
    """Added to vLLM's worker class: `self.model_runner` and `self.vllm_config` are the worker's own."""

    model_runner: Any
    vllm_config: Any
    telescope_staged: Any  # _Staged | None, once a version was staged

    def telescope_check_loaded(self) -> str:
        """A sentence if the loaded model could not take new weights in place; else empty."""
        packed = [name for name, tensor in self.model_runner.get_model().named_parameters() if tensor.numel() == 0]
        if packed:
            return f"vLLM repacked {len(packed)} weights at load ({packed[0]}, …), so that they can't be updated in place"
        return ""

    def telescope_stage(self, manifest: str, run: str) -> None:
        """Begin to map and check a version (a WeightManifest in JSON). A version staged before is forgotten."""
        folder = Path(self.vllm_config.model_config.model)
        self.telescope_staged = _Staged(msgspec.json.decode(manifest, type=WeightManifest), run, folder)

    def telescope_stage_state(self, version: int, wait_s: float) -> tuple[bool, str]:
        """(whether the check is over, why the version was refused or empty)."""
        staged = self._telescope_get(version)
        return (staged.wait(wait_s), staged.cause) if staged else (True, f"weights version {version} is not staged here")

    def telescope_load(self, version: int) -> float:
        """Load the staged version; seconds it took. Generation must be paused. Any error leaves the model unusable."""
        import torch

        staged = self._telescope_get(version)
        if staged is None or not staged.wait(0) or staged.cause:
            raise RuntimeError(f"weights version {version} is not staged and checked in this worker")
        started = time.perf_counter()
        model = self.model_runner.get_model()
        with torch.inference_mode():
            loaded = model.load_weights(staged.tensors())
        missed = {name for name, _ in model.named_parameters()} - loaded if loaded is not None else set()
        if missed:
            raise RuntimeError(f"vLLM left {len(missed)} parameters as they were: {', '.join(sorted(missed)[:3])}")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.telescope_staged = None
        return time.perf_counter() - started

    def telescope_forget(self, version: int) -> None:
        if self._telescope_get(version):
            self.telescope_staged = None

    def telescope_running(self) -> dict[str, int]:
        """Sampled tokens of each request that the worker still holds, by vLLM's internal id."""
        return {name: len(state.output_token_ids) for name, state in self.model_runner.requests.items()}

    def _telescope_get(self, version: int) -> _Staged | None:
        staged: _Staged | None = getattr(self, "telescope_staged", None)
        return staged if staged is not None and staged.manifest.version == version else None


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


repair()
