"""Hosts for a run on several machines, all on this one.

Where this user may make network namespaces, each host has its own network (10.77.0.1, .2, …, joined by a bridge), its own
/dev/shm, host name and, if asked for, its own file system below a folder; a link is cut by taking the interface down. Elsewhere
a host is an address 127.0.0.x, and a link is cut by stopping every process of the host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.deadlines import refuse_late
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150.0
PORT = 29_433
"""In namespaces of its own nobody else has it."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)


def namespaces_work() -> bool:
    """Whether this user can make what a host needs."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare", "mount", "hostname"))):
        return False
    name = f"tel{os.getpid()}t"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "br0", "type", "bridge")
        ip("-n", name, "link", "add", "a0", "type", "veth", "peer", "name", "b0")
        script = "mount -t tmpfs tmpfs /dev/shm && hostname a"
        entered = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "--uts", "sh", "-c", script]
        return subprocess.run(entered, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=60, check=False)


class Hosts:
    """`count` hosts, and the commands that run on them. `apart`: a folder of which each host but the first sees its own."""

    def __init__(self, count: int, output: Path, apart: Path | None = None) -> None:
        self.real = namespaces_work()
        self._output, self._apart = output, apart
        self._names = [f"tel{os.getpid()}h{host}" for host in range(count)]
        self._switch = f"tel{os.getpid()}s"
        self.commands: dict[int, subprocess.Popen[bytes]] = {}
        self.seen: dict[int, set[psutil.Process]] = {host: set() for host in range(count)}
        self.python, self.cwd = sys.executable, ROOT
        """Those of another installation may be set before anything is started."""
        self.port = PORT
        """For whatever has to be told one: of the first host."""
        if self.real:
            self._wire_up()
        else:
            self.port = free_port(self.address(0))

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}" if self.real else f"127.0.0.{host + 1}"

    def _wire_up(self) -> None:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        for host, name in enumerate(self._names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{host}", "netns", self._switch)
            ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", self._switch, "link", "set", f"port{host}", "master", "br0", "up")

    def start(self, host: int, *command: str) -> None:
        """A Python command (`-m`, module, arguments) on a host."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "LD_PRELOAD": ""}
        if self.cwd != ROOT:
            environment.pop("PYTHONPATH", None)
        with self._said(host).open("ab") as output:
            self.commands[host] = subprocess.Popen(
                [*self._entrance(host), self.python, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.cwd,
                env=environment,
                start_new_session=True,
            )

    def _entrance(self, host: int) -> Sequence[str]:
        """All of it ends in `exec`: the process that was started is the command itself."""
        if not self.real:
            return ()
        steps = [f"mount -t tmpfs tmpfs /dev/shm && hostname box{host}"]
        if self._apart is not None and host:
            steps.append(f"mount -t tmpfs tmpfs '{self._apart}'")
        script = " && ".join([*steps, 'exec "$@"'])
        return ("nsenter", f"--net=/run/netns/{self._names[host]}", "unshare", "--mount", "--uts", "sh", "-c", script, "sh")

    def settings(self, host: int) -> list[str]:
        """What differs from host to host, beside its number."""
        return [f"cluster.interface={self.address(host)}"] if not self.real else []

    def _said(self, host: int) -> Path:
        return self._output / f"said-{host}.txt"

    def said(self, host: int) -> str:
        return self._said(host).read_text(errors="replace")

    def remember(self) -> None:
        for host, command in self.commands.items():
            try:
                self.seen[host] |= set(psutil.Process(command.pid).children(recursive=True))
            except psutil.NoSuchProcess:
                continue

    def until(self, done: object, what: str) -> None:
        """`done()` is true. Fails with what every host has said."""
        assert callable(done)
        deadline = time.monotonic() + LIMIT_S
        while not done():
            self.remember()
            refuse_late(deadline, f"not {what}:\n" + self.everything())
            assert all(command.poll() is None for command in self.commands.values()), (
                f"ended before {what}:\n" + self.everything()
            )
            time.sleep(0.05)

    def wait(self, host: int) -> int:
        deadline = time.monotonic() + LIMIT_S
        while (code := self.commands[host].poll()) is None:
            self.remember()
            refuse_late(deadline, f"host {host} did not end:\n" + self.everything())
            time.sleep(0.1)
        return code

    def everything(self) -> str:
        return "\n".join(f"== host {host}\n{self.said(host)[-3000:]}" for host in self.commands)

    def cut(self, host: int) -> None:
        """Take the host off the network."""
        if self.real:
            ip("-n", self._switch, "link", "set", f"port{host}", "down")
        else:
            self._signal(host, signal.SIGSTOP)

    def thaw(self, host: int) -> None:
        """Where a cut host stands still, it goes on; its deadlines are long past."""
        if not self.real:
            self._signal(host, signal.SIGCONT)

    def _signal(self, host: int, number: int) -> None:
        self.remember()
        for process in (psutil.Process(self.commands[host].pid), *self.seen[host]):
            if process.is_running():
                process.send_signal(number)

    def left(self, limit_s: float = 60.0) -> list[str]:
        """Processes that still live after at most `limit_s`."""
        every = set().union(*self.seen.values())
        _, alive = psutil.wait_procs(every, timeout=limit_s)
        return [str(process) for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    def close(self) -> None:
        for host, command in self.commands.items():
            if command.poll() is None:
                self._signal(host, signal.SIGCONT)
                os.killpg(command.pid, signal.SIGKILL)
                command.wait()
        for process in set().union(*self.seen.values()):
            if process.is_running():
                process.kill()
        for name in (*self._names, self._switch) if self.real else ():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=60, check=False)
