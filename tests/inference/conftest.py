"""One real vLLM engine for the whole session: starting one costs about ten seconds. Tests that use it are marked `vllm`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.engine import Generated
from telescope.inference.vllm.engine import VllmEngine
from telescope.inference.vllm.options import ServerPlan, vllm_environment
from telescope.records import Sampling, WeightManifest
from telescope.weights.transports.shared_memory import SharedMemoryPublisher
from tests.inference.models import make_model, over_kept_cache

RUN = "inference-tests"
MAX_MODEL_LEN = 512


@dataclass
class Served:
    """The engine and what is needed to feed it. Versions only go up over the session."""

    engine: VllmEngine
    folders: dict[str, Path]
    publisher: SharedMemoryPublisher
    version: int = 0
    holds: str = "old"
    serving: int = 0
    models: dict[str, Any] = field(default_factory=dict)
    requests: int = 0

    def name(self) -> str:
        self.requests += 1
        return f"r{self.requests}"

    def model(self, which: str) -> Any:
        """The transformers model of a folder, float32, in eval mode."""
        if which not in self.models:
            from transformers import AutoModelForCausalLM

            self.models[which] = AutoModelForCausalLM.from_pretrained(self.folders[which]).float().eval()
        return self.models[which]

    def publish(self, which: str) -> WeightManifest:
        """A new version with the weights of a folder, as a trainer would publish it: tied tensors once."""
        self.version += 1
        return self.publisher.publish(self.version, self.tensors(which))

    def tensors(self, which: str) -> list[tuple[str, Any]]:
        state = self.model(which).state_dict()
        return [(name, tensor) for name, tensor in state.items() if name != "lm_head.weight"]

    async def serve(self, which: str) -> int:
        """Update the engine to the weights of a folder; the new version."""
        manifest = self.publish(which)
        await self.engine.prepare(manifest)
        state = await self.engine.commit(manifest.version)
        assert (state.version, state.prepared, state.checksum) == (manifest.version, None, manifest.checksum)
        self.holds, self.serving = which, manifest.version
        return manifest.version

    async def generate(
        self, prompt: np.ndarray, max_tokens: int = 16, seed: int = 0, temperature: float = 1.0, priority: int = 0
    ):
        return await self.engine.generate(self.name(), prompt, Sampling(temperature, max_tokens, seed), priority)

    async def assert_serves(self, which: str) -> None:
        """Sampled log-probs are those of the folder's weights."""
        prompt = np.arange(2, 12, dtype=np.int32)
        answer = await self.generate(prompt, 24, seed=1)
        assert np.abs(answer.logprobs - self.reference_logprobs(which, prompt, answer.ids)).max() < 1e-3

    def greedy(self, which: str, prompt: np.ndarray, tokens: int) -> list[int]:
        import torch

        ids = torch.as_tensor(prompt.astype(np.int64))[None]
        with torch.no_grad():
            for _ in range(tokens):
                ids = torch.cat([ids, self.model(which)(ids).logits[:, -1:].argmax(-1)], 1)
        return ids[0, len(prompt) :].tolist()

    def reference_logprobs(self, which: str, prompt: np.ndarray, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Log-probs of `ids` after `prompt` under a folder's weights by transformers, [T] float32."""
        import torch

        tokens = torch.as_tensor(np.concatenate([prompt, ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = self.model(which)(tokens).logits[0, len(prompt) - 1 : -1].float() / temperature
        return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()

    def reference_over_kept_cache(
        self, prompt: np.ndarray, answer: Generated, which: dict[int, str], temperature: float = 1.0
    ) -> np.ndarray:
        """Log-probs of an answer, [T] float32, if each token was sampled by the folder's weights of its version, and the keys
        and values of each position stayed those of the weights that first computed it: the prompt's by the first token's."""
        return over_kept_cache(self.model, prompt, answer, which, temperature)


@pytest.fixture(scope="session")
def vllm_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, seed) for seed, name in enumerate(("old", "new", "third"))}


@pytest.fixture(scope="session")
def vllm_variables() -> Iterator[None]:
    changed = vllm_environment("cpu", os.environ)
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(
    vllm_variables: None, vllm_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    inference = InferenceSettings(max_model_len=MAX_MODEL_LEN, cpu_kv_cache_mb=8, http=False)
    plan = ServerPlan(
        model=ModelSettings(name="old"),
        folder=vllm_folders["old"],
        inference=inference,
        device="cpu",
        lanes=256,
        seed=0,
        run=RUN,
    )
    engine = VllmEngine(plan, WeightSyncSettings(update_timeout_s=30.0))
    publisher = SharedMemoryPublisher(RUN, tmp_path_factory.mktemp("segments"))
    await engine.start()
    yield Served(engine, vllm_folders, publisher)
    await engine.close()
    publisher.close()
