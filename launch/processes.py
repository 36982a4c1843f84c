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
from telescope._launch.environ import added, child_environment, foreign
from telescope._launch.plan import ProcessPlan
from telescope.runlog import temporary
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
    """One process of the plan under its shim. `shim`: on another node the srun that relays it."""

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
    def start(
        cls, plan: ProcessPlan, run: RunDirectory, extra: dict[str, str], life: int = 1, carrier: tuple[str, ...] = ()
    ) -> Process:
        """Fork the shim, which starts the process. Call it from the main thread: the shim dies with the thread it came from.

        `carrier`: the command that runs another one on the process's node, e.g. `("srun", "--nodelist=n2")`; empty: here."""
        ours, theirs = socket.socketpair()
        with theirs:
            if carrier:
                shim = _start_there(plan, run, plan.environment | extra, life, carrier, theirs)
                ours.sendall(_order_to_start(plan, run, plan.environment | extra, life))
            else:
                shim = _start_here(plan, run, plan.environment | extra, life, theirs)
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

    def collect(self) -> bool:
        """The shim has ended: take its last reports and its exit code. False where it did not end by itself: killed, perhaps
        after its last report, it has left behind what the process held."""
        while self.read_reports():
            if self.ending is not None:
                break
        status = self.shim.wait(timeout=child.KILL_WAIT_S)
        if self.ending is None:
            self.ending = Ending(status, time.monotonic(), shim_died=True, ordered=self.ordered)
        self.gone = True
        os.close(self.pidfd)
        self.lifeline.close()
        return status == 0

    def _order(self, line: str) -> None:
        self.ordered = True
        try:
            self.lifeline.send(line.encode())
        except OSError:
            return  # it is on its way out


SHIM = str(Path(child.__file__).resolve())


def _command(plan: ProcessPlan, run: RunDirectory) -> list[str]:
    return [sys.executable, *plan.program, "--run-dir", str(run.path), "--name", plan.name]


def _start_here(
    plan: ProcessPlan, run: RunDirectory, variables: dict[str, str], life: int, lifeline: socket.socket
) -> subprocess.Popen[bytes]:
    number = lifeline.fileno()
    # What ends the run is told to the orchestrator, which must say so in its summary, however early it comes.
    manner = child.HOLD if plan.role == "orchestrator" else child.FREE
    return subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", SHIM, str(os.getpid()), str(number), str(run.log(plan.name, life)), manner),
            *_command(plan, run),
        ],
        env=child_environment(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(number,),
        start_new_session=True,
    )


def _start_there(
    plan: ProcessPlan,
    run: RunDirectory,
    variables: dict[str, str],
    life: int,
    carrier: tuple[str, ...],
    lifeline: socket.socket,
) -> subprocess.Popen[bytes]:
    """What the carrier itself has to say goes to a log of its own: two hosts that append to one file lose lines."""
    with run.carrier_log(plan.name, life).open("ab") as said:
        return subprocess.Popen(
            [*carrier, sys.executable, "-I", "-S", SHIM, child.RELAYED],
            stdin=lifeline.fileno(),
            stdout=lifeline.fileno(),
            stderr=said,
            start_new_session=True,
        )


def _order_to_start(plan: ProcessPlan, run: RunDirectory, variables: dict[str, str], life: int) -> bytes:
    order = {
        "command": _command(plan, run),
        "log": str(run.log(plan.name, life)),
        "environment": added(variables),
        "unset": foreign(),
        "gpus": list(plan.gpus),
        "sweeper": temporary.__file__,
    }
    return json.dumps(order).encode() + b"\n"
