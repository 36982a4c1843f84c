"""Members of broadcast groups as child processes, and the orchestrator's part: who is told what, and what each answers."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tests.ports import free_port

PATIENCE_S = 90.0
"""This machine may be busy: imports of torch alone then take half a minute."""


class Member:
    def __init__(self, name: str, gpu: str = "", **told: Any) -> None:
        """`gpu`: the card that it is shown; it then speaks NCCL, else gloo."""
        self.name = name
        told |= {"device": "cuda:0", "transport": "nccl"} if gpu else {"device": "cpu", "transport": "gloo"}
        arguments = [sys.executable, "-m", "tests.weights.member", json.dumps({"name": name, **told})]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": gpu, "LD_PRELOAD": ""}
        environment |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, bufsize=1
        )
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def said(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Its next answer; fails at once where it has ended instead."""
        answer = self._said.get(timeout=patience_s)
        if answer is None:
            self._said.put(None)  # whoever asks next hears it too
            raise AssertionError(f"{self.name} ended with {self.process.wait(PATIENCE_S)} before it answered")
        return answer

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # an order that it died before reading
                    pipe.close()


class Company:
    """Trainer ranks and servers' workers; a context manager. `set_up` says which of the ranks take part, and how."""

    def __init__(self, ranks: int = 1, servers: int = 1, gpus: Sequence[str] = ()) -> None:
        """`gpus`: the trainer's, then each server's."""
        cards = [*gpus, *[""] * (1 + servers - len(gpus))]
        port = free_port()
        self.all_ranks = [
            Member(f"trainer-{rank}", cards[0], role="trainer", rank=rank, ranks=ranks, port=port) for rank in range(ranks)
        ]
        self.servers = [Member(f"server-{index}/0", cards[1 + index], role="server") for index in range(servers)]

    def set_up(self, ranks: int = 1, **settings: Any) -> Company:
        """A new publisher on each of the first `ranks` ranks, a new receiver in each server."""
        told = {"dtype": None, "bucket_bytes": 0, "init_timeout_s": 60.0, "update_timeout_s": 60.0, "bulk": 0}
        told |= {"between_hosts": False} | settings
        self.ranks = self.all_ranks[:ranks]
        for member in (*self.ranks, *self.living):
            member.tell(setup={"ranks": ranks, **told})
        return self

    @property
    def living(self) -> list[Member]:
        return [server for server in self.servers if server.process.poll() is None]

    def __enter__(self) -> Company:
        return self

    def __exit__(self, *error: object) -> None:
        for member in (*self.all_ranks, *self.servers):
            member.end()

    def publish(self, version: int) -> None:
        for rank in self.ranks:
            rank.tell(publish=version)
        self.manifest = [rank.said() for rank in self.ranks][0]["manifest"]  # noqa: RUF015 every rank is heard

    def begin(self, version: int, epoch: int, servers: list[Member] | None = None, **faults: dict[str, Any]) -> None:
        """`faults`: what a server of that index is to do wrong, e.g. `server_1={"die_at": 0}`."""
        chosen = self.servers if servers is None else servers
        group = {"epoch": epoch, "members": ["trainer-0", *(server.name for server in chosen)]}
        for server in chosen:
            if server.process.poll() is None:
                fault = faults.get(f"server_{self.servers.index(server)}", {})
                server.tell(manifest=self.manifest, group=group, **fault)
        for rank in self.ranks:
            rank.tell(send=version, group=group)

    def update(self, version: int, epoch: int, **how: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """One whole update: what the ranks and what the servers said."""
        self.publish(version)
        self.begin(version, epoch, **how)
        chosen = how.get("servers") or self.servers
        return [rank.said() for rank in self.ranks], [server.said() for server in chosen]
