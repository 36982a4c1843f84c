"""FP8 rollouts on one GPU: `python -m tests.gpu.check_fp8 [--updates 20]`.

The gap between served log-probs and transformers' in float32, in bfloat16 and in fp8, at the start and after each of many
updates to and fro: every version must be quantised anew, so the gap of the same weights must stay what it was. Exits 0 only if
it does. `--device cpu` runs the same without quantisation, to try the script. No pytest module: it needs a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import numpy as np

from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.vllm.engine import VllmEngine
from telescope.inference.vllm.options import Device, ServerPlan, vllm_environment
from telescope.records import Sampling
from telescope.weights.transports.shared_memory import SharedMemoryPublisher
from tests.gpu.check_engine import tensors
from tests.gpu.needed import need_gpus
from tests.gpu.references import References
from tests.inference.models import make_model

RUN = "gpu-fp8-check"
Quantization = Literal["fp8"] | None
PROMPTS, TOKENS = 16, 48
GROWTH = 1.5
"""The last gap of the same weights may be so many times the first: the same tokens are not drawn again."""
FAR = 3.0
"""Other weights are apart by at least so many times the gap."""


async def gap(engine: VllmEngine, references: References, folder: Path, name: str) -> float:
    """Mean |served - float32| in nats over what the engine samples from the weights of a folder."""
    prompts = [np.random.default_rng(i).integers(2, 90, 12 + i).astype(np.int32) for i in range(PROMPTS)]
    asked = (engine.generate(f"{name}-{i}", prompt, Sampling(1.0, TOKENS, i), 0) for i, prompt in enumerate(prompts))
    answers = await asyncio.gather(*asked)
    apart = [np.abs(a.logprobs - references.logprobs(folder, p, a.ids)) for p, a in zip(prompts, answers, strict=True)]
    return float(np.concatenate(apart).mean())


async def measure(
    device: Device, quantization: Literal["fp8"] | None, old: Path, new: Path, updates: int
) -> list[tuple[str, float]]:
    """Gaps: at the start, of the weights before against the wrong reference, then after each update."""
    settings = InferenceSettings(
        http=False, max_model_len=512, gpu_memory_utilization=0.3, cpu_kv_cache_mb=64, quantization=quantization
    )
    engine = VllmEngine(ServerPlan(ModelSettings(name="old"), old, settings, device, PROMPTS, 0, RUN), WeightSyncSettings())
    publisher = SharedMemoryPublisher(RUN)
    references, begun = References(), time.monotonic()
    try:
        await engine.start()
        print(f"{quantization or 'not quantised'}: ready after {time.monotonic() - begun:.1f} s; {engine.opened}", flush=True)
        gaps = [
            ("start", await gap(engine, references, old, "start")),
            ("other weights", await gap(engine, references, new, "other")),
        ]
        for version in range(1, updates + 1):
            folder = new if version % 2 else old
            manifest = publisher.publish(version, tensors(folder))
            await engine.prepare(manifest)
            state = await engine.commit(version)
            name = f"version {version}, pause {state.pause_s * 1000:.0f} ms"
            gaps.append((name, await gap(engine, references, folder, f"v{version}")))
    finally:
        publisher.close()
        await engine.close()
    return gaps


def holds(gaps: list[tuple[str, float]]) -> bool:
    (_, first), (_, other), *later = gaps
    back = [value for number, (_, value) in enumerate(later, start=1) if number % 2 == 0]
    return other > FAR * max(first, 1e-6) and max(back) < GROWTH * max(first, 1e-4)


def main() -> int:
    """Without `--kind` one process a kind: an engine is forked, and CUDA may be up after the first one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--kind", choices=["fp8", "plain"], help="only this one")
    asked = parser.parse_args()
    if asked.device == "gpu":
        need_gpus(instead="--device cpu runs it without quantisation")
    if asked.kind is None:
        command = [sys.executable, "-m", "tests.gpu.check_fp8", *sys.argv[1:], "--kind"]
        kinds = ("fp8", "plain") if asked.device == "gpu" else ("plain",)
        return max(subprocess.run([*command, kind], check=False).returncode for kind in kinds)
    os.environ.update(vllm_environment(asked.device, os.environ))
    with tempfile.TemporaryDirectory() as folder:
        old, new = (make_model(Path(folder) / name, seed, head_dim=64) for seed, name in enumerate(("old", "new")))
        gaps = asyncio.run(measure(asked.device, "fp8" if asked.kind == "fp8" else None, old, new, asked.updates))
    print(asked.kind, "ok" if holds(gaps) else "BAD")
    print("\n".join(f"  {name}: mean |served - float32| {value:.4f} nats" for name, value in gaps), flush=True)
    return 0 if holds(gaps) else 1


if __name__ == "__main__":
    sys.exit(main())
