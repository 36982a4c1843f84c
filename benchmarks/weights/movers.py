"""The processes of the wire benchmark: `python -m benchmarks.weights.movers sender|receiver JSON`; orders come as lines.

Both ends are those of a run (`Transport.publisher` and `receiver`); the model is random tensors, the engine a place in memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.shapes import SHAPES, random_tensors
from telescope.backends.fsdp import gather
from telescope.config.sections import WeightSyncSettings
from telescope.records import TensorSpec, WeightGroup, WeightManifest
from telescope.weights.base import ServerEnd, TrainerEnd
from telescope.weights.buckets import Bucket, ModelTensor, aligned, lay_out
from telescope.weights.sampled_digest import digests, text
from telescope.weights.transport_choice import transport_named

RUN = "wire-benchmark"
MIB = 1 << 20


def raw_broadcast(asked: dict[str, Any], rank: int) -> float:
    """Bytes/s of the best plain broadcast; a collective of all processes."""
    on_gpu = asked["device"] != "cpu"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(asked["port"])}
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=asked["size"], timeout=timedelta(seconds=60))
    best = 0.0
    for nbytes in (256 * MIB, 1024 * MIB) if on_gpu else (4 * MIB, 16 * MIB):
        data = torch.ones(nbytes, dtype=torch.uint8, device=asked["device"])
        for _ in range(3):
            dist.broadcast(data, 0)
        settle(asked["device"])
        started = time.perf_counter()
        for _ in range(10):
            dist.broadcast(data, 0)
        settle(asked["device"])
        best = max(best, nbytes * 10 / (time.perf_counter() - started))
        del data
    dist.barrier()
    dist.destroy_process_group()
    return best


def settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


class Model:
    """Random tensors on one device, as a backend offers them."""

    def __init__(self, shape: str, device: str, dtype: torch.dtype) -> None:
        self.device = device
        self.parameters: dict[str, Tensor] = random_tensors(SHAPES[shape], device, dtype, seed=0)
        self._packer = gather.Packer(lambda: self.parameters, 0, 1)

    def layout(self) -> tuple[ModelTensor, ...]:
        return gather.layout(self.parameters)

    def pack(self, bucket: Bucket, out: Tensor | None) -> None:
        self._packer.pack(bucket, out)

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        yield from gather.host_tensors(self.parameters, self.device, 0, 1, dtype)

    def change(self) -> None:
        """Other weights at every place."""
        for tensor in self.parameters.values():
            tensor.neg_()

    def everything(self, dtype: str | None) -> str:
        """The digest of every tensor as the other side shall have it."""
        specs, _ = lay_out(self.layout(), dtype)
        found = [digests(self._packed(spec), [spec], whole=True, start=spec.offset) for spec in specs]
        return text(torch.cat(found), whole=True)

    def _packed(self, spec: TensorSpec) -> Tensor:
        bucket = Bucket(spec.offset, aligned(spec.offset + spec.nbytes), (spec,))
        out = torch.zeros(bucket.nbytes, dtype=torch.uint8, device=self.device)
        gather.pack(self.parameters, bucket, out, 0, 1)  # once, and its memory is not kept
        return out


def sender(asked: dict[str, Any]) -> None:
    device, dtype = asked["device"], asked["dtype"]
    say(raw=raw_broadcast(asked, 0) if asked["raw"] else 0.0)
    model = Model(asked["shape"], device, getattr(torch, asked["master"]))
    publisher: Any = None
    for order in orders():
        if "setup" in order:
            if publisher is not None:
                publisher.close()
            settings = WeightSyncSettings.model_validate(order["setup"])
            end = TrainerEnd(RUN, Path(asked["folder"]), device, settings, dtype)
            publisher = transport_named(order["transport"]).publisher(model, end)
            say(ready=True)
        elif "publish" in order:
            model.change()
            settle(device)
            started = time.perf_counter()
            manifest = publisher.publish(order["publish"])
            say(manifest=msgspec.json.encode(manifest).decode(), start=started, stop=time.perf_counter())
        elif "send" in order:
            started = time.perf_counter()
            publisher.send(order["send"], msgspec.convert(order["group"], WeightGroup))
            say(start=started, stop=time.perf_counter())
        else:
            say(everything=model.everything(dtype))
    if publisher is not None:
        publisher.close()


def receiver(asked: dict[str, Any]) -> None:
    device, name = asked["device"], f"server-{asked['rank'] - 1}/0"
    if asked["raw"]:
        raw_broadcast(asked, asked["rank"])
    receivers: dict[str, Any] = {}
    staging = torch.zeros(0, dtype=torch.uint8)
    for order in orders():
        if "manifest" in order:
            manifest = msgspec.json.decode(order["manifest"], type=WeightManifest)
            if staging.numel() != manifest.nbytes:
                staging = torch.zeros(manifest.nbytes, dtype=torch.uint8, device=device)
            say(ready=True)
            continue
        if order.get("everything"):
            say(everything=text(digests(staging, manifest.tensors, whole=True), whole=True))
            continue
        if manifest.transport not in receivers:
            receivers[manifest.transport] = transport_named(manifest.transport).receiver(ServerEnd(RUN, name, device, 60.0))
        group = None if order["group"] is None else msgspec.convert(order["group"], WeightGroup)
        settle(device)
        started = time.perf_counter()
        receivers[manifest.transport].receive(manifest, group, staging, 60.0)
        settle(device)
        say(start=started, stop=time.perf_counter())
    for one in receivers.values():
        one.close()


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


if __name__ == "__main__":
    {"sender": sender, "receiver": receiver}[sys.argv[1]](json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may not outlive the interpreter
