"""The processes that one supervisor has on its own host: starting each under its shim, orders and reports over the lifeline,
watching for ends, sweeping up after them, and the signals that the supervisor hears meanwhile.

Owns the selector, shims and orphans. Refuses to decide who starts and who ends (supervisor.py and hosts/node.py do).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from telescope._launch import shim
from telescope._launch.process_environment import add_to_environment, list_foreign_variables, make_child_environment
from telescope._launch.process_plan import ProcessPlan
from telescope.config import redaction
from telescope.config.secrets import SecretMissing
from telescope.runlog import temporary
from telescope.runlog.layout import RunDirectory


class CaughtSignals:
    """While a run goes on, signals arrive through a pipe and orphans of the run come to this process."""

    def __init__(self, warning: int | None = None) -> None:
        """`warning`: a further signal, which says that the time is nearly up."""
        self._numbers = shim.ENDING_SIGNALS if warning is None else (*shim.ENDING_SIGNALS, warning)

    def __enter__(self) -> shim.Wakeup:
        shim.set_process_flag(shim.PR_SET_CHILD_SUBREAPER, 1)
        self._wakeup = shim.Wakeup()
        self._wakeup.listen(self._numbers)
        return self._wakeup

    def __exit__(self, *_: object) -> None:
        self._wakeup.rest()
        self._wakeup.close()
        shim.set_process_flag(shim.PR_SET_CHILD_SUBREAPER, 0)


@dataclass(frozen=True)
class ProcessEnd:
    """How and when a process ended, e.g. `ProcessEnd(status=-9, at=99.2)`."""

    status: int
    """Exit code, or minus the number of the signal that killed it."""
    at: float
    """CLOCK_MONOTONIC seconds, the same clock for all processes of a host."""
    shim_died: bool = False
    """Its shim was killed, and it with the shim."""
    ordered: bool = False
    """After an order of the supervisor: not the cause of anything."""
    early: bool = False
    """With exit code 0, while the run went on."""

    @property
    def failed(self) -> bool:
        """Badly, without being told to."""
        return not self.ordered and (self.status != 0 or self.early)


class ManagedProcess(Protocol):
    """A process as whoever decides about it sees it, on this host or another."""

    plan: ProcessPlan
    incarnation: int
    pid: int | None
    end: ProcessEnd | None
    gone: bool
    fence_reason: str
    kill_shim_at: float

    @property
    def name(self) -> str: ...
    @property
    def ended(self) -> bool: ...
    def leave(self, grace_s: float, number: int) -> None: ...
    def kill(self) -> None: ...
    def fence(self, reason: str, timeout_s: float) -> None: ...
    def ask_stack(self) -> None: ...
    def kill_shim(self) -> None: ...
    def read_reports(self) -> bool: ...


class LocalProcess:
    """One process of the plan under its shim. `shim_process`: on another node the srun that relays it."""

    def __init__(
        self, plan: ProcessPlan, shim_process: subprocess.Popen[bytes], lifeline: socket.socket, incarnation: int = 1
    ) -> None:
        self.plan = plan
        self.incarnation = incarnation
        self.fence_reason = ""
        """Why it was killed while the run goes on; empty where it was not."""
        self.kill_shim_at = float("inf")
        self.shim_process = shim_process
        self.lifeline = lifeline
        self.pidfd = os.pidfd_open(shim_process.pid)
        self.pid: int | None = None
        self.end: ProcessEnd | None = None
        self.gone = False
        self.ordered = False
        self._partial = b""

    @classmethod
    def start(
        cls,
        plan: ProcessPlan,
        run: RunDirectory,
        extra: dict[str, str],
        incarnation: int = 1,
        carrier: tuple[str, ...] = (),
        passed: tuple[int, ...] = (),
    ) -> LocalProcess:
        """Fork the shim, which starts the process. Call it from the main thread: the shim dies with the thread it came from.

        `carrier`: the command that runs another one on the process's node, e.g. `("srun", "--nodelist=n2")`; empty: here.
        `passed`: descriptors that a process here inherits, under their numbers."""
        ours, theirs = socket.socketpair()
        with theirs:
            if carrier:
                shim_process = _start_there(plan, run, incarnation, carrier, theirs)
                ours.sendall(_encode_start_order(plan, run, plan.environment | extra, incarnation))
            else:
                shim_process = _start_here(plan, run, plan.environment | extra, incarnation, theirs, passed)
        ours.setblocking(False)
        return cls(plan, shim_process, ours, incarnation)

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def ended(self) -> bool:
        return self.end is not None

    def leave(self, grace_s: float, number: int = signal.SIGTERM) -> None:
        """Send it signal `number` now, and kill it and all below it after `grace_s`."""
        self._order(f"leave {grace_s} {int(number)}\n")

    def kill(self) -> None:
        self._order("kill\n")

    def fence(self, reason: str, timeout_s: float) -> None:
        """Kill it and all below it, and remember why. After `timeout_s` its shim is past waiting for (`kill_shim_at`)."""
        self.fence_reason = reason
        self.kill_shim_at = time.monotonic() + timeout_s
        self.kill()

    def ask_stack(self) -> None:
        """Have it write to its log where its threads are."""
        self._send("stack\n")

    def kill_shim(self) -> None:
        """Kill the shim, which does not follow; whoever watches it sweeps up what it held."""
        shim.send_signal(self.shim_process.pid, signal.SIGKILL)

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
                self.end = ProcessEnd(report["status"], report["at"], ordered=self.ordered)
        return bool(received)

    def collect(self) -> bool:
        """The shim has ended: take its last reports and its exit code. False where it did not end by itself: killed, perhaps
        after its last report, it has left behind what the process held."""
        while self.read_reports():
            if self.end is not None:
                break
        status = self.shim_process.wait(timeout=shim.KILL_WAIT_S)
        if self.end is None:
            self.end = ProcessEnd(status, time.monotonic(), shim_died=True, ordered=self.ordered)
        self.gone = True
        os.close(self.pidfd)
        self.lifeline.close()
        return status == 0

    def _order(self, line: str) -> None:
        self.ordered = True
        self._send(line)

    def _send(self, line: str) -> None:
        try:
            self.lifeline.send(line.encode())
        except OSError:
            return  # it is on its way out


SHIM = str(Path(shim.__file__).resolve())
REDACTOR = str(Path(redaction.__file__).resolve())


def _make_command(plan: ProcessPlan, run: RunDirectory) -> list[str]:
    return [sys.executable, *plan.program, "--run-dir", str(run.path), "--name", plan.name]


def _start_here(
    plan: ProcessPlan,
    run: RunDirectory,
    variables: dict[str, str],
    incarnation: int,
    lifeline: socket.socket,
    passed: tuple[int, ...],
) -> subprocess.Popen[bytes]:
    number = lifeline.fileno()
    # What ends the run is told to the orchestrator, which must say so in its summary, however early it comes.
    manner = shim.HOLD if plan.role == "orchestrator" else shim.FREE
    return subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", SHIM, str(os.getpid()), str(number), str(run.log(plan.name, incarnation)), manner),
            *(REDACTOR, ",".join(plan.redacted)),
            *_make_command(plan, run),
        ],
        env=make_child_environment(variables, plan.needs),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(number, *passed),
        start_new_session=True,
    )


def _start_there(
    plan: ProcessPlan, run: RunDirectory, incarnation: int, carrier: tuple[str, ...], lifeline: socket.socket
) -> subprocess.Popen[bytes]:
    """What the carrier itself has to say goes to a log of its own: two hosts that append to one file lose lines."""
    with run.carrier_log(plan.name, incarnation).open("ab") as said:
        return subprocess.Popen(
            [*carrier, sys.executable, "-I", "-S", SHIM, shim.RELAYED],
            stdin=lifeline.fileno(),
            stdout=lifeline.fileno(),
            stderr=said,
            start_new_session=True,
        )


def _encode_start_order(plan: ProcessPlan, run: RunDirectory, variables: dict[str, str], incarnation: int) -> bytes:
    order = {
        "command": _make_command(plan, run),
        "log": str(run.log(plan.name, incarnation)),
        "environment": add_to_environment(variables),
        "unset": list_foreign_variables(),
        "gpus": list(plan.gpus),
        "sweeper": temporary.__file__,
        "redactor": REDACTOR,
        "redacted": list(plan.redacted),
    }
    return json.dumps(order).encode() + b"\n"


class ChildProcesses:
    """`watched`: descriptors that end a wait too. `say` tells the user. `carrier`: the command that takes a process elsewhere,
    with its shim (see `LocalProcess.start`)."""

    def __init__(
        self,
        watched: Sequence[int],
        say: Callable[[str], None],
        carrier: Callable[[ProcessPlan], tuple[str, ...]] = lambda _: (),
    ) -> None:
        self.processes: dict[str, LocalProcess] = {}
        self._say = say
        self._carrier = carrier
        self._others = list_children()
        self._selector = selectors.DefaultSelector()
        for descriptor in watched:
            self._selector.register(descriptor, selectors.EVENT_READ)

    @property
    def alive(self) -> list[LocalProcess]:
        return [process for process in self.processes.values() if not process.gone]

    def begin(
        self,
        plan: ProcessPlan,
        run: RunDirectory,
        extra: dict[str, str],
        incarnation: int = 1,
        passed: tuple[int, ...] = (),
    ) -> str:
        """Start one process and watch it. Gives the reason where it can't be started, else nothing."""
        try:
            process = LocalProcess.start(plan, run, extra, incarnation, self._carrier(plan), passed)
        except (OSError, SecretMissing) as error:
            return f"{plan.name} could not be started: {error}"
        self.processes[plan.name] = process
        self._selector.register(process.lifeline, selectors.EVENT_READ, process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        return ""

    def wait(self, timeout_s: float | None) -> None:
        """Until a process has something to report, a watched descriptor is readable, or the time is up."""
        for key, _ in self._selector.select(timeout_s):
            process = key.data
            if process is None or process.gone:
                continue
            if key.fileobj is process.lifeline:
                if not process.read_reports():
                    self._selector.unregister(process.lifeline)
            else:
                self._collect(process)

    def _collect(self, process: LocalProcess) -> None:
        for source in (process.lifeline, process.pidfd):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        if not process.collect():
            self.sweep()  # what it held came to us

    def sweep(self) -> None:
        """End whatever of this run came to us as an orphan; what was here before the run is left alone."""
        end = time.monotonic() + shim.KILL_WAIT_S
        while left := self._orphans():
            seconds = end - time.monotonic()
            if seconds <= 0:
                self._say(f"Processes {', '.join(map(str, left))} of this run do not die, SIGKILL or not: look at them.")
                return
            for pid in left:
                shim.send_signal(pid, signal.SIGKILL)
            wait_for_any_end(left, seconds)
            reap(left)

    def close(self) -> None:
        """Each shim that is left ends what it has, and then nothing is."""
        for process in self.alive:
            process.lifeline.close()  # only after a defect of ours
        self.sweep()
        self._selector.close()

    def _orphans(self) -> list[int]:
        roots = list_children() - self._others - {process.shim_process.pid for process in self.processes.values()}
        return [*roots, *shim.find_descendants(roots, shim.read_process_table())]


def list_children() -> set[int]:
    """Direct children of this process."""
    return {pid for pid, parent in shim.read_process_table().items() if parent == os.getpid()}


def wait_for_any_end(pids: list[int], seconds: float) -> None:
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return  # one has ended already
            opened.callback(os.close, descriptor)
            selector.register(descriptor, selectors.EVENT_READ)
        selector.select(seconds)


def reap(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # somebody else's child
            os.waitpid(pid, os.WNOHANG)
