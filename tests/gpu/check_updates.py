"""Weight updates of the vLLM engine on one GPU, whichever version is installed: `python -m tests.gpu.check_updates`.

Updates under load by way of host memory, as plain copies between engine steps: log-probs against transformers in the served
precision, exact versions of every token, cached prefixes of old weights, all three ways with requests in flight, all places of
staging. Exits 0 only if all hold. `--device cpu` runs the same on a CPU. No pytest module: it needs a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.engine import Generated
from telescope.inference.vllm.engine import VllmEngine
from telescope.inference.vllm.options import ServerPlan, vllm_environment
from telescope.records import Sampling
from telescope.weights.transports.shared_memory import SharedMemoryPublisher
from tests.gpu.needed import need_gpus
from tests.inference.models import make_model

RUN = "gpu-update-check"
COLD = 0.3
"""A temperature at which an answer of these models never ends."""
FAR = 0.5
"""Mean |difference| in nats that other weights are apart at least."""

Facts = list[tuple[str, bool, str]]


class Models:
    """The transformers models of the folders, and what they say of an answer that crosses updates."""

    def __init__(self, folders: dict[str, Path], device: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.folders = folders
        self._device = device
        kind = getattr(torch, dtype)
        self._models = {
            name: AutoModelForCausalLM.from_pretrained(folder).to(device, kind).eval() for name, folder in folders.items()
        }

    def logprobs(self, prompt: np.ndarray, answer: Generated, which: dict[int, str], temperature: float) -> np.ndarray:
        """[T] float32: each token by the weights of its version, over the keys and values that the versions before left."""
        import torch
        from transformers import DynamicCache

        tokens = torch.as_tensor(np.concatenate([prompt, answer.ids]).astype(np.int64), device=self._device)[None]
        cache, done, found = DynamicCache(), 0, []
        with torch.no_grad():
            for version, first, last in runs(answer.versions):
                model = self._models[which[version]]
                stop = len(prompt) + last - 1
                logits = model(tokens[:, done:stop], past_key_values=cache, use_cache=True).logits[0].float() / temperature
                logits = logits[len(prompt) + first - 1 - done :]
                wanted = tokens[0, len(prompt) + first : len(prompt) + last, None]
                found.append(logits.log_softmax(-1).gather(1, wanted)[:, 0])
                done = stop
        return np.asarray(torch.cat(found).cpu().numpy(), dtype=np.float32)

    def anew(self, prompt: np.ndarray, answer: Generated, which: str, temperature: float) -> np.ndarray:
        """[T] float32 under one folder's weights."""
        import torch

        tokens = torch.as_tensor(np.concatenate([prompt, answer.ids]).astype(np.int64), device=self._device)[None]
        with torch.no_grad():
            logits = self._models[which](tokens).logits[0, len(prompt) - 1 : -1].float() / temperature
        return np.asarray(logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].cpu().numpy())


def runs(versions: np.ndarray) -> list[tuple[int, int, int]]:
    """`(version, first, last + 1)` of each stretch of equal versions."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [(int(versions[a]), a, b) for a, b in itertools.pairwise(edges)]


class Check:
    def __init__(self, engine: VllmEngine, models: Models, publisher: SharedMemoryPublisher, close: float) -> None:
        self.facts: Facts = []
        self._engine, self._models, self._publisher, self._close = engine, models, publisher, close
        self._version = 0
        self._served = {0: "old"}
        self._number = 0

    def note(self, what: str, good: bool, said: str) -> None:
        self.facts.append((what, bool(good), said))

    async def serve(self, which: str) -> int:
        from safetensors.torch import load_file

        self._version += 1
        self._served[self._version] = which
        tensors = list(load_file(self._models.folders[which] / "model.safetensors").items())
        manifest = await asyncio.to_thread(self._publisher.publish, self._version, tensors)
        await self._engine.prepare(manifest)
        state = await self._engine.commit(self._version)
        self.note("update", state.checksum == manifest.checksum, f"to {which}, commit {state.pause_s * 1000:.1f} ms")
        return self._version

    async def generate(self, prompt: np.ndarray, tokens: int, seed: int, temperature: float = COLD) -> Generated:
        self._number += 1
        return await self._engine.generate(f"c{self._number}", prompt, Sampling(temperature, tokens, seed), 0)

    async def under_load(self, name: str, requests: int, tokens: int) -> None:
        """Requests that come, run and end while three versions are put in place."""
        prompts = [np.random.default_rng(index).integers(2, 90, 40).astype(np.int32) for index in range(requests)]

        async def later(index: int) -> Generated:
            await asyncio.sleep(0.002 * index)
            return await self.generate(prompts[index], tokens, index)

        tasks = [asyncio.create_task(later(index)) for index in range(requests)]
        for which in ("new", "third", "old"):
            await asyncio.sleep(0.15)
            await self.serve(which)
        answers = await asyncio.gather(*tasks)
        crossed = sum(len(set(answer.versions.tolist())) > 1 for answer in answers)
        self.note(f"{name}: requests across an update", crossed >= requests // 4, f"{crossed} of {requests}")
        self.note(f"{name}: no token lost", all(len(a.ids) == tokens for a in answers), f"{sum(len(a.ids) for a in answers)}")
        self.exact(name, prompts, answers)

    def exact(self, name: str, prompts: list[np.ndarray], answers: list[Generated]) -> None:
        """The log-probs are those of the versions as told, and the tokens at the seams fit no shift by one."""
        apart, shifted = [], []
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = self._models.logprobs(prompt, answer, self._served, COLD)
            apart.append(np.abs(answer.logprobs - expected))
            for other in (np.roll(answer.versions, 1), np.roll(answer.versions, -1)):
                other[0], other[-1] = answer.versions[0], answer.versions[-1]
                for place in np.flatnonzero(other != answer.versions).tolist():
                    which = {**self._served}
                    moved = self._models.logprobs(prompt, _with(answer, other), which, COLD)
                    shifted.append((abs(answer.logprobs[place] - moved[place]), apart[-1][place]))
        mean = float(np.concatenate(apart).mean())
        self.note(f"{name}: log-probs are those of the versions told", mean < self._close, f"mean |difference| {mean:.4f}")
        if shifted:
            wrong, right = (float(np.mean([pair[side] for pair in shifted])) for side in (0, 1))
            self.note(
                f"{name}: seams", right < self._close * 3 and wrong > FAR, f"told {right:.4f}, shifted by one {wrong:.3f}"
            )

    async def prefixes(self) -> None:
        """Generate, update, generate the same prompt: nothing cached under the old weights may be found."""
        prompt = np.random.default_rng(5).integers(2, 90, 400).astype(np.int32)
        await self.generate(prompt, 8, 1)
        again = await self.generate(prompt, 8, 2)
        version = await self.serve("new")
        fresh = await self.generate(prompt, 32, 3)
        cached = await self.generate(prompt, 32, 4)
        self.note("prefixes are cached", again.cached_tokens > 0 and cached.cached_tokens > 0, f"{again.cached_tokens} tokens")
        self.note("none of old weights", fresh.cached_tokens == 0, f"{fresh.cached_tokens} tokens after the update")
        for answer in (fresh, cached):
            apart = float(np.abs(answer.logprobs - self._models.anew(prompt, answer, "new", COLD)).mean())
            stale = float(np.abs(answer.logprobs - self._models.anew(prompt, answer, "old", COLD)).mean())
            good = apart < self._close and stale > FAR and set(answer.versions.tolist()) == {version}
            self.note("the same prompt after an update", good, f"new weights {apart:.4f}, old ones {stale:.3f}")

    async def recomputed(self) -> None:
        """`in_flight=recompute`: each log-prob is its version's given all tokens before."""
        kept = self._engine._sync
        self._engine._sync = kept.model_copy(update={"in_flight": "recompute"})
        try:
            prompt = np.arange(5, 25, dtype=np.int32)
            task = asyncio.create_task(self.generate(prompt, 600, 9))
            await asyncio.sleep(0.3)
            await self.serve("third")
            answer = await task
        finally:
            self._engine._sync = kept
        stretches = runs(answer.versions)
        self.note("recompute: across an update", len(stretches) == 2, str(stretches))
        for version, first, last in stretches:
            expected = self._models.anew(prompt, answer, self._served[version], COLD)
            apart = float(np.abs(answer.logprobs - expected)[first:last].mean())
            self.note("recompute: log-probs", apart < self._close, f"version {version}: {apart:.4f}")

    async def aborted(self) -> None:
        kept = self._engine._sync
        self._engine._sync = kept.model_copy(update={"in_flight": "abort"})
        try:
            task = asyncio.create_task(self.generate(np.arange(5, 25, dtype=np.int32), 900, 9))
            await asyncio.sleep(0.2)
            await self.serve("old")
            answer = await task
        finally:
            self._engine._sync = kept
        self.note("abort", answer.finish_reason == "abort" and len(runs(answer.versions)) == 1, f"{len(answer.ids)} tokens")
        after = await self.generate(np.arange(5, 25, dtype=np.int32), 32, 1)
        self.exact("after an abort", [np.arange(5, 25, dtype=np.int32)], [after])


def _with(answer: Generated, versions: np.ndarray) -> Generated:
    from dataclasses import replace

    return replace(answer, versions=versions)


async def check(folders: dict[str, Path], device: str, staging: str, whole: bool) -> Facts:
    gpu = device == "gpu"
    settings = InferenceSettings(http=False, max_model_len=1024, gpu_memory_utilization=0.2, cpu_kv_cache_mb=64)
    plan = ServerPlan(ModelSettings(name="old"), folders["old"], settings, "gpu" if gpu else "cpu", 128, 0, RUN)
    engine = VllmEngine(plan, WeightSyncSettings.model_validate({"staging": staging}))
    publisher = SharedMemoryPublisher(RUN)
    await engine.start()
    try:
        models = Models(folders, "cuda" if gpu else "cpu", "bfloat16" if gpu else "float32")
        subject = Check(engine, models, publisher, 0.1 if gpu else 1e-3)
        (opened,) = engine.opened
        subject.note(f"staging {staging}: copies", not opened.no_plan and opened.copies > 0, f"{opened}")
        await subject.under_load(f"staging {staging}", 64 if whole else 16, 300 if whole else 200)
        if whole:
            await subject.prefixes()
            await subject.recomputed()
            await subject.aborted()
    finally:
        publisher.close()
        await engine.close()
    return subject.facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--staging", nargs="+", choices=["full", "host", "none"], default=["full"], help="the first one wholly")
    arguments = parser.parse_args()
    if arguments.device == "gpu":
        need_gpus(instead="--device cpu runs the same on a CPU")
    os.environ.update(vllm_environment(arguments.device, os.environ))
    facts: list[tuple[str, bool, str]] = []
    with tempfile.TemporaryDirectory() as root:
        names = ("old", "new", "third")
        folders: dict[str, Any] = {name: make_model(Path(root) / name, seed, head_dim=64) for seed, name in enumerate(names)}
        for index, staging in enumerate(arguments.staging):
            facts += asyncio.run(check(folders, arguments.device, staging, whole=index == 0))
    for name, good, said in facts:
        print("ok " if good else "BAD", name, "|", said)
    return 0 if all(good for _, good, _ in facts) else 1


if __name__ == "__main__":
    sys.exit(main())
