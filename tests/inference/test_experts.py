"""A trained model with experts in the real engine: what the backend publishes under its names is what vLLM computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from telescope.config.parts import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.vllm_engine import VllmEngine
from telescope.inference.vllm_options import ServerPlan
from telescope.records import Sampling
from telescope.weights.shared_memory import SharedMemoryPublisher
from tests.backends.models import random_experts
from tests.backends.shards import make_job, make_shard
from tests.backends.watching import watch
from tests.inference.models import tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

RUN = "experts-tests"


def trained(folder: str) -> tuple[list[tuple[str, torch.Tensor]], Any]:
    """The version after one step as it is published, and the plain model with these weights."""
    from transformers import AutoModelForCausalLM

    shard = make_shard()
    shard.ids[:] = shard.ids % 90 + 2
    backend = watch(make_job(model=folder, learning_rate=0.02))
    backend.train_step(shard)
    version = [(name, tensor.clone()) for name, tensor in backend.weights()]
    weights = {name.removeprefix("lm."): p.detach().full_tensor() for name, p in backend._policy.named_parameters()}
    backend.close()
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    plain.load_state_dict(weights)
    return version, plain


@torch.no_grad()
def logprobs_of(plain: Any, prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
    tokens = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))[None]
    logp = plain(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logp.gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
async def test_an_update_of_experts_and_router_is_what_the_engine_computes_with(vllm_variables, tmp_path: Path, kind: str):
    characters = tokenizer()
    sizes = {"vocab_size": len(characters), "hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "eos_token_id": 1}
    own = {"moe_intermediate_size": 64} if kind == "qwen3_moe" else {}  # vLLM pads other sizes on a CPU, and can't reload them
    folder = random_experts(tmp_path / kind, kind, **sizes, **own)
    characters.save_pretrained(folder)
    version, plain = trained(folder)
    plan = ServerPlan(
        model=ModelSettings(name=folder),
        folder=Path(folder),
        inference=InferenceSettings(max_model_len=512, cpu_kv_cache_mb=64, http=False),
        device="cpu",
        lanes=64,
        seed=0,
        run=RUN,
    )
    engine = VllmEngine(plan, WeightSyncSettings(update_timeout_s=120.0))
    publisher = SharedMemoryPublisher(RUN, tmp_path)
    await engine.start()
    try:
        prompt = np.arange(2, 14, dtype=np.int32)
        before = await engine.generate("before", prompt, Sampling(1.0, 40, 1), 0)
        manifest = publisher.publish(1, iter(version))
        await engine.prepare(manifest)
        await engine.commit(1)
        after = await engine.generate("after", prompt, Sampling(1.0, 40, 2), 0)
    finally:
        await engine.close()
        publisher.close()
    assert len(after.ids) >= 1
    assert np.abs(after.logprobs - logprobs_of(plain, prompt, after.ids)).max() < 1e-3
    assert np.abs(before.logprobs - logprobs_of(plain, prompt, before.ids)).max() > 0.05
