"""Starts the real supervisor on a plan of stand-in processes, and counts what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import pytest

from telescope._launch.process_plan import LaunchPlan, ProcessPlan, ProcessRole, write_plan
from telescope.runlog.layout import RunDirectory
from telescope.wire.supervisor_channel import EndingNotice, FenceServer, RunUnderway
from tests.deadlines import refuse_late

STAND_IN = str(Path(__file__).with_name("stand_in.py"))
START = (
    "import json, sys; from pathlib import Path; from telescope._launch.supervisor import supervise; "
    "from telescope._launch.supervisor import SupervisorTimeouts; "
    "from telescope.runlog.layout import RunDirectory; "
    "sys.exit(supervise(RunDirectory(Path(sys.argv[1])), SupervisorTimeouts(**json.loads(sys.argv[2]))))"
)
PROMISED_S = 10.0
"""Within which whatever fails, is killed or interrupted is over; measured in the slow lane, on a machine of its own."""
LIMIT_S = 60.0
"""Of each wait: a machine may be busy."""
ROLES: dict[str, ProcessRole] = {"orchestrator": "orchestrator", "server": "server", "trainer": "trainer", "worker": "worker"}


def stand_in(name: str, *behaviour: str, **environment: str) -> ProcessPlan:
    role, _, index = name.partition("-")
    return ProcessPlan(name, ROLES[role], int(index or 0), "here", (STAND_IN, *behaviour), environment, (), 1)


@dataclass
class Launched:
    """A supervisor at work."""

    run: RunDirectory
    supervisor: subprocess.Popen[str]
    plan: LaunchPlan
    seen: set[psutil.Process] = field(default_factory=set)

    def wait_until_up(self, *names: str) -> None:
        """Until the named stand-ins (all of them by default) have written their pids."""
        deadline = time.monotonic() + LIMIT_S
        for name in names or self.plan.names:
            while not (self.run.path / "pids" / name).exists():
                assert self.supervisor.poll() is None, self.supervisor.communicate()
                refuse_late(deadline, f"{name} did not come up")
                time.sleep(0.01)
        self.remember()

    def remember(self) -> None:
        self.seen |= set(psutil.Process(self.supervisor.pid).children(recursive=True))

    def pids(self, name: str) -> list[int]:
        """The pid of a stand-in, and those of the children that it made."""
        return [int(pid) for pid in (self.run.path / "pids" / name).read_text().split()]

    def shim(self, name: str) -> int:
        return psutil.Process(self.pids(name)[0]).ppid()

    def signal(self, number: int) -> None:
        os.kill(self.supervisor.pid, number)

    def end(self, limit_s: float = LIMIT_S) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of the supervisor, which must end within the limit."""
        out, err = self.supervisor.communicate(timeout=limit_s)
        return self.supervisor.returncode, out, err

    def left_after(self, limit_s: float) -> list[psutil.Process]:
        """Processes of the run that still live after at most `limit_s`."""
        _, alive = psutil.wait_procs(self.seen, timeout=limit_s)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


Launch = Callable[..., Launched]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        refuse_late(deadline, f"not {what}")
        time.sleep(0.02)


def tell_supervisor(run: RunDirectory, message: RunUnderway | EndingNotice | FenceServer) -> None:
    """As the orchestrator, which is a stand-in that relays; what happens next comes after it."""
    line, said = msgspec.json.encode(message) + b"\n", run.path / "said"
    with (run.path / "say").open("ab") as pipe:
        pipe.write(line)
    until(lambda: said.exists() and line in said.read_bytes(), "said")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[Launched] = []

    def start(
        *processes: ProcessPlan, progress: bool = False, log_to_console: bool = False, restarts: int = 0, **timeouts: float
    ) -> Launched:
        run = RunDirectory.create(tmp_path / f"run-{len(started)}")
        plan = LaunchPlan("cpu", processes, progress, log_to_console, restarts)
        write_plan(plan, run.plan_json)
        supervisor = subprocess.Popen(
            [sys.executable, "-c", START, str(run.path), json.dumps(timeouts)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Launched(run, supervisor, plan))
        return started[-1]

    yield start
    for launched in started:
        if launched.supervisor.poll() is None:
            launched.signal(signal.SIGKILL)
            launched.supervisor.wait(LIMIT_S)
        for process in launched.left_after(LIMIT_S):
            process.kill()
