"""Weight updates of models with experts in the vLLM engine on one GPU, whichever version is installed: `python -m
tests.gpu.check_moe`.

For a Qwen3-MoE, a Mixtral and a GLM-4-MoE with drawn weights, and each place of staging: served log-probs are transformers'
before and after updates to and fro, with a request in flight, and every element of the engine's parameters is what the version
says, each expert in the kernel's own order. Prints the kernel's way (copies alone, or arranged) and the pause. Exits 0 only if
all hold. `--device cpu` runs the same on a CPU. No pytest module: it needs a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.vllm.engine import VllmEngine
from telescope.inference.vllm.options import ServerPlan, vllm_environment
from telescope.records import Sampling
from telescope.weights.transports.shared_memory import SharedMemoryPublisher
from tests.backends.models import random_experts
from tests.gpu.needed import need_gpus
from tests.inference.models import tokenizer

RUN = "gpu-experts-check"
KINDS = ("qwen3_moe", "mixtral", "glm4_moe")
CLOSE = {"float32": 1e-3, "bfloat16": 0.15}
"""Mean |served - transformers in float32| in nats. In half precision a token now and then goes to another expert."""
FAR = 0.4
"""Other weights are apart by more, in the mean."""
PROMPTS, TOKENS = 8, 48

Fact = tuple[str, bool, str]
Facts = list[Fact]


def tell(fact: Fact) -> Fact:
    """Print it at once: who is cut off has said how far it came."""
    print("ok " if fact[1] else "BAD", fact[0], "|", fact[2], flush=True)
    return fact


def make_models(root: Path, kind: str, intermediate: int, seeds: int = 2) -> list[Path]:
    """Folders of one kind with other weights each. `intermediate`: the width of an expert."""
    import torch

    torch.set_num_threads(1)  # the engine forks this process, and a fork waits for ever for OpenMP threads that it has not
    made, characters = [], tokenizer()
    for seed in range(seeds):
        folder = random_experts(
            root / f"{kind}-{seed}", kind, seed, vocab_size=len(characters), hidden_size=128, head_dim=64, eos_token_id=1,
            intermediate_size=intermediate, **({"moe_intermediate_size": intermediate} if kind != "mixtral" else {}),
        )  # fmt: skip
        characters.save_pretrained(folder)
        made.append(Path(folder))
    return made


def tensors(folder: Path) -> list[tuple[str, Any]]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").items())


@dataclass
class Check:
    engine: VllmEngine
    publisher: SharedMemoryPublisher
    references: dict[Path, Any]
    """transformers' models in float32."""
    version: int = 0
    asked: int = 0

    async def gap(self, folder: Path) -> float:
        """Mean |served - transformers| in nats over what the engine samples."""
        prompts = [np.random.default_rng(index).integers(2, 90, 12 + index).astype(np.int32) for index in range(PROMPTS)]
        self.asked += 1
        names = (f"g{self.asked}-{index}" for index in range(PROMPTS))
        asked = (
            self.engine.generate(name, prompt, Sampling(1.0, TOKENS, self.asked * 100 + index), 0)
            for index, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        )
        answers = await asyncio.gather(*asked)
        apart = [np.abs(a.logprobs - self.logprobs(folder, p, a.ids)) for p, a in zip(prompts, answers, strict=True)]
        return float(np.concatenate(apart).mean())

    def logprobs(self, folder: Path, prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
        import torch

        tokens = torch.as_tensor(np.concatenate([prompt, ids]).astype(np.int64))[None]
        with torch.no_grad():
            logp = self.references[folder](tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return np.asarray(logp.gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy())

    async def stage(self, version: list[tuple[str, Any]]) -> int:
        self.version += 1
        await self.engine.prepare(self.publisher.publish(self.version, iter(version)))
        return self.version

    async def serve(self, folder: Path) -> str:
        state = await self.engine.commit(await self.stage(tensors(folder)))
        return f"pause {state.pause_s * 1000:.1f} ms"

    async def holds(self, folder: Path) -> tuple[bool, str]:
        """Stage the version once more and compare every element; then forget it."""
        version = await self.stage(tensors(folder))
        found = await self.engine.compare(version)
        await self.engine.discard(version)
        return found.tensors > 0 and not found.other, f"{found.tensors} tensors, {len(found.other)} other {found.other[:2]}"

    async def run(self, old: Path, new: Path, close: float, what: str) -> Facts:
        facts: Facts = []

        async def note(name: str, held: Path, other: Path) -> None:
            right, wrong = await self.gap(held), await self.gap(other)
            said = f"own weights {right:.5f}, other {wrong:.3f} nats"
            facts.append(tell((f"{what}: {name}", right < close and wrong > FAR, said)))

        await note("as loaded", old, new)
        running = asyncio.create_task(self.engine.generate("long", np.arange(5, 25, dtype=np.int32), Sampling(1.0, 400, 5), 0))
        said = await self.serve(new)
        answer = await running
        facts.append(tell((f"{what}: a request in flight goes on", len(answer.ids) > 0, f"{len(answer.ids)} tokens")))
        await note(f"after an update ({said})", new, old)
        if self.engine._sync.staging != "none":
            facts.append(tell((f"{what}: every element", *await self.holds(new))))
        said = await self.serve(old)
        await note(f"and back ({said})", old, new)
        return facts


async def check(folders: list[Path], device: Any, staging: str, dtype: str, what: str) -> Facts:
    from transformers import AutoModelForCausalLM

    settings = InferenceSettings.model_validate(
        {"http": False, "max_model_len": 512, "gpu_memory_utilization": 0.2, "cpu_kv_cache_mb": 64, "dtype": dtype}
    )
    plan = ServerPlan(ModelSettings(name="old"), folders[0], settings, device, 64, 0, RUN)
    engine = VllmEngine(plan, WeightSyncSettings.model_validate({"staging": staging, "update_timeout_s": 120.0}))
    publisher = SharedMemoryPublisher(RUN)
    await engine.start()
    try:
        references = {f: AutoModelForCausalLM.from_pretrained(f, attn_implementation="eager").float().eval() for f in folders}
        (opened,) = engine.opened
        facts = [tell((f"{what}: a plan", opened.copies > 0, f"{opened}"))]
        return facts + await Check(engine, publisher, references).run(folders[0], folders[1], CLOSE[dtype], what)
    finally:
        publisher.close()
        await engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--dtype", choices=list(CLOSE), help="served in; bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--staging", nargs="+", choices=["full", "host", "none"], default=["full"])
    parser.add_argument("--intermediate", type=int, default=128, help="an expert's width; 48 is padded by some kernels")
    asked = parser.parse_args()
    if asked.device == "gpu":
        need_gpus(instead="--device cpu runs the same on a CPU")
    os.environ.update(vllm_environment(asked.device, os.environ))
    dtype = asked.dtype or ("bfloat16" if asked.device == "gpu" else "float32")
    facts: Facts = []
    with tempfile.TemporaryDirectory() as root:
        for kind in asked.kinds:
            folders = make_models(Path(root), kind, asked.intermediate)
            for staging in asked.staging:
                facts += asyncio.run(check(folders, asked.device, staging, dtype, f"{kind}, staging {staging}"))
    return 0 if all(good for _, good, _ in facts) else 1


if __name__ == "__main__":
    sys.exit(main())
