"""Meeting the other trainer ranks, and saying so in words when one of them is gone. Owns torch.distributed's start and end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from telescope.backends.base import RankLost, World

SIGNS = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset by peer",
    "timed out",
    "connect() timeout",
    "tcpstore",
    "wait timeout",
)
"""What torch's plain RuntimeErrors of a collective say, in lower case; it has no class of its own for gloo's."""


def join(world: World, timeout_s: float, *, host: bool = False) -> None:
    """Meet the other ranks, where `world` says; alone, nothing is opened. Raises after `timeout_s`. `host`: ranks with GPUs
    also exchange tensors that lie in host memory."""
    name = "gloo"
    if world.device.startswith("cuda"):
        torch.cuda.set_device(world.device)
        if world.memory_share < 1:  # running out is then this rank's own error, and not the server's beside it
            torch.cuda.set_per_process_memory_fraction(world.memory_share)
        name = "cpu:gloo,cuda:nccl" if host else "nccl"
    timeout = timedelta(seconds=timeout_s)
    if world.size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(name, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(name, store=_store(world, timeout), rank=world.rank, world_size=world.size, timeout=timeout)


def _store(world: World, timeout: timedelta) -> Any:
    """A file; or rank 0 listens on MASTER_ADDR alone, unless somebody does: torch by itself would on every address."""
    if (file := world.meeting_file) is not None:
        if not file.parent.is_dir():
            raise RankLost(f"the trainer ranks' meeting place {file} is not on this host, or its run is over")
        store = dist.FileStore(str(file), world.size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if world.rank or world.met:
        return dist.TCPStore(address, port, world.size, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, world.size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def watched(doing: str) -> Iterator[None]:
    """Turn a failed collective into `RankLost`: the fault is another rank's, or the network's, not this one's."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(sign in text.lower() for sign in SIGNS):
            raise
        raise RankLost(
            f"another trainer rank was lost, or did not answer in time, while {doing}: {text.splitlines()[0]}"
        ) from error
