"""Where the members of a broadcast group meet: a small key-value store that trainer rank 0 keeps for the run. Imports torch.

Owns addresses, the store, and the roll-call of an epoch: who is missing is said by name, before any communicator waits for it.
On one host it is a file in a folder that the run's user alone may enter. Between hosts torch has a store that listens, without
a password, on the one interface that reaches the run's hub. Its keys stand below a random word, which keeps no stranger out:
torch lists the keys to whoever connects. A sender who is not the trainer does not know the checksum that the trainer tells over
the hub, so that what it sent is refused.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from telescope.records import WeightGroup
from telescope.runlog import temporary
from telescope.weights.base import TransferFailed

LOOK_S = 0.01
"""Between two looks at the roll: the store can't be told to stop waiting, so nobody waits inside it."""
OPEN_S = 60.0
"""For rank 0 to reach the store in its own process: a busy host's share, not the members' time to meet."""


def facing(endpoint: str) -> str:
    """This host's address on the way to `tcp://host:port`, e.g. `127.0.0.1` where that is on loopback. Sends nothing. A
    `file://host/path` is on this host."""
    target = urlsplit(endpoint)
    if target.scheme == "file":
        return target.hostname or ""
    family = socket.AF_INET6 if ":" in (target.hostname or "") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port))
        address: str = probe.getsockname()[0]
        return address


class Rendezvous:
    """One process's end of the store. `location` is what a manifest tells the others: `tcp://host:port/word`, or
    `file://host/path`."""

    def __init__(self, store: Any, location: str) -> None:
        self.location = location
        self._store = dist.PrefixStore(urlsplit(location).path.strip("/"), store)  # type: ignore[attr-defined]

    @classmethod
    def open(cls, address: str) -> Rendezvous:
        """Rank 0's: a file where `address` is loopback, else `listen`."""
        if not ipaddress.ip_address(address).is_loopback:
            return cls.listen(address)
        file = temporary.make() / "store"
        return cls(dist.FileStore(str(file), -1), f"file://{_bracketed(address)}{file}")  # type: ignore[attr-defined]

    @classmethod
    def listen(cls, address: str) -> Rendezvous:
        """On a free port of `address` until the object is gone."""
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=True,
            timeout=timedelta(seconds=OPEN_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return cls(store, f"tcp://{_bracketed(address)}:{port}/{secrets.token_hex(8)}")

    @classmethod
    def join(cls, location: str, timeout_s: float) -> Rendezvous:
        """A receiver's. Raises `TransferFailed` where nobody answers within `timeout_s`."""
        target = urlsplit(location)
        if target.scheme == "file":
            file = Path(target.path)
            if not file.parent.is_dir():
                raise TransferFailed(f"the trainer's meeting place {file} is not on this host, or its run is over")
            return cls(dist.FileStore(str(file), -1), location)  # type: ignore[attr-defined]
        if target.scheme != "tcp" or not target.hostname or not target.port:
            raise TransferFailed(f"the weights' meeting place {location!r} is not a tcp://host:port/word")
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                target.hostname, target.port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            )
        except (dist.DistError, RuntimeError) as error:
            raise TransferFailed(
                f"the trainer's meeting place {target.hostname}:{target.port} did not answer within "
                f"weight_sync.init_timeout_s={timeout_s:g} s"
            ) from error
        return cls(store, location)

    def below(self, group: WeightGroup) -> Any:
        """The part of the store that belongs to an epoch alone."""
        return dist.PrefixStore(f"epoch-{group.epoch}", self._store)  # type: ignore[attr-defined]

    def roll_call(self, group: WeightGroup, me: str, timeout_s: float, cancelled: threading.Event) -> Any:
        """Say that `me` is here, and wait until all members are. Gives the epoch's store.

        Raises `TransferFailed`: with the names of the missing after `timeout_s`, once `cancelled` is set, or if it is gone.
        """
        store, end = self.below(group), time.monotonic() + timeout_s
        try:
            store.set(f"here/{me}", "1")
            missing = [member for member in group.members if member != me]
            while missing:
                missing = [member for member in missing if not store.check([f"here/{member}"])]
                if missing and cancelled.wait(LOOK_S):
                    raise TransferFailed(
                        f"the group of epoch {group.epoch} was broken off while {_names(missing)} were awaited", missing
                    )
                if missing and time.monotonic() > end:
                    raise TransferFailed(
                        f"{_names(missing)} did not join the group of epoch {group.epoch} within "
                        f"weight_sync.init_timeout_s={timeout_s:g} s",
                        missing,
                    )
        except (dist.DistError, RuntimeError) as error:
            if isinstance(error, TransferFailed):
                raise
            raise TransferFailed(f"the meeting place of epoch {group.epoch} is gone: {_said(error)}") from error
        return store


def fetch(store: Any, key: str, timeout_s: float, cancelled: threading.Event) -> bytes:
    """A value that another member is about to set. Raises `TransferFailed` after `timeout_s` or once `cancelled` is set."""
    end = time.monotonic() + timeout_s
    while not store.check([key]):
        if cancelled.wait(LOOK_S) or time.monotonic() > end:
            why = (
                "the group was broken off"
                if cancelled.is_set()
                else "trainer-0 has not told it within weight_sync.init_timeout_s"
            )
            raise TransferFailed(f"{key} of the group did not come: {why}")
    return bytes(store.get(key))


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _names(members: Sequence[str]) -> str:
    return ", ".join(members)


def _said(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
