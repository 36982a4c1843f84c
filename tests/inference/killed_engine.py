"""A real engine is killed while it generates, and asked for everything afterwards. Prints what each call raised, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import psutil

from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.vllm.engine import VllmEngine
from telescope.inference.vllm.options import ServerPlan, vllm_environment
from telescope.records import Sampling
from telescope.weights.transports.shared_memory import SharedMemoryPublisher

RUN, PATIENCE_S = "killed-engine", 60.0
LONG = Sampling(0.3, 10**6, 1)


async def main(folder: Path, segments: Path) -> None:
    os.environ.update(vllm_environment("cpu", os.environ))
    inference = InferenceSettings(max_model_len=512, cpu_kv_cache_mb=64, http=False)
    plan = ServerPlan(ModelSettings(name="old"), folder, inference, "cpu", 8, 0, RUN)
    engine, publisher = (
        VllmEngine(plan, WeightSyncSettings(update_timeout_s=PATIENCE_S / 2)),
        SharedMemoryPublisher(RUN, segments),
    )
    await engine.start()
    try:
        print(json.dumps(await asked(engine, publisher, folder)))
    finally:
        await engine.close()
        publisher.close()


async def asked(engine: VllmEngine, publisher: SharedMemoryPublisher, folder: Path) -> dict[str, str]:
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(folder).float().state_dict()
    manifest = publisher.publish(1, [(name, tensor) for name, tensor in state.items() if name != "lm_head.weight"])
    await engine.prepare(manifest)
    ids = np.arange(2, 12, dtype=np.int32)
    begun = asyncio.create_task(engine.generate("begun", ids, LONG, 0))
    async with asyncio.timeout(PATIENCE_S):
        while not await engine.running():
            await asyncio.sleep(0.01)
    for child in psutil.Process().children():
        os.kill(child.pid, signal.SIGKILL)
    calls = {  # the commit at once: vLLM has not seen the death yet
        "commit": engine.commit(1),
        "begun": begun,
        "generate": engine.generate("later", ids, LONG, 0),
        "discard": engine.discard(1),
        "prepare": engine.prepare(msgspec.structs.replace(manifest, version=2)),
        "compare": engine.compare(1),
        "running": engine.running(),
    }
    raised = {name: await what(call) for name, call in calls.items()}
    return raised | {"dead": await engine.dead()}


async def what(call: object) -> str:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await call  # type: ignore[misc]
    except Exception as error:  # noqa: BLE001  whatever it is, the test reads it
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
