"""A server that sleeps while a trainer on its GPU trains: `python -m tests.gpu.check_sleep` (one GPU).

Another process holds random weights of a shape on the same card and hands versions over as a run does (CUDA IPC). For both
ways of sleeping: what runs is answered first, what comes meanwhile waits and is of the next version, the other process can take
most of the card, and after waking the same weights give the same answers and other weights others. Prints seconds and MiB;
exits 0 only if all holds. `--device cpu` plays it where nothing is freed. No pytest module: it needs a GPU.

A whole run in turns (the server's log says when it fell asleep and how long each commit, with the waking, took):

    CUDA_VISIBLE_DEVICES=0 python -m telescope.run experiment=reverse_letters cluster=one_gpu_in_turns number_of_steps=20
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.shapes import SHAPES
from benchmarks.weights.children import Child, start_trainer
from benchmarks.weights.pause import machine
from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.engine import Generated
from telescope.inference.vllm.engine import VllmEngine
from telescope.inference.vllm.options import ServerPlan, vllm_environment
from telescope.records import Sampling, WeightManifest
from tests.gpu.needed import need_gpus

RUN = "sleep-check"
WAYS = ("keep_weights", "drop_weights")
PROMPT = np.arange(5, 69, dtype=np.int32)
CLOSE = 0.02
"""Nats between two answers of the same weights, on one card, alone in their batches."""


class Check:
    def __init__(self, engine: VllmEngine, trainer: Child, card: str, fill: float) -> None:
        self._engine, self._trainer, self._card, self._fill = engine, trainer, card, fill
        self.facts: list[tuple[str, bool, str]] = []
        self._version = self._asked = 0

    def note(self, name: str, good: bool, said: str) -> None:
        self.facts.append((name, good, said))
        print("ok " if good else "BAD", name, "|", said, flush=True)

    async def answer(self, tokens: int = 64) -> Generated:
        self._asked += 1
        return await self._engine.generate(f"r{self._asked}", PROMPT, Sampling(1.0, tokens, 7), 0)

    async def update(self, redraw: bool) -> tuple[float, float]:
        """Seconds to prepare and to commit the next version."""
        self._version += 1
        published = await self._trainer.ask(publish=self._version, redraw=redraw)
        started = time.perf_counter()
        await self._engine.prepare(msgspec.convert(published["manifest"], WeightManifest))
        prepared = time.perf_counter()
        state = await self._engine.commit(self._version)
        self.note("version", state.version == self._version, f"{state}")
        return prepared - started, time.perf_counter() - prepared

    async def way(self, way: str, cycles: int) -> None:
        inference = self._engine._plan.inference.model_copy(update={"sleep_while_training": way})
        self._engine._plan = replace(self._engine._plan, inference=inference)
        await self.update(redraw=True)
        before = await self.answer()
        times: dict[str, list[float]] = {"sleep": [], "prepare": [], "wake and commit": []}
        for cycle in range(cycles):
            running = asyncio.create_task(self.answer(400))
            await asyncio.sleep(0.05)
            awake, started = used(self._card), time.perf_counter()
            if cycle == 0:  # with a request in flight; the others are timed without
                await self._engine.sleep()
                self.note(f"{way}: what runs is answered first", running.done(), f"{len((await running).ids)} tokens")
            else:
                await running
                started = time.perf_counter()
                await self._engine.sleep()
                times["sleep"].append(time.perf_counter() - started)
            self.note(f"{way}: memory", True, f"{awake} MiB awake, {used(self._card)} asleep (whole card)")
            late = asyncio.create_task(self.answer())
            filled = await self._trainer.ask(fill=self._fill)
            self.note(f"{way}: a step may take the card", True, f"{filled['bytes'] / 2**30:.1f} GiB = {self._fill:.0%}")
            self.note(f"{way}: what comes meanwhile waits", not late.done(), "")
            prepare_s, commit_s = await self.update(redraw=cycle == cycles - 1)
            times["prepare"].append(prepare_s)
            times["wake and commit"].append(commit_s)
            self.compare(way, before, await late, same=cycle < cycles - 1)
        for name, seconds in times.items():
            first, rest = seconds[0], seconds[1:] or seconds
            print(f"{way}: {name} {first:.3f} s first, then {statistics.median(rest):.3f}", flush=True)

    def compare(self, way: str, before: Generated, after: Generated, same: bool) -> None:
        equal = before.ids.tolist() == after.ids.tolist()
        apart = float(np.abs(before.logprobs - after.logprobs).max()) if equal else float("inf")
        good = (apart < CLOSE) if same else apart > CLOSE
        good = good and set(after.versions.tolist()) == {self._version}
        self.note(f"{way}: after waking with {'the same' if same else 'other'} weights", good, f"{apart:.2g} nats")


def used(card: str) -> int:
    """MiB of the whole card; 0 without one."""
    if not card:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", card]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()[0])


async def check(arguments: argparse.Namespace, folder: Path, directory: Path) -> list[tuple[str, bool, str]]:
    gpu = arguments.device == "gpu"
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if gpu else ""
    sync = WeightSyncSettings(staging=arguments.staging, update_timeout_s=120.0)
    asked = {
        "shape": arguments.shape, "device": "cuda:0" if gpu else "cpu", "dtype": "bfloat16" if gpu else "float32", "run": RUN,
        "folder": str(folder), "directory": str(directory), "transport": "cuda_ipc" if gpu else "shared_memory",
        "weight_sync": sync.model_dump(mode="json"),
    }  # fmt: skip
    trainer = await start_trainer(asked, os.environ | {"CUDA_VISIBLE_DEVICES": card})
    await trainer.answer()
    os.environ["CUDA_VISIBLE_DEVICES"] = card
    os.environ.update(vllm_environment(arguments.device, os.environ))
    settings = InferenceSettings(
        http=False, max_model_len=1024, gpu_memory_utilization=arguments.share, cpu_kv_cache_mb=64, max_num_seqs=64,
        sleep_while_training="keep_weights",
    )  # fmt: skip
    engine = VllmEngine(ServerPlan(ModelSettings(name=arguments.shape), folder, settings, arguments.device, 64, 0, RUN), sync)
    started = time.perf_counter()
    await engine.start()
    print(f"ready after {time.perf_counter() - started:.1f} s; {engine.opened}", flush=True)
    subject = Check(engine, trainer, card, arguments.fill)
    try:
        for way in WAYS:
            await subject.way(way, arguments.cycles)
    finally:
        await trainer.stop()
        await engine.close()
    return subject.facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="3B")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--share", type=float, default=0.7, help="of the card, for the server")
    parser.add_argument("--fill", type=float, default=0.75, help="of the card, for the other process while the server sleeps")
    parser.add_argument("--staging", choices=["full", "host", "none"], default="none")
    parser.add_argument("--cycles", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.device == "gpu":
        need_gpus(instead="--device cpu plays it where nothing is freed")
    with tempfile.TemporaryDirectory() as root:
        facts = asyncio.run(check(arguments, Path(root) / "model", Path(root)))
    print(machine(arguments.device == "gpu"))
    return 0 if facts and all(good for _, good, _ in facts) else 1


if __name__ == "__main__":
    sys.exit(main())
