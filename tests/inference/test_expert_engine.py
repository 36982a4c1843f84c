"""Models with experts in the real engine: what the trainer publishes under its names is what vLLM computes with."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
import torch

from tests.backends.shards import make_job, make_shard
from tests.backends.watching import watch
from tests.gpu.check_moe import CLOSE, check, make_models

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def train_one_step(folder: Path, target: Path) -> None:
    """Write to the folder `target` what the trainer publishes after a step from the model in `folder`."""
    from safetensors.torch import save_file

    shard = make_shard()
    shard.ids[:] = shard.ids % 90 + 2
    backend = watch(make_job(model=str(folder), learning_rate=0.02))
    backend.train_step(shard)
    version: dict[str, torch.Tensor] = {name: tensor.clone() for name, tensor in backend.weights()}
    backend.close()
    del backend
    gc.collect()  # the engine forks this process, and there a process group could not be freed: its threads are not there
    target.mkdir()
    for file in folder.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    save_file(version, target / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "width"), [("qwen3_moe", 48), ("mixtral", 64), ("glm4_moe", 64)]
)  # vLLM pads 48 to 64 on a CPU
def test_an_update_of_experts_and_router_is_what_the_engine_computes_with(
    vllm_variables, tmp_path: Path, kind: str, width: int
):
    (old,) = make_models(tmp_path, kind, width, seeds=1)
    train_one_step(old, tmp_path / "trained")
    facts = asyncio.run(check([old, tmp_path / "trained"], "cpu", "full", "float32", kind))
    assert len(facts) == 6
    assert CLOSE["float32"] == 1e-3
    assert not [fact for fact in facts if not fact[1]]
