"""A started process as the supervisor holds it: its shim, the lifeline, and how it ended.

Owns starting, orders and reports of one process; refuses to decide when to give them (`node.py` does).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import telescope._launch.child as child
from telescope._launch.environ import child_environment
from telescope._launch.plan import ProcessPlan
from telescope.runlog.layout import RunDirectory


@dataclass(frozen=True)
class Ending:
    """How and when a process ended, e.g. `Ending(status=-9, at=99.2)`."""

    status: int
    """Exit code, or minus the number of the signal that killed it."""
    at: float
    """CLOCK_MONOTONIC seconds, the same clock for all processes of a host."""
    shim_died: bool = False
    """Its shim was killed, and it with the shim."""
    ordered: bool = False
    """After an order of the supervisor: no cause of anything."""


class Held(Protocol):
    """A process as whoever decides about it sees it, on this host or another."""

    plan: ProcessPlan
    life: int
    pid: int | None
    ending: Ending | None
    gone: bool
    fenced: str
    give_up_at: float

    @property
    def name(self) -> str: ...
    @property
    def ended(self) -> bool: ...
    def leave(self, grace_s: float, number: int) -> None: ...
    def kill(self) -> None: ...
    def fence(self, reason: str, patience_s: float) -> None: ...
    def give_up(self) -> None: ...
    def read_reports(self) -> bool: ...


class Process:
    """One process of the plan under its shim."""

    def __init__(self, plan: ProcessPlan, shim: subprocess.Popen[bytes], lifeline: socket.socket, life: int = 1) -> None:
        self.plan = plan
        self.life = life
        self.fenced = ""
        """Why it was killed while the run goes on; empty where it was not."""
        self.give_up_at = float("inf")
        self.shim = shim
        self.lifeline = lifeline
        self.pidfd = os.pidfd_open(shim.pid)
        self.pid: int | None = None
        self.ending: Ending | None = None
        self.gone = False
        self.ordered = False
        self._partial = b""

    @classmethod
    def start(cls, plan: ProcessPlan, run: RunDirectory, extra: dict[str, str], life: int = 1) -> Process:
        """Fork the shim, which starts the process. Call it from the main thread: the shim dies with the thread it came from."""
        ours, theirs = socket.socketpair()
        shim_script = str(Path(child.__file__).resolve())
        log = str(run.log(plan.name, life))
        with theirs:
            shim = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", shim_script, str(os.getpid()), str(theirs.fileno()), log),
                    *(sys.executable, *plan.program, "--run-dir", str(run.path), "--name", plan.name),
                ],
                env=child_environment(plan.environment | extra),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.setblocking(False)
        return cls(plan, shim, ours, life)

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def ended(self) -> bool:
        return self.ending is not None

    def leave(self, grace_s: float, number: int = signal.SIGTERM) -> None:
        """Send it signal `number` now, and kill it and all below it after `grace_s`."""
        self._order(f"leave {grace_s} {int(number)}\n")

    def kill(self) -> None:
        self._order("kill\n")

    def fence(self, reason: str, patience_s: float) -> None:
        """Kill it and all below it, and remember why. After `patience_s` its shim is past waiting for (`give_up_at`)."""
        self.fenced = reason
        self.give_up_at = time.monotonic() + patience_s
        self.kill()

    def give_up(self) -> None:
        """Kill the shim, which does not follow; whoever watches it sweeps up what it held."""
        child.send(self.shim.pid, signal.SIGKILL)

    def read_reports(self) -> bool:
        """Take in what the shim said. False where the lifeline is closed."""
        try:
            received = self.lifeline.recv(4096)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        *lines, self._partial = (self._partial + received).split(b"\n")
        for line in lines:
            report = json.loads(line)
            self.pid = report.get("started", self.pid)
            if "status" in report:
                self.ending = Ending(report["status"], report["at"], ordered=self.ordered)
        return bool(received)

    def collect(self) -> None:
        """The shim has ended: take its last reports and its exit code."""
        while self.read_reports():
            if self.ending is not None:
                break
        status = self.shim.wait(timeout=child.KILL_WAIT_S)
        if self.ending is None:
            self.ending = Ending(status, time.monotonic(), shim_died=True, ordered=self.ordered)
        self.gone = True
        os.close(self.pidfd)
        self.lifeline.close()

    def _order(self, line: str) -> None:
        self.ordered = True
        try:
            self.lifeline.send(line.encode())
        except OSError:
            return  # it is on its way out
