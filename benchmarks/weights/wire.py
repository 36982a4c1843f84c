"""How fast a version of the weights gets from a trainer process into a server worker's staging memory, without any engine.

    python -m benchmarks.weights.wire --device cpu --shapes tiny                      # dry run over gloo, no GPU
    python -m benchmarks.weights.wire --shapes 0.5B 0.6B 3B 4B --gpus 0 1             # NCCL, one process a card
    python -m benchmarks.weights.wire --shapes 3B --transports cuda_ipc --gpus 0 0    # two processes on one card

One process holds random weights (float32 as a trainer does, bfloat16 on the way), and one for each further GPU receives. Each
version's weights differ from those before, and every tensor of the last version is compared on both sides. Prints a table and,
with `--out`, writes JSON:

- raw: the best of a plain broadcast by torch.distributed in the same processes, of 256 MiB and 1 GiB (CPU: 4 and 16 MiB)
- wire: from the order to send until the last receiver has everything and has compared the sample; the median and the best
  over `--updates`. Receivers have read the manifest before; their order to receive comes just ahead of the sender's. Where
  there is nothing to send (cuda_ipc, shared_memory, disk) the time of the publishing is counted, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

WARM_UP = 2
COLLECTIVE = ("nccl", "gloo")


class Peer:
    """One of the processes, by lines of JSON."""

    def __init__(self, role: str, gpu: str, asked: dict[str, Any], stack: ExitStack) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
        environment |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.weights.movers", role, json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        stack.callback(self.end)

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def said(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended with code {self.process.wait(30)}; its words are above")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()


class Pair:
    """A trainer and its servers."""

    def __init__(self, trainer: Peer, servers: Sequence[Peer]) -> None:
        self.trainer, self.servers = trainer, servers
        self._version, self._epoch, self._manifest = 0, 0, ""

    def set_up(self, transport: str, settings: dict[str, Any]) -> None:
        self._transport = transport
        self._epoch += 1
        self.trainer.tell(setup=settings, transport=transport)
        self.trainer.said()

    def update(self) -> float:
        """Seconds from the order until the last receiver has all."""
        self._version += 1
        self.trainer.tell(publish=self._version)
        published = self.trainer.said()
        self._manifest = published["manifest"]
        names = [f"server-{index}/0" for index in range(len(self.servers))]
        group = {"epoch": self._epoch, "members": ["trainer-0", *names]} if self._transport in COLLECTIVE else None
        for server in self.servers:
            server.tell(manifest=self._manifest)
        for server in self.servers:
            server.said()
        told = time.perf_counter()
        for server in self.servers:
            server.tell(group=group)
        start: float = told - (published["stop"] - published["start"])  # not what lay between publishing and receiving
        if group is not None:
            self.trainer.tell(send=self._version, group=group)
            start = self.trainer.said()["start"]
        return float(max(server.said()["stop"] for server in self.servers)) - start

    def nbytes(self) -> int:
        return int(json.loads(self._manifest)["nbytes"])

    def agree(self) -> bool:
        """Whether every tensor is the same on both sides."""
        self.trainer.tell(everything=True)
        for server in self.servers:
            server.tell(everything=True)
        wanted = self.trainer.said()["everything"]
        return all(server.said()["everything"] == wanted for server in self.servers)


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    print(
        f"{'shape':6} {'transport':13} {'pieces':11} {'GB':>6} {'wire s':>8} {'best s':>8} {'GB/s':>7} {'raw':>7} share  same"
    )
    for shape in given.shapes:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="telescope-wire-"))
            rows += measure_shape(given, shape, folder, stack)
    return rows


def measure_shape(given: argparse.Namespace, shape: str, folder: str, stack: ExitStack) -> list[dict[str, Any]]:
    device = "cpu" if given.device == "cpu" else "cuda:0"
    transports = given.transports or (["gloo"] if device == "cpu" else ["nccl"])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    asked = {"device": device, "size": len(given.gpus), "port": port, "shape": shape, "master": given.master}
    asked |= {"dtype": "bfloat16", "folder": folder, "raw": len(set(given.gpus)) == len(given.gpus)}
    peers = [
        Peer("receiver" if rank else "sender", gpu if device != "cpu" else "", {**asked, "rank": rank}, stack)
        for rank, gpu in enumerate(given.gpus)
    ]
    raw = peers[0].said()["raw"]
    pair, rows = Pair(peers[0], peers[1:]), []
    for transport in transports:
        for pieces, settings in pieces_of(transport, given.bucket_mb):
            pair.set_up(transport, settings)
            times = [pair.update() for _ in range(WARM_UP + given.updates)][WARM_UP:]
            median, nbytes = statistics.median(times), pair.nbytes()
            row = {"shape": shape, "transport": transport, "pieces": pieces, "nbytes": nbytes, "times_s": times}
            row |= {"median_s": median, "best_s": min(times), "bytes_per_s": nbytes / median, "raw_bytes_per_s": raw}
            rows.append(row | {"same": pair.agree()})
            show(rows[-1])
    return rows


def pieces_of(transport: str, bucket_mb: Sequence[int]) -> list[tuple[str, dict[str, Any]]]:
    if transport not in (*COLLECTIVE, "cuda_ipc"):
        return [("whole", {})]
    cut = [(f"{size} MiB", {"bucket_mb": size}) for size in bucket_mb]
    return [*cut, ("per tensor", {"mode": "per_tensor"})] if transport in COLLECTIVE else cut


def show(row: dict[str, Any]) -> None:
    raw = row["raw_bytes_per_s"]
    share = f"{row['bytes_per_s'] / raw:5.0%}" if raw else "    –"
    print(
        f"{row['shape']:6} {row['transport']:13} {row['pieces']:11} {row['nbytes'] / 1e9:6.2f} {row['median_s']:8.4f} "
        f"{row['best_s']:8.4f} {row['bytes_per_s'] / 1e9:7.1f} {raw / 1e9:7.1f} {share}  {'yes' if row['same'] else 'NO'}",
        flush=True,
    )


def machine(device: str) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if device != "cpu":
        found |= {"card": torch.cuda.get_device_name(0), "cards": torch.cuda.device_count()}
        found |= {
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
            "cuda": torch.version.cuda,
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.5B", "0.6B", "3B", "4B"])
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--gpus", nargs="+", default=["0", "1"], help="the trainer's, then one a receiver")
    parser.add_argument("--transports", nargs="+", default=[], help="default: nccl, on CPUs gloo")
    parser.add_argument("--bucket-mb", nargs="+", type=int, default=[256])
    parser.add_argument("--master", default="float32", help="dtype of the trainer's weights")
    parser.add_argument("--updates", type=int, default=7)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = measure(given)
    if given.out is not None:
        found = {"machine": machine(given.device), "command": sys.argv[1:], "rows": rows}
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
