"""A real engine's process is stopped (SIGSTOP) before each order about weights. Prints what each raised, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.vllm import engine as vllm_engine
from telescope.inference.vllm.options import ServerPlan, vllm_environment
from telescope.records import Sampling, WeightManifest
from telescope.weights.transports.shared_memory import SharedMemoryPublisher

RUN, LIMIT_S, BREAK_OFF_S, PATIENCE_S = "hung-engine", 3.0, 2.0, 60.0


class Subject:
    def __init__(self, folder: Path, segments: Path) -> None:
        inference = InferenceSettings(max_model_len=512, cpu_kv_cache_mb=64, http=False)
        plan = ServerPlan(ModelSettings(name="old"), folder, inference, "cpu", 8, 0, RUN)
        self.engine = vllm_engine.VllmEngine(plan, WeightSyncSettings(update_timeout_s=LIMIT_S))
        self._publisher, self._folder = SharedMemoryPublisher(RUN, segments), folder
        self._version = 0

    def publish(self) -> WeightManifest:
        from transformers import AutoModelForCausalLM

        self._version += 1
        state = AutoModelForCausalLM.from_pretrained(self._folder).float().state_dict()
        return self._publisher.publish(self._version, [(name, t) for name, t in state.items() if name != "lm_head.weight"])

    async def stopped(self, order: Coroutine[Any, Any, object]) -> tuple[str, float]:
        """What an order raises while the engine's process stands still, and after how many seconds; then it goes on."""
        children = psutil.Process().children(recursive=True)
        for child in children:
            os.kill(child.pid, signal.SIGSTOP)
        started, said = time.monotonic(), "nothing was raised"
        try:
            async with asyncio.timeout(PATIENCE_S):
                await order
        except Exception as error:  # noqa: BLE001  whatever it is, the test reads it
            said = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        for child in children:
            os.kill(child.pid, signal.SIGCONT)
        return said, seconds

    async def again(self, order: Coroutine[Any, Any, object], name: str) -> None:
        """An order that is to work, now that the process goes on: it may still have one before it to end."""
        async with asyncio.timeout(PATIENCE_S):
            await order
            await self.engine.generate(name, np.arange(2, 12, dtype=np.int32), Sampling(1.0, 4, 1), 0)

    async def orders(self) -> dict[str, tuple[str, float]]:
        engine = self.engine
        first = self.publish()
        told = {"prepare": await self.stopped(engine.prepare(first))}
        engine._sync = WeightSyncSettings(update_timeout_s=PATIENCE_S)
        await self.again(engine.prepare(first), "after prepare")
        engine._sync = WeightSyncSettings(update_timeout_s=LIMIT_S)
        told["discard"] = await self.stopped(engine.discard(first.version))
        engine._sync = WeightSyncSettings(update_timeout_s=PATIENCE_S)
        second = self.publish()
        await self.again(engine.prepare(second), "after discard")
        engine._sync = WeightSyncSettings(update_timeout_s=LIMIT_S)
        told["sleep"] = await self.stopped(engine.sleep())
        told["commit"] = await self.stopped(engine.commit(second.version))
        return told

    def close(self) -> None:
        self._publisher.close()


async def main(folder: Path, segments: Path) -> None:
    os.environ.update(vllm_environment("cpu", os.environ))
    vllm_engine.BREAK_OFF_S = BREAK_OFF_S
    subject = Subject(folder, segments)
    await subject.engine.start()
    try:
        print(json.dumps(await subject.orders()))
    finally:
        await subject.engine.close()
        subject.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
