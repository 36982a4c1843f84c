"""Whatever is asked of an engine whose process was killed says how it ended."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from telescope.config.parts import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.children import REAPED_S, Children
from telescope.inference.engine import EngineDead
from telescope.inference.vllm_engine import VllmEngine
from telescope.inference.vllm_options import ServerPlan
from telescope.records import Sampling
from tests.inference.conftest import MAX_MODEL_LEN, RUN, Served

LONG = Sampling(0.3, 10**6, 1)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(180)
async def test_each_call_to_a_killed_engine_tells_the_signal(served: Served, vllm_folders: dict[str, Path]) -> None:
    inference = InferenceSettings(max_model_len=MAX_MODEL_LEN, cpu_kv_cache_mb=64, http=False)
    plan = ServerPlan(ModelSettings(name="old"), vllm_folders["old"], inference, "cpu", 8, 0, RUN)
    engine, before = VllmEngine(plan, WeightSyncSettings(update_timeout_s=30.0)), children()
    await engine.start()
    try:
        manifest = served.publish("new")
        await engine.prepare(manifest)
        ids = np.arange(2, 12, dtype=np.int32)
        asked = asyncio.create_task(engine.generate("asked", ids, LONG, 0))
        while not await engine.running():
            await asyncio.sleep(0.01)
        for pid in children() - before:
            os.kill(pid, signal.SIGKILL)
        told = await engine.dead()
        assert "was killed by SIGKILL" in told
        later = msgspec.structs.replace(manifest, version=manifest.version + 1)
        calls = {  # a commit first: whatever goes wrong in it may have left a mixture, and that is not what happened here
            "commit": engine.commit(manifest.version),
            "generate, begun before": asked,
            "generate": engine.generate("later", ids, LONG, 0),
            "discard": engine.discard(manifest.version),
            "prepare": engine.prepare(later),
            "compare": engine.compare(manifest.version),
            "running": engine.running(),
        }
        for name, call in calls.items():
            with pytest.raises(EngineDead) as raised:
                async with asyncio.timeout(30):
                    await call
            assert str(raised.value) == told, name
    finally:
        await engine.close()


def hang() -> None:
    signal.pause()


@pytest.mark.asyncio
async def test_an_exit_code_that_another_thread_is_slow_to_write_down_is_waited_for() -> None:
    watcher = Children()
    process = multiprocessing.get_context("fork").Process(target=hang)
    process.start()
    watcher.watch_new()
    popen = process._popen  # type: ignore[attr-defined]
    poll, looks = popen.poll, []

    def late(flag: int = os.WNOHANG) -> int | None:  # what Popen.poll answers while another thread holds the status
        looks.append(flag)
        return None if len(looks) < 12 else poll(flag)

    popen.poll = late
    process.kill()
    async with asyncio.timeout(REAPED_S + 30):
        assert "was killed by SIGKILL" in await watcher.first_end()
    assert len(looks) >= 12
    watcher.stop_watching()
    watcher.end_all(5)
