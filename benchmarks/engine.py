"""How fast the real engine is on this machine: `python -m benchmarks.engine [model]`, an embedded model's name or a folder.

Prints seconds to ready; wall and own CPU time of 256 requests at once; the pause of an update; how soon an abort is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import Any

import numpy as np

from telescope.config.models import model_folder
from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.vllm.engine import VllmEngine
from telescope.inference.vllm.options import ServerPlan, vllm_environment
from telescope.records import Sampling
from telescope.weights.transports.shared_memory import SharedMemoryPublisher

RUN = "benchmark"
PROMPT = np.arange(5, 23, dtype=np.int32)


async def measure(name: str) -> None:
    folder = model_folder(name)
    settings = InferenceSettings(http=False, max_model_len=256)
    engine = VllmEngine(ServerPlan(ModelSettings(name=name), folder, settings, "cpu", 256, 0, RUN), WeightSyncSettings())
    publisher = SharedMemoryPublisher(RUN)
    started = time.perf_counter()
    await engine.start()
    print(f"ready                    {time.perf_counter() - started:.1f} s")
    try:
        for attempt in range(5):
            await requests(engine, attempt)
        for version in range(1, 6):
            await update(engine, publisher, version, folder)
        for attempt in range(5):
            await abort(engine, attempt)
    finally:
        publisher.close()
        started = time.perf_counter()
        await engine.close()
        print(f"closed                   {time.perf_counter() - started:.1f} s")


async def requests(engine: VllmEngine, attempt: int) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    asked = (engine.generate(f"r{attempt}-{i}", PROMPT, Sampling(1.0, 6, i), 0) for i in range(256))
    answers = await asyncio.gather(*asked)
    tokens = sum(len(answer.ids) for answer in answers)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(f"256 requests             {wall:.3f} s wall, {cpu:.3f} s CPU of the caller, {tokens} tokens")


async def update(engine: VllmEngine, publisher: SharedMemoryPublisher, version: int, folder: Any) -> None:
    from safetensors.torch import load_file

    manifest = publisher.publish(version, load_file(folder / "model.safetensors").items())
    running = [asyncio.create_task(engine.generate(f"u{version}-{i}", PROMPT, Sampling(1.0, 200, i), 0)) for i in range(64)]
    await asyncio.sleep(0.05)
    began = time.perf_counter()
    await engine.prepare(manifest)
    prepared = time.perf_counter() - began
    state = await engine.commit(version)
    pause = state.pause_s * 1000
    print(f"update                   prepare {prepared * 1000:.1f} ms, pause {pause:.1f} ms ({manifest.nbytes} bytes)")
    await asyncio.gather(*running)


async def abort(engine: VllmEngine, attempt: int) -> None:
    task = asyncio.create_task(engine.generate(f"a{attempt}", PROMPT, Sampling(0.1, 230, 0), 0))
    await asyncio.sleep(0.02)
    began = time.perf_counter()
    await engine.abort(f"a{attempt}")
    answer = await task
    answered = time.perf_counter() - began
    began = time.perf_counter()
    await engine.running()  # answered between two steps: by then the engine has dropped it
    print(
        f"abort                    answered after {answered * 1000:.2f} ms ({answer.finish_reason}), "
        f"the engine's next turn after {(time.perf_counter() - began) * 1000:.2f} ms"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=str(__doc__).splitlines()[0])
    parser.add_argument("model", nargs="?", default="tiny", help="an embedded model's name, or a folder")
    model = parser.parse_args().model
    os.environ.update(vllm_environment("cpu", os.environ))
    asyncio.run(measure(model))
