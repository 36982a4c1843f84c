"""LoRA adapters in the vLLM engine on one GPU: `python -m tests.gpu.check_lora`.

Adapters hot loaded under load: log-probs against transformers with peft in float32, versions of tokens, requests that keep
theirs, time of a load and of a commit. Exits 0 only if all hold. `--device cpu` runs the same on a CPU. No pytest module.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from telescope.config.sections import InferenceSettings, LoraSettings, ModelSettings, WeightSyncSettings
from telescope.inference.engine import Generated
from telescope.inference.vllm.lora_engine import LoraEngine
from telescope.inference.vllm.options import Device, ServerPlan, vllm_environment
from telescope.records import Sampling
from telescope.weights.transports.shared_memory import SharedMemoryPublisher
from tests.gpu.needed import need_gpus
from tests.inference.models import make_model

RUN = "gpu-lora-check"
LORA = LoraSettings(rank=16, alpha=32)
PROMPT = np.arange(20, 44, dtype=np.int32)
UPDATES = 8

Facts = list[tuple[str, bool, str]]


class Peft:
    """The model with its adapters in float32, as a trainer holds it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        from telescope.backends.common.lora import inject

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).float().eval()
        inject(self.model, LORA)

    def move(self, seed: int, size: float) -> list[tuple[str, Any]]:
        """Another adapter, by published name."""
        import torch

        from telescope.backends.common.lora import published

        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, parameter in published(self.model, "", adapters=True):
                parameter.add_(size * torch.randn(parameter.shape, generator=random))
        return [(name, parameter.detach()) for name, parameter in published(self.model, "", adapters=True)]

    def apart(self, answer: Generated) -> float:
        import torch

        tokens = torch.as_tensor(np.concatenate([PROMPT, answer.ids]).astype(np.int64))[None]
        with torch.no_grad():
            logp = self.model(tokens).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        expected = logp.gather(1, tokens[0, len(PROMPT) :, None])[:, 0].numpy()
        return float(np.abs(answer.logprobs - expected).mean())


async def check(device: Device, folder: Path) -> Facts:
    close = 0.1 if device == "gpu" else 1e-3
    settings = InferenceSettings(http=False, max_model_len=1024, gpu_memory_utilization=0.3, cpu_kv_cache_mb=64)
    plan = ServerPlan(ModelSettings(name="old", lora=LORA), folder, settings, device, 64, 0, RUN)
    engine, publisher, peft = LoraEngine(plan, WeightSyncSettings()), SharedMemoryPublisher(RUN), Peft(folder)
    facts: Facts = []
    try:
        await engine.start()
        base = await engine.generate("base", PROMPT, Sampling(1.0, 48, 1), 0)
        facts.append(("the base", (far := peft.apart(base)) < close, f"{far:.4f} nats"))
        for version in range(1, UPDATES + 1):
            load = [
                asyncio.create_task(engine.generate(f"load-{version}-{i}", PROMPT, Sampling(0.3, 200, i), 0)) for i in range(32)
            ]
            await asyncio.sleep(0.05)
            manifest = publisher.publish(version, peft.move(version, 0.05))
            started = time.perf_counter()
            await engine.prepare(manifest)
            prepared = time.perf_counter() - started
            await engine.commit(version)
            committed = time.perf_counter() - started - prepared
            answer = await engine.generate(f"new-{version}", PROMPT, Sampling(1.0, 48, version), 0)
            far = peft.apart(answer)
            right = far < close and engine.moved > 0 and set(answer.versions.tolist()) == {version}
            said = f"{far:.4f} nats from the trainer, moved {engine.moved:.3f}, prepare {prepared * 1000:.1f} ms"
            facts.append((f"version {version}", right, f"{said}, commit {committed * 1000:.2f} ms"))
            ended = await asyncio.gather(*load)
            kept = all(len(set(one.versions.tolist())) == 1 for one in ended)
            facts.append((f"load beside version {version}", kept, f"{sum(len(one.ids) for one in ended)} tokens"))
        last = peft.apart(await engine.generate("again", PROMPT, Sampling(1.0, 48, 1), 0))
        stale = peft.apart(base)
        facts.append(("the base is far from the last", stale > 3 * max(last, close), f"{stale:.3f} against {last:.4f} nats"))
    finally:
        publisher.close()
        await engine.close()
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    asked = parser.parse_args()
    if asked.device == "gpu":
        need_gpus(instead="--device cpu runs the same on a CPU")
    os.environ.update(vllm_environment(asked.device, os.environ))
    with tempfile.TemporaryDirectory() as folder:
        facts = asyncio.run(check(asked.device, make_model(Path(folder) / "old", 0, head_dim=64)))
    import vllm

    print("vllm", vllm.__version__)
    for name, good, said in facts:
        print("ok " if good else "BAD", name, said)
    return 0 if all(good for _, good, _ in facts) else 1


if __name__ == "__main__":
    sys.exit(main())
