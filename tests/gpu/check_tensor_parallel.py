"""A server on several GPUs, and its updates: `python -m tests.gpu.check_tensor_parallel [--shape 0.6B] [--gpus 0,1]`.

A tensor-parallel engine is brought to new weights by each transport that the cards allow, with requests in flight; its
log-probs are compared with transformers' in float32 under the weights that it should have, and under those it had before. Host
memory and files need no card of their own; `--transports nccl --gpus 0,1,2` gives the trainer the last card, since NCCL refuses
two ranks on one. Exits 0 only if all holds. `--device cpu --shape tiny` runs the same on a CPU. No pytest module.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.shapes import SHAPES, write_tokenizer
from benchmarks.weights.children import Child, start_trainer
from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.engine import Generated
from telescope.inference.vllm.engine import VllmEngine
from telescope.inference.vllm.options import ServerPlan, vllm_environment
from telescope.records import Sampling, WeightGroup, WeightManifest
from tests.gpu.needed import need_gpus
from tests.gpu.references import References

RUN = "gpu-tensor-parallel-check"
SIZE = 2
PROMPTS, TOKENS = 8, 32
UPDATES = 2
FAR = 4.0
"""Other weights are apart by so many times the gap at the start, at least."""
GROWTH = 1.5
"""The gap after an update may be so many times the gap at the start."""

LONG, STEP_S = 400, 60.0
Facts = list[tuple[str, bool, str]]
Answered = tuple[np.ndarray, Generated]
Asked = Awaitable[list[Answered]]


@dataclass
class Sender:
    """The trainer of one transport, the folders of the weights that it sends, in order, and its groups."""

    transport: str
    trainer: Child
    folders: list[Path]
    epoch: int


async def sender(given: argparse.Namespace, transport: str, root: Path, epoch: int) -> Sender:
    """Start a trainer with the shape's weights; it sends them with rows of every projection rolled by one more each time."""
    gpu, card = given.device == "gpu", given.gpus.split(",")[-1]
    folder = root / transport
    asked = {
        "shape": given.shape, "device": "cuda:0" if gpu else "cpu", "dtype": "bfloat16" if gpu else "float32", "run": RUN,
        "folder": str(folder / "0"), "directory": str(folder), "transport": transport, "weight_sync": sync(given).model_dump(),
    }  # fmt: skip
    trainer = await start_trainer(asked, os.environ | {"CUDA_VISIBLE_DEVICES": card if gpu else ""})
    await trainer.answer()
    rolled = [await asyncio.to_thread(roll, folder / str(n), folder / str(n + 1), given.shape) for n in range(UPDATES)]
    return Sender(transport, trainer, [folder / "0", *rolled], epoch)


def roll(before: Path, after: Path, shape: str) -> Path:
    """The weights that the trainer holds after one more order to publish."""
    import shutil

    from safetensors.torch import load_file, save_file

    after.mkdir()
    shutil.copy(before / "config.json", after)
    write_tokenizer(after, SHAPES[shape].vocabulary)
    tensors = load_file(before / "model.safetensors")
    save_file({n: t.roll(1, 0).contiguous() if "proj" in n else t for n, t in tensors.items()}, after / "model.safetensors")
    return after


def sync(given: argparse.Namespace) -> WeightSyncSettings:
    return WeightSyncSettings.model_validate({"staging": given.staging})


async def answers(engine: VllmEngine, name: str, vocabulary: int, tokens: int = TOKENS) -> list[Answered]:
    prompts = [np.random.default_rng(i).integers(2, min(900, vocabulary), 24 + i).astype(np.int32) for i in range(PROMPTS)]
    asked = (engine.generate(f"{name}-{i}", prompt, Sampling(1.0, tokens, i), 0) for i, prompt in enumerate(prompts))
    return list(zip(prompts, await asyncio.gather(*asked), strict=True))


def gap(references: References, folder: Path, found: list[tuple[np.ndarray, Generated]]) -> float:
    """Mean |served - float32| in nats."""
    apart = [np.abs(answer.logprobs - references.logprobs(folder, prompt, answer.ids)) for prompt, answer in found]
    return float(np.concatenate(apart).mean())


async def update(engine: VllmEngine, by: Sender, version: int, asked: Callable[[], Asked]) -> tuple[str, list[Answered]]:
    """One version, and requests that are asked once it is prepared and run when it is committed; says how long it took."""
    published = await by.trainer.ask(publish=version)
    manifest = msgspec.convert(published["manifest"], WeightManifest)
    begun = time.perf_counter()
    if manifest.collective:
        group = WeightGroup(by.epoch, ("trainer-0", *(f"server-0/{rank}" for rank in range(SIZE))))
        sending = asyncio.create_task(by.trainer.ask(send=version, group=msgspec.to_builtins(group)))
        await engine.prepare(manifest, group)
        await sending
    else:
        await engine.prepare(manifest)
    prepared, stepped = time.perf_counter() - begun, asyncio.Event()
    engine.on_step(stepped.set)
    running = asyncio.ensure_future(asked())
    async with asyncio.timeout(STEP_S):
        await stepped.wait()
    state = await engine.commit(version)
    said = f"prepare {prepared * 1000:.0f} ms, commit {state.pause_s * 1000:.1f} ms, {manifest.nbytes / 1e9:.2f} GB"
    return said, await running


async def check(given: argparse.Namespace, root: Path) -> Facts:
    gpu, vocabulary = given.device == "gpu", SHAPES[given.shape].vocabulary
    senders = [await sender(given, name, root, epoch) for epoch, name in enumerate(given.transports, start=1)]
    first = senders[0].folders[0]
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(given.gpus.split(",")[:SIZE])
    os.environ.update(vllm_environment(given.device, os.environ))
    settings = InferenceSettings(
        http=False, max_model_len=512, gpu_memory_utilization=0.4, cpu_kv_cache_mb=64, tensor_parallel_size=SIZE
    )
    engine = VllmEngine(ServerPlan(ModelSettings(name="shape"), first, settings, given.device, 64, 0, RUN), sync(given))
    references, facts, version = References("cuda:0" if gpu else "cpu"), Facts(), 0
    begun = time.monotonic()
    try:
        await engine.start()
        facts.append(("ready", len(engine.opened) == SIZE, f"{time.monotonic() - begun:.1f} s, {engine.opened}"))
        start = await asyncio.to_thread(gap, references, first, await answers(engine, "start", vocabulary))
        facts.append(("start", start < given.close, f"mean |served - float32| {start:.5f}"))
        for by in senders:
            for number in range(1, UPDATES + 1):
                version += 1
                took, crossing = await update(
                    engine, by, version, partial(answers, engine, f"running-{version}", vocabulary, LONG)
                )
                spans = {tuple(sorted(set(answer.versions.tolist()))) for _, answer in crossing}
                found = await answers(engine, f"after-{version}", vocabulary)
                mine = await asyncio.to_thread(gap, references, by.folders[number], found)
                other = await asyncio.to_thread(gap, references, by.folders[number - 1], found)
                good = mine < GROWTH * start + 1e-5 and other > FAR * max(start, 1e-3)
                versions = all(set(answer.versions.tolist()) == {version} for _, answer in found)
                said = f"new weights {mine:.5f}, old ones {other:.3f}; {took}; in flight {sorted(spans)}"
                crossed = (version - 1, version) in spans
                facts.append((f"{by.transport}, version {version}", good and versions and crossed, said))
    finally:
        for by in senders:
            await by.trainer.stop()
        await engine.close()
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6B")
    parser.add_argument("--gpus", default="0,1", help="the server's cards; a further one is the trainer's")
    parser.add_argument("--transports", nargs="+", default=["shared_memory", "disk"])
    parser.add_argument("--staging", choices=["full", "host", "none"], default="full")
    parser.add_argument("--close", type=float, default=0.05, help="the most that the gap at the start may be, in nats")
    given = parser.parse_args()
    if given.device == "gpu":
        need_gpus(len(given.gpus.split(",")), instead="--device cpu --shape tiny runs the same on a CPU")
    with tempfile.TemporaryDirectory() as root:
        facts = asyncio.run(check(given, Path(root)))
    for name, good, said in facts:
        print("ok " if good else "BAD", name, "|", said)
    return 0 if all(good for _, good, _ in facts) else 1


if __name__ == "__main__":
    sys.exit(main())
