"""The routing that servers record for router replay, on one GPU or several, whichever vLLM is installed: `python -m
tests.gpu.check_routing`.

For each kind of CUDA graphs, an engine of a Qwen3-MoE with drawn weights answers many prompts at once, longer ones in parts,
some with a beginning out of the prefix cache, before and after an update. Every token but the last of each answer must be
recorded in every layer, and the experts be transformers' in float32 but for the share that half precision turns (prompt and
answer apart, as answers are what graphs compute). Prints tokens per second with and without records. Exits 0 only if all hold.
`--tensor-parallel 2` needs as many GPUs; `--device cpu` runs the same on a CPU. No pytest module: it needs a GPU.
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

from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.engine import Generated
from telescope.inference.vllm.engine import VllmEngine
from telescope.inference.vllm.options import ServerPlan, vllm_environment
from telescope.records import Sampling
from telescope.weights.transports.shared_memory import SharedMemoryPublisher
from tests.gpu.check_moe import Facts, tell, tensors
from tests.gpu.needed import need_gpus

RUN, PART = "gpu-routing-check", 256
TURNED = {"float32": 0.002, "bfloat16": 0.1}
"""Most tokens and layers that may name other experts than transformers in float32: half precision turns what is near."""
OTHER = 0.5
"""With other weights more do."""
PROMPTS, TOKENS = 48, 120


def prompt(index: int) -> np.ndarray:
    """Two begin alike. A step has room for one or two of them, so that some come in parts."""
    shared = np.random.default_rng(index // 2).integers(2, 90, 150 + 4 * (index // 2))
    return np.concatenate([shared, np.random.default_rng(index).integers(2, 90, 9)]).astype(np.int32)


async def ask(engine: VllmEngine, name: str) -> tuple[list[Generated], float]:
    """Answers to all prompts, and tokens per second."""
    began = time.perf_counter()
    asked = (engine.generate(f"{name}-{i}", prompt(i), Sampling(0.8, TOKENS, i), 0) for i in range(PROMPTS))
    answers = list(await asyncio.gather(*asked))
    return answers, sum(len(answer.ids) for answer in answers) / (time.perf_counter() - began)


class Reference:
    """A folder's model by transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        from tests.inference.routers import Chosen

        self._model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
        self._chosen = Chosen(self._model)

    def turned(self, answers: list[Generated]) -> tuple[float, float]:
        """Shares of tokens and layers with other experts: of prompts, and of answers."""
        import torch

        from tests.inference.routers import differ

        of_prompts, of_answers = [], []
        for index, answer in enumerate(answers):
            ids = np.r_[prompt(index), answer.ids].astype(np.int64)
            with torch.no_grad():
                self._model(torch.from_numpy(ids)[None])
            assert answer.routed is not None
            found = differ(answer.routed[:-1], self._chosen.read()[0][:-1])
            of_prompts.append(found[: len(prompt(index))])
            of_answers.append(found[len(prompt(index)) :])
        return float(np.concatenate(of_prompts).mean()), float(np.concatenate(of_answers).mean())


async def check(folders: list[Path], given: argparse.Namespace, graphs: str, dtype: str) -> Facts:
    settings = InferenceSettings.model_validate(
        {
            "http": False, "max_model_len": 512, "gpu_memory_utilization": 0.2, "cpu_kv_cache_mb": 64, "dtype": dtype,
            "max_num_batched_tokens": PART, "tensor_parallel_size": given.tensor_parallel, "cuda_graphs": graphs,
        }
    )  # fmt: skip
    what, speeds, facts = f"{dtype}, graphs {graphs}, {given.tensor_parallel} a server", {}, []
    for records in (True, False):
        plan = ServerPlan(ModelSettings(name="experts"), folders[0], settings, given.device, 64, 0, RUN, router_replay=records)
        engine = VllmEngine(plan, WeightSyncSettings(update_timeout_s=120.0))
        publisher = SharedMemoryPublisher(RUN)
        await engine.start()
        try:
            before, _ = await ask(engine, "first")
            again, speeds[records] = await ask(engine, "again")
            if not records:
                facts.append(tell((f"{what}: off brings none", all(answer.routed is None for answer in again), "")))
                continue
            await engine.prepare(publisher.publish(1, iter(tensors(folders[1]))))
            await engine.commit(1)
            after, _ = await ask(engine, "after")
            facts += judge(what, folders, {"as loaded": before, "out of the cache": again, "after an update": after})
        finally:
            publisher.close()
            await engine.close()
    said = f"{speeds[True]:,.0f} tokens/s with records, {speeds[False]:,.0f} without"
    facts.append(tell((f"{what}: speed", speeds[True] > 0.5 * speeds[False], said)))
    return facts


def judge(what: str, folders: list[Path], heard: dict[str, list[Generated]]) -> Facts:
    facts: Facts = []
    old, new = (Reference(folder) for folder in folders)
    for name, answers in heard.items():
        records: list[Any] = [answer.routed for answer in answers]
        whole = all((record[:-1] != 255).all() and (record[-1] == 255).all() for record in records)
        facts.append(tell((f"{what}, {name}: all but the last token recorded", whole, f"{sum(map(len, records))} tokens")))
        own, other = (new, old) if name == "after an update" else (old, new)
        right, wrong = own.turned(answers), other.turned(answers)
        said = f"own weights turn {right[0]:.4f} of prompts, {right[1]:.4f} of answers; other {wrong[0]:.2f}, {wrong[1]:.2f}"
        limit = TURNED["float32" if "float32" in what else "bfloat16"]
        facts.append(tell((f"{what}, {name}: the experts", max(right) < limit and min(wrong) > OTHER, said)))
    cached = sum(answer.cached_tokens for answer in heard["out of the cache"])
    facts.append(tell((f"{what}: prompts out of the cache", cached > 0, f"{cached} tokens")))
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--dtype", choices=list(TURNED), help="served in; bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument(
        "--graphs", nargs="+", choices=["full_decode", "default", "off"], default=["full_decode", "default", "off"]
    )
    parser.add_argument("--tensor-parallel", type=int, default=1)
    given = parser.parse_args()
    if given.device == "gpu":
        need_gpus(given.tensor_parallel, instead="--device cpu runs the same on a CPU")
    os.environ.update(vllm_environment(given.device, os.environ))
    from tests.inference.routers import make_served_experts

    facts: Facts = []
    dtype = given.dtype or ("bfloat16" if given.device == "gpu" else "float32")
    with tempfile.TemporaryDirectory() as root:
        folders = make_served_experts(Path(root))
        for graphs in given.graphs if given.device == "gpu" else ["off"]:
            facts += asyncio.run(check(folders, given, graphs, dtype))
    return 0 if all(good for _, good, _ in facts) else 1


if __name__ == "__main__":
    sys.exit(main())
