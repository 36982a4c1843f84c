"""A serving process of the weight benchmark: a vLLM engine with generations in flight, told when to take a version.

Its argument is one JSON object (`Asked`). Its first line on stdout says that the engine generates; then it reads one order a
line from stdin and answers each with a line: `{"prepare": MANIFEST, "group": …}`, `{"commit": 3}`, `{"stop": true}`. Points in
time are those of `time.perf_counter`, which all processes of a host share.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np

from benchmarks.weights.children import LONGEST_LINE
from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.vllm.engine import VllmEngine
from telescope.inference.vllm.options import Device, ServerPlan
from telescope.records import Sampling, WeightGroup, WeightManifest
from telescope.wire.process import freeze_heap

AFTER_S = 0.2
STREAMS = 4


class Asked(msgspec.Struct):
    """What a server is to be. `share`: of its card; `requests`: generations in flight beside the streams."""

    name: str
    shape: str
    folder: str
    run: str
    device: Device
    share: float
    requests: int
    warm_s: float
    weight_sync: dict[str, Any]


@dataclass
class Clients:
    """Generations in flight at all times, and when each token of some of them came."""

    engine: VllmEngine
    running: int
    arrivals: list[list[float]] = field(default_factory=lambda: [[] for _ in range(STREAMS)])
    steps: list[float] = field(default_factory=list)
    wrong: int = 0
    collected: list[tuple[float, float]] = field(default_factory=list)
    """When each full collection of this process's garbage ended, and its seconds."""

    def watch_collector(self) -> None:
        began = 0.0

        def tell(phase: str, facts: dict[str, int]) -> None:
            nonlocal began
            if facts["generation"] < 2:
                return
            now = time.perf_counter()
            if phase == "start":
                began = now
            else:
                self.collected.append((now, now - began))

        gc.callbacks.append(tell)

    async def one(self, name: str) -> None:
        turn = 0
        while True:
            prompt = np.random.default_rng(turn).integers(2, 900, 64).astype(np.int32)
            turn += 1
            done = await self.engine.generate(f"{name}-{turn}", prompt, Sampling(1.0, 512, turn), 0)
            self.wrong += int((np.diff(done.versions) < 0).any())

    async def stream(self, index: int) -> None:
        """As an HTTP client with stream=true: each token when it comes."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        turn = 0
        while True:
            turn += 1
            params = SamplingParams(max_tokens=1024, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA)
            prompt = tokens_input(prompt_token_ids=list(range(2, 66)))
            async for _ in self.engine.client.generate(prompt, params, f"stream-{index}-{turn}"):
                self.arrivals[index].append(time.perf_counter())
            self.arrivals[index].append(math.nan)  # the way to the next request is no wait for a token

    def gaps(self, start: float, stop: float) -> list[float]:
        """Of each stream the longest wait between two tokens of one answer that reaches into the window."""
        found = []
        for times in self.arrivals:
            pairs = itertools.pairwise(times)
            found.append(max((b - a for a, b in pairs if b >= start and a <= stop), default=0.0))
        return found

    def usual(self, start: float, stop: float) -> float:
        """The median wait of the streams within the window."""
        waits = [b - a for times in self.arrivals for a, b in itertools.pairwise(times) if start < a and b < stop]
        return statistics.median(waits) if waits else 0.0

    def rate(self, start: float, stop: float) -> float:
        """Tokens/s of all requests: each step gives every one of them a token."""
        return sum(start <= at < stop for at in self.steps) * (self.running + STREAMS) / max(stop - start, 1e-9)


class Server:
    """Takes versions as it is told, and says what its clients saw of each."""

    def __init__(self, engine: VllmEngine, clients: Clients) -> None:
        self._engine, self._clients = engine, clients
        self._ordered = self._arrived = 0.0

    async def prepare(self, manifest: WeightManifest, group: WeightGroup | None) -> dict[str, float]:
        self._ordered = time.perf_counter()
        await self._engine.prepare(manifest, group)
        self._arrived = time.perf_counter()
        return {"arrived": self._arrived}

    async def commit(self, version: int) -> dict[str, float]:
        ordered = time.perf_counter()
        state = await self._engine.commit(version)
        assert state.version == version
        committed = time.perf_counter()
        await asyncio.sleep(AFTER_S)
        clients = self._clients
        return {
            "commit_s": committed - ordered,
            "gap_s": max(clients.gaps(ordered, committed + AFTER_S)),
            "usual_s": clients.usual(self._ordered - 1, self._ordered),
            "decode_during": clients.rate(self._ordered, self._arrived),
            "decode_before": clients.rate(self._ordered - 1, self._ordered),
            "collected_s": max((took for ended, took in clients.collected if ended >= ordered), default=0.0),
            "out_of_order": clients.wrong,
        }


async def serve(asked: Asked, answers: TextIO) -> None:
    sync = WeightSyncSettings.model_validate(asked.weight_sync)
    settings = InferenceSettings(
        http=False, max_model_len=2048, gpu_memory_utilization=asked.share, max_num_seqs=asked.requests + STREAMS
    )
    plan = ServerPlan(
        ModelSettings(name=asked.shape), Path(asked.folder), settings, asked.device, asked.requests, 0, asked.run, asked.name
    )
    engine = VllmEngine(plan, sync)
    started = time.perf_counter()
    await engine.start()
    freeze_heap()
    opened = [msgspec.to_builtins(worker) for worker in engine.opened]
    ready = {"start_s": time.perf_counter() - started, "workers": opened}
    clients = Clients(engine, asked.requests)
    clients.watch_collector()
    engine.on_step(lambda: clients.steps.append(time.perf_counter()))
    tasks = [asyncio.create_task(clients.one(f"r{index}")) for index in range(asked.requests)]
    tasks += [asyncio.create_task(clients.stream(index)) for index in range(STREAMS)]
    try:
        await asyncio.sleep(asked.warm_s)
        say(answers, ready)
        await obey(Server(engine, clients), tasks, answers)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.close()


async def obey(server: Server, tasks: list[asyncio.Task[None]], answers: TextIO) -> None:
    """Until told to stop, or whoever gives the orders is gone. Raises what a client met."""
    orders = asyncio.StreamReader(limit=LONGEST_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        order = json.loads(line)
        if "prepare" in order:
            manifest = msgspec.convert(order["prepare"], WeightManifest)
            answer = await server.prepare(manifest, msgspec.convert(order["group"], WeightGroup | None))
        elif "commit" in order:
            answer = await server.commit(order["commit"])
        else:
            return
        for task in tasks:
            if task.done():
                task.result()
        say(answers, answer)


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def main() -> int:
    with os.fdopen(os.dup(1), "w") as answers:  # what libraries print goes to stderr, here and in the engine's process
        os.set_inheritable(answers.fileno(), False)
        os.dup2(2, 1)
        asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=Asked), answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
