"""The vLLM engine on one GPU, whichever version is installed: `python -m tests.gpu.check_engine`.

Log-probs against transformers in float32, both ways by which they come (also where requests are preempted), an update in flight
with the versions of its tokens, an abort, a refused part. `VLLM_USE_V2_MODEL_RUNNER=0` or 1 chooses the model runner. Exits 0
only if all hold. No pytest module: machines without a GPU have nothing to say about it.
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

import msgspec
import numpy as np

from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.engine import WeightsRefused
from telescope.inference.vllm.engine import VllmEngine
from telescope.inference.vllm.options import ServerPlan, vllm_environment
from telescope.records import Sampling
from telescope.weights.transports.shared_memory import SharedMemoryPublisher
from tests.gpu.needed import need_gpus
from tests.gpu.references import References
from tests.inference.models import make_model, over_kept_cache

RUN = "gpu-check"
COLD = 0.3
BLOCKS = 400
"""Of the cache, 16 tokens each: too few for 256 answers at once."""
CLOSE = 0.1
"""Mean |difference| in nats between bfloat16 served and float32; other weights are apart by more than 1."""

Facts = list[tuple[str, bool, str]]


def tensors(folder: Path) -> list[tuple[str, Any]]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").items())


async def check(old: Path, new: Path) -> Facts:
    facts: Facts = []
    settings = InferenceSettings(
        http=False, max_model_len=1024, gpu_memory_utilization=0.3, cuda_graphs="off", vllm={"num_gpu_blocks_override": BLOCKS}
    )
    plan = ServerPlan(ModelSettings(name="old"), old, settings, "gpu", 256, 0, RUN)
    engine = VllmEngine(plan, WeightSyncSettings())
    publisher, references = SharedMemoryPublisher(RUN), References()
    started = time.monotonic()
    await engine.start()
    facts.append(("ready", True, f"{time.monotonic() - started:.1f} s"))
    prompt = np.arange(5, 25, dtype=np.int32)
    try:
        for temperature in (1.0, 0.7):
            answer = await engine.generate(f"t{temperature}", prompt, Sampling(temperature, 64, 3), 0)
            apart = float(np.abs(answer.logprobs - references.logprobs(old, prompt, answer.ids, temperature)).mean())
            facts.append((f"log-probs at {temperature}", apart < CLOSE, f"mean {apart:.4f}"))
        for attempt in range(2):
            begun = time.monotonic()
            await asyncio.gather(*(engine.generate(f"m{attempt}-{i}", prompt, Sampling(1.0, 6, i), 0) for i in range(256)))
            facts.append(("256 requests", True, f"{time.monotonic() - begun:.3f} s"))
        facts += await both_ways(engine)
        facts += await update_in_flight(engine, publisher, references, prompt, old, new)
        facts += await abort(engine, prompt)
        whole = publisher.publish(2, tensors(old))
        part = msgspec.structs.replace(whole, tensors=tuple(t for t in whole.tensors if "k_proj" not in t.name))
        try:
            await engine.prepare(part)
            facts.append(("a part is refused", False, "taken"))
        except WeightsRefused as error:
            facts.append(("a part is refused", True, str(error)))
    finally:
        publisher.close()
        begun = time.monotonic()
        await engine.close()
        facts.append(("closed", True, f"{time.monotonic() - begun:.1f} s"))
    return facts


async def both_ways(engine: VllmEngine) -> Facts:
    """Log-probs kept in the worker against those that come with each token, of requests that take the cache from each other."""
    path, random = engine.logprobs, np.random.default_rng(0)
    kept = not path.asked
    facts: Facts = [("log-probs are kept in the worker", kept, "")]
    if kept:
        path.asked = True
        before = path.compared
        cuts: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}]
        prompts = [random.integers(5, 90, 5 + index % 40).astype(np.int32) for index in range(256)]
        orders = [Sampling((0.0, 0.6, 1.0)[index % 3], 50 + index, index, **cuts[index % 4]) for index in range(256)]
        await asyncio.gather(*(engine.generate(f"both-{i}", prompts[i], orders[i], 0) for i in range(256)))
        path.asked = False
        said = f"{path.apart} of {path.compared - before} apart, {engine.load.preemptions} preemptions"
        facts.append(("both ways are alike", not path.apart and engine.load.preemptions > 0, said))
    return facts


async def update_in_flight(
    engine: VllmEngine,
    publisher: SharedMemoryPublisher,
    references: References,
    prompt: np.ndarray,
    old: Path,
    new: Path,
) -> Facts:
    """A long answer across an update: first tokens are the old weights', last ones the new weights', and say so."""
    task = asyncio.create_task(engine.generate("long", prompt, Sampling(COLD, 900, 5), 0))
    manifest = publisher.publish(1, tensors(new))
    await engine.prepare(manifest)
    state = await engine.commit(1)
    answer = await task
    counts = {int(v): int((answer.versions == v).sum()) for v in (0, 1)}
    facts: Facts = [
        ("update", state.checksum == manifest.checksum, f"pause {state.pause_s * 1000:.1f} ms"),
        ("versions", min(counts.values()) > 0 and sum(counts.values()) == len(answer.ids) == 900, str(counts)),
    ]
    for version_, other in ((0, new), (1, old)):
        mine = answer.versions == version_
        kept = over_kept_cache(references.model, prompt, answer, {0: old, 1: new}, COLD)
        apart = np.abs(answer.logprobs - kept)[mine].mean()
        far = np.abs(answer.logprobs - references.logprobs(other, prompt, answer.ids, COLD))[mine].mean()
        facts.append((f"tokens of version {version_}", apart < 3 * CLOSE < far, f"own weights {apart:.3f}, other {far:.3f}"))
    return facts


async def abort(engine: VllmEngine, prompt: np.ndarray) -> Facts:
    task = asyncio.create_task(engine.generate("doomed", prompt, Sampling(COLD, 900, 5), 0))
    await asyncio.sleep(0.2)
    begun = time.monotonic()
    await engine.abort("doomed")
    answer = await task
    told = time.monotonic() - begun
    return [
        ("abort", answer.finish_reason == "abort" and len(answer.ids) < 900, f"{told * 1000:.1f} ms, {len(answer.ids)} tokens")
    ]


def main() -> int:
    argparse.ArgumentParser(prog="python -m tests.gpu.check_engine", description=str(__doc__).splitlines()[0]).parse_args()
    need_gpus()
    os.environ.update(vllm_environment("gpu", os.environ))
    with tempfile.TemporaryDirectory() as folder:
        old, new = (make_model(Path(folder) / name, seed, head_dim=64) for seed, name in enumerate(("old", "new")))
        facts = asyncio.run(check(old, new))
    import vllm

    print("vllm", vllm.__version__)
    for name, good, said in facts:
        print("ok " if good else "BAD", name, said)
    return 0 if all(good for _, good, _ in facts) else 1


if __name__ == "__main__":
    sys.exit(main())
