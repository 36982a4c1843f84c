"""One member of a broadcast group as a process: `python -m tests.weights.member '<json>'`, one JSON line out a finished part.

A trainer rank publishes and sends what a seed makes up (through the real gather where there are two ranks); a server worker
receives. What a member is to do wrong, its orders say too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from telescope.backends.fsdp import gather
from telescope.config.sections import WeightSyncSettings
from telescope.records import WeightGroup, WeightManifest
from telescope.weights.base import Publisher, Receiver, ServerEnd, TrainerEnd, TransferFailed, WeightsCorrupt
from telescope.weights.broadcast.rendezvous import Rendezvous
from telescope.weights.buckets import Bucket, ModelTensor
from telescope.weights.transport_choice import transport_named

SHAPES = {"embed": (33, 24), "one_row": (1, 40), "norm": (24,), "odd": (7, 3), "big": (64, 96), "last": (5,)}
"""Rows that two ranks can't halve, one that only rank 0 has, sizes that are not multiples of 64 bytes."""


def made_up(seed: int, bulk: int) -> dict[str, Tensor]:
    """`bulk`: rows of one more tensor, 4 KB each: so much does not fit into the sockets' buffers."""
    random = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    return found | ({"bulk": torch.ones(bulk, 1024)} if bulk else {})


class Model:
    """Parameters sharded over the ranks, as FSDP's are."""

    def __init__(self, rank: int, size: int, bulk: int, device: str) -> None:
        self.size, self.bulk, self.device, self.packed = size, bulk, device, 0
        self.packer = gather.Packer(lambda: self.parameters, rank, size)
        self.set(0)

    def set(self, seed: int) -> None:
        whole = {name: tensor.to(self.device) for name, tensor in made_up(seed, self.bulk).items()}
        if self.size > 1:
            mesh = init_device_mesh("cpu", (self.size,))
            whole = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
        self.parameters = whole

    def layout(self) -> tuple[ModelTensor, ...]:
        return gather.layout(self.parameters)

    def pack(self, bucket: Bucket, out: Tensor | None) -> None:
        self.packed += 1
        self.packer.pack(bucket, out)


class SmallBuckets(WeightSyncSettings):
    """Pieces of so many bytes, where settings count in MB."""

    most_bytes: int

    @property
    def bucket_bytes(self) -> int:
        return self.most_bytes


def sync_of(told: dict[str, Any]) -> WeightSyncSettings:
    staging = told.get("staging")
    return SmallBuckets(
        most_bytes=told["bucket_bytes"],
        init_timeout_s=told["init_timeout_s"],
        update_timeout_s=told["update_timeout_s"],
        cpu_staging=staging is not None,
        pin_memory=staging != "pageable",
        compare="all" if told.get("compare_all") else "sample",
    )


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def hear() -> dict[str, Any] | None:
    """The next order, or None at the end."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def trainer(told: dict[str, Any]) -> None:
    rank, size, device = told["rank"], told["ranks"], told["device"]
    if size > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(told["port"]), "GLOO_SOCKET_IFNAME": "lo"}
        dist.init_process_group("gloo", rank=rank, world_size=size)
    while (order := hear()) is not None:
        if "setup" in order:
            settings = order["setup"]
            between_hosts = settings.pop("between_hosts")
            model = Model(rank, settings.pop("ranks"), settings.pop("bulk"), device)
            end = TrainerEnd("run", Path("/nowhere"), device, sync_of(settings), settings.get("dtype"), rank)
            opening = mock.patch.object(Rendezvous, "open", Rendezvous.listen) if between_hosts else nullcontext()
            with opening:
                publisher = transport_named(told["transport"]).publisher(model, end)
        elif "publish" in order:
            model.set(order["publish"])
            manifest = publisher.publish(order["publish"])
            say(manifest=None if manifest is None else msgspec.json.encode(manifest).decode())
        elif "abort" in order:
            publisher.abort(order["abort"])
        else:
            threading.Thread(target=send, args=(publisher, order, model), daemon=True).start()


def send(publisher: Publisher, order: dict[str, Any], model: Model) -> None:
    started, packed = time.monotonic(), model.packed
    try:
        checksum = publisher.send(order["send"], msgspec.convert(order["group"], WeightGroup))
        say(sent=checksum, seconds=time.monotonic() - started, packed=model.packed - packed)
    except TransferFailed as error:
        say(failed=str(error), missing=error.missing, seconds=time.monotonic() - started, packed=model.packed - packed)


def server(told: dict[str, Any]) -> None:
    while (order := hear()) is not None:
        if "setup" in order:
            end = ServerEnd("run", told["name"], told["device"], order["setup"]["init_timeout_s"])
            receiver = transport_named(told["transport"]).receiver(end)
            deadline_s, bulk = order["setup"]["update_timeout_s"], order["setup"]["bulk"]
        elif "cancel" in order:
            receiver.cancel(order["cancel"])
        else:
            threading.Thread(target=receive, args=(receiver, order, deadline_s, bulk, told["device"]), daemon=True).start()


def receive(receiver: Receiver, order: dict[str, Any], deadline_s: float, bulk: int, device: str) -> None:
    manifest = msgspec.json.decode(order["manifest"], type=WeightManifest)
    group = msgspec.convert(order["group"], WeightGroup)
    flat = torch.zeros(manifest.nbytes, dtype=torch.uint8, device=device)

    def load(bucket: Bucket, data: Tensor) -> None:
        if order.get("die_at") == bucket.start:
            os.kill(os.getpid(), signal.SIGKILL)
        if order.get("stop_at") == bucket.start:
            say(stopped=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        flat[bucket.start : bucket.stop].copy_(data)

    started = time.monotonic()
    try:
        if order.get("whole"):
            checksum = receiver.receive(manifest, group, flat, deadline_s)
        else:
            checksum = receiver.receive_buckets(manifest, group, load, deadline_s)
    except (TransferFailed, WeightsCorrupt) as error:
        say(failed=str(error), missing=getattr(error, "missing", ()), seconds=time.monotonic() - started)
        return
    wanted, flat = made_up(manifest.version, bulk), flat.cpu()
    same = [
        torch.equal(
            flat[spec.offset :][: spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape),
            wanted[spec.name].to(getattr(torch, spec.dtype)),
        )
        for spec in manifest.tensors
    ]
    say(received=checksum, same=sum(same), of=len(wanted))


if __name__ == "__main__":
    orders = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    (trainer if orders["role"] == "trainer" else server)(orders)
    os._exit(0)  # gloo's threads may not outlive the interpreter
