"""The supervisor of one node: starts every process of `plan.json`, watches, and leaves nothing behind.

Owns signals, deadlines and the exit code of a run. It is no peer on the wire and knows nothing of training: it sees
processes end. A silent or stuck peer is the orchestrator's to notice: it asks for a server to be fenced (revival.py), and for
any other it exits 70, and the supervisor ends the rest.

Exit codes: 0 done, 1 the orchestrator ended with an error of its own (a full disk, say), 70 a component failed, 129/130/143
ended by SIGHUP/SIGINT/SIGTERM, 75 stopped before its walltime.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from telescope._launch import child
from telescope._launch.causes import COMPONENT_FAILED, Cause, how, root_cause, tail
from telescope._launch.plan import Plan, ProcessPlan, read_plan
from telescope._launch.processes import Ending, Process
from telescope._launch.progress import Console, LogCopy, Progress, read_object, summary_table
from telescope._launch.revival import LOOK_S, Revival
from telescope.config.secrets import SecretMissing
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.weights import shared_memory
from telescope.wire.security import make_keys

DISPLAY_S = 0.5
ERROR = 1
STOPPED = 75
"""Stopped in good order before it was done, because the time was nearly up: run it again."""
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Patience:
    """Seconds that processes get. Those after a failure, and those after Ctrl-C, come to less than 10 together."""

    stop_s: float = 6.5
    """The orchestrator, to finish and to tell its peers, after Ctrl-C."""
    follow_s: float = 1.5
    """Its peers after it, in both cases."""
    leave_s: float = 20.0
    """The peers, after a run that ended by itself."""
    close_s: float = 120.0
    """The orchestrator, to close its files and mirrors, when every peer has left."""
    grace_s: float = 4.0
    """The orchestrator, when another process has failed; the rest, when the orchestrator has."""
    hurry_s: float = 0.5
    """Between SIGTERM and SIGKILL, for those who did not follow the orchestrator after all that."""
    shim_s: float = 1.0
    """Shims beyond all that, before they get `kill`, and again before they are killed themselves."""
    fence_s: float = 2 * child.KILL_WAIT_S
    """The shim of a fenced server, to end all that it has; then the shim itself is killed and the supervisor sweeps up."""


class Phase(Enum):
    RUNNING = "running"
    ASKED = "asked"
    """The orchestrator was asked to stop."""
    LEAVING = "leaving"
    """The orchestrator is done; its peers leave by themselves."""
    ENDING = "ending"
    """Everything was told to leave, and is killed after a grace."""
    KILLING = "killing"


@dataclass(frozen=True)
class Surroundings:
    """What a batch system adds to a supervisor's life; on a plain host nothing."""

    carrier: Callable[[ProcessPlan], tuple[str, ...]] = lambda _: ()
    """The command that carries a process to its node; empty: it runs here."""
    warning: int | None = None
    """The signal that says that the time is nearly up."""
    warned_of: str = ""
    """What the run's summary then gives as its reason, e.g. `walltime`."""
    stop_s: float = 6.5
    """What the orchestrator gets to stop after the warning."""


@dataclass(frozen=True)
class Conclusion:
    """How a supervised run ended."""

    code: int
    warned: bool
    """It was stopped because of the warning."""
    interrupted: int | None
    """The signal that stopped it else."""
    carrier_lost: str
    """The process whose carrier failed rather than itself, if that ended the run; else empty."""


def supervise(run: RunDirectory, patience: Patience = Patience()) -> int:
    """Run the plan in `run` to its end in the foreground, and return the exit code. Call it from the main thread."""
    return supervise_in(run, Surroundings(), patience).code


def supervise_in(run: RunDirectory, surroundings: Surroundings, patience: Patience = Patience()) -> Conclusion:
    """The same within a batch system."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("supervise() must be called from the main thread: processes die with the thread that started them")
    plan = read_plan(run.plan_json)
    console = Console(sys.stderr, sys.stdout)
    make_keys(run, plan.names)
    with _Signals(surroundings.warning) as wakeup:
        supervisor = Supervisor(run, plan, console, wakeup, patience, surroundings)
        code = supervisor.run()
        supervisor.conclude(code)
        late = [number for number in wakeup.arrived() if number in INTERRUPTS]
    code = 128 + late[0] if late and code == 0 else code  # the summary is whole, but a sweep has to end
    return Conclusion(code, supervisor.warned, supervisor.interrupted, supervisor.carrier_lost)


class _Signals:
    """While a run goes on, signals arrive through a pipe and orphans of the run come to this process."""

    def __init__(self, warning: int | None = None) -> None:
        self._numbers = INTERRUPTS if warning is None else (*INTERRUPTS, warning)

    def __enter__(self) -> child.Wakeup:
        self._handlers = {number: signal.getsignal(number) for number in self._numbers}
        child.set_process_flag(child.PR_SET_CHILD_SUBREAPER, 1)
        return child.Wakeup(self._numbers)

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        child.set_process_flag(child.PR_SET_CHILD_SUBREAPER, 0)


class Supervisor:
    """The life of one run's processes, as a loop over signals, reports and one deadline."""

    def __init__(
        self,
        run: RunDirectory,
        plan: Plan,
        console: Console,
        wakeup: child.Wakeup,
        patience: Patience,
        surroundings: Surroundings = Surroundings(),
    ) -> None:
        self.directory = run
        self.surroundings = surroundings
        self.warned = False
        self.plan = plan
        self.console = console
        self.wakeup = wakeup
        self.patience = patience
        self.phase = Phase.RUNNING
        self.deadline = float("inf")
        self.interrupted: int | None = None
        self.cause: Cause | None = None
        self.late: list[str] = []
        self.processes: dict[str, Process] = {}
        self.strangers = self.children()
        self.selector = selectors.DefaultSelector()
        self.selector.register(wakeup.reader, selectors.EVENT_READ)
        self.progress = Progress(run, console) if plan.progress else None
        self.log_copy = LogCopy(run, plan.names, console) if plan.log_to_console else None
        self.revival = Revival(run, plan, console.say, patience.fence_s)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        try:
            self.start()
            while self.living:
                self.wait()
                self.notice_signals()
                self.look_after_servers()
                self.notice_endings()
                if time.monotonic() >= self.deadline:
                    self.deadline_passed()
                self.display()
        finally:
            for process in self.living:
                process.lifeline.close()  # only after a defect of ours: each shim ends what it has
            self.sweep()
            shared_memory.sweep()  # weights whose writer was killed; those of other runs alive are locked by theirs
            self.selector.close()
        return self.exit_code

    def start(self) -> None:
        port = {"MASTER_PORT": str(free_port())}
        for plan in self.plan.processes:
            self.cause = self.begin(plan, port if plan.role == "trainer" else {})
            if self.cause:
                self.kill_all()
                return

    def begin(self, plan: ProcessPlan, extra: dict[str, str], life: int = 1) -> Cause | None:
        """Start one process and watch it. The cause if it can't be started."""
        try:
            process = Process.start(plan, self.directory, extra, life, self.surroundings.carrier(plan))
        except (OSError, SecretMissing) as error:
            return Cause(plan.name, f"{plan.name} could not be started: {error}", str(self.directory.log(plan.name, life)), ())
        self.processes[plan.name] = process
        self.selector.register(process.lifeline, selectors.EVENT_READ, process)
        self.selector.register(process.pidfd, selectors.EVENT_READ, process)
        return None

    def wait(self) -> None:
        display_s = DISPLAY_S if self.progress or self.log_copy else float("inf")
        look_s = LOOK_S if self.revival.watching and self.phase is Phase.RUNNING else float("inf")
        timeout = min(display_s, look_s, max(0.0, self.deadline - time.monotonic()))
        for key, _ in self.selector.select(None if timeout == float("inf") else timeout):
            process = key.data
            if process is None or process.gone:
                continue
            if key.fileobj is process.lifeline:
                if not process.read_reports():
                    self.selector.unregister(process.lifeline)
            else:
                self.collect(process)

    def collect(self, process: Process) -> None:
        for source in (process.lifeline, process.pidfd):
            if source in self.selector.get_map():
                self.selector.unregister(source)
        process.collect()
        if process.ending is not None and process.ending.shim_died:
            self.sweep()  # what it held came to us

    # ---- what happened -----------------------------------------------------------------------------------------------

    def notice_signals(self) -> None:
        for number in self.wakeup.arrived():
            if number in INTERRUPTS:
                self.interrupt(number)
            elif number == self.surroundings.warning:
                self.warn()

    def warn(self) -> None:
        """The time is nearly up: a stop like after Ctrl-C, with more patience and another reason."""
        if self.phase is Phase.RUNNING and not self.warned:
            self.warned = True
            self.console.say(f"Stopping: {self.surroundings.warned_of}.")
            self.write(self.directory.farewell, self.surroundings.warned_of + "\n")
            self.ask_orchestrator(self.surroundings.stop_s)

    def interrupt(self, number: int) -> None:
        first, self.interrupted = self.interrupted is None, self.interrupted or number
        if not first or self.phase in (Phase.ENDING, Phase.KILLING):
            self.kill_all()
        elif self.phase is Phase.RUNNING:
            self.console.say("Stopping: the orchestrator finishes and tells the others. Ctrl-C again kills at once.")
            self.ask_orchestrator(self.patience.stop_s, number)  # the same signal, so that its summary names it
        else:
            self.end_all(self.patience.follow_s)

    def look_after_servers(self) -> None:
        """Fence and start again what the run can go on without for a while."""
        if self.phase is not Phase.RUNNING or self.orchestrator.ended:
            return
        now = time.monotonic()
        try:
            spent = self.revival.look(self.processes, now)
            if spent:
                name, sentence = spent
                log = self.revival.log(name)
                self.fail(Cause(name, sentence, str(log), tail(log)))
                return
            for plan, life in self.revival.due(self.processes, now):
                if self.log_copy:
                    self.log_copy.follow(plan.name, self.directory.log(plan.name, life))
                if cause := self.begin(plan, {}, life):
                    self.fail(cause)
                    return
        except OSError as error:  # a disk that takes no note: then there is no telling the orchestrator either
            self.fail(Cause("supervisor", f"no server can be started again: {error}", str(self.directory.path), ()))

    def notice_endings(self) -> None:
        if self.phase is Phase.RUNNING and self.failed:
            for process in self.living:
                process.read_reports()  # an earlier death may lie in another lifeline
            self.fail(root_cause(self.directory, self.plan.names, self.endings, self.revival.lives))
        elif self.phase is Phase.RUNNING and self.orchestrator.ended:
            self.enter(Phase.LEAVING, self.patience.leave_s)
        elif self.phase is Phase.ASKED and self.orchestrator.ending:
            # One that had to be killed has told nobody to leave.
            killed = self.orchestrator.ending.status == -signal.SIGKILL
            self.enter(Phase.LEAVING, 0.0 if killed else self.patience.follow_s)
        elif self.phase is Phase.RUNNING and self.deadline == float("inf") and self.only_orchestrator_left:
            self.deadline = time.monotonic() + self.patience.close_s

    def deadline_passed(self) -> None:
        if self.phase is Phase.RUNNING:
            sentence = f"orchestrator did not end within {self.patience.close_s:g} s after every other process had left."
            self.fail(Cause("orchestrator", sentence, str(self.directory.log("orchestrator")), ()))
        elif self.phase in (Phase.ASKED, Phase.LEAVING):
            self.late = [process.name for process in self.living if not process.ended]
            self.end_all(self.patience.hurry_s if self.interrupted or self.cause else self.patience.grace_s)
        elif self.phase is Phase.ENDING:
            self.kill_all()
        else:
            self.give_up_shims()

    # ---- what is done about it ---------------------------------------------------------------------------------------

    def enter(self, phase: Phase, seconds: float) -> None:
        self.phase = phase
        self.deadline = time.monotonic() + seconds

    def fail(self, cause: Cause | None) -> None:
        """The orchestrator hears first, and why, so that its summary says so; where it is gone, everybody is told to leave."""
        self.cause = cause
        if cause:
            self.write(self.directory.verdict, cause.sentence + "\n")
        if self.orchestrator.ended:
            self.end_all(self.patience.grace_s)
        else:
            self.ask_orchestrator(self.patience.grace_s)

    def ask_orchestrator(self, seconds: float, number: int = signal.SIGTERM) -> None:
        self.orchestrator.leave(seconds, number)
        self.enter(Phase.ASKED, seconds + self.patience.shim_s)

    def end_all(self, grace_s: float) -> None:
        for process in self.living:
            process.leave(grace_s)
        self.enter(Phase.ENDING, grace_s + self.patience.shim_s)

    def kill_all(self) -> None:
        for process in self.living:
            process.kill()
        self.enter(Phase.KILLING, self.patience.shim_s)

    def give_up_shims(self) -> None:
        """A shim that does not even follow `kill` (stopped, say) goes itself, and the sweep takes what it held."""
        for process in self.living:
            child.send(process.shim.pid, signal.SIGKILL)
        self.deadline = time.monotonic() + self.patience.shim_s

    def sweep(self) -> None:
        """End whatever of this run came to us as an orphan; what was here before the run is left alone."""
        give_up_at = time.monotonic() + child.KILL_WAIT_S
        while left := self.orphans():
            seconds = give_up_at - time.monotonic()
            if seconds <= 0:
                self.console.say(f"Processes {', '.join(map(str, left))} of this run do not die, SIGKILL or not: look at them.")
                return
            for pid in left:
                child.send(pid, signal.SIGKILL)
            wait_for_any_end(left, seconds)
            reap(left)

    def orphans(self) -> list[int]:
        roots = self.children() - self.strangers - {process.shim.pid for process in self.processes.values()}
        return [*roots, *child.below(roots, child.process_table())]

    @staticmethod
    def children() -> set[int]:
        """Direct children of this process."""
        return {pid for pid, parent in child.process_table().items() if parent == os.getpid()}

    # ---- what the user sees ------------------------------------------------------------------------------------------

    def display(self, last: bool = False) -> None:
        if self.log_copy:
            self.log_copy.copy(last)
        if self.progress:
            self.progress.show()

    def write(self, path: Path, text: str) -> None:
        """A full disk must not keep the supervisor from its work."""
        try:
            write_atomically(path, text)
        except OSError as error:
            self.console.say(f"{path} cannot be written: {error.strerror}")

    def conclude(self, code: int) -> None:
        """The last words: what went wrong, where the run lies, what it came to."""
        self.display(last=True)
        if self.late and not self.cause:
            self.console.say(f"Had to be ended, because they did not leave in time: {', '.join(self.late)}.")
        for name in self.failed if self.cause is None and self.interrupted is None else ():
            self.console.say(f"After the run was done, {name} {how(self.endings[name])}; its log: {self.revival.log(name)}")
        if self.cause:
            self.console.say(f"The run failed: {self.cause.text()}")
        self.write(self.directory.exit_json, exit_record(code, self.cause, self.endings, self.revival.lives))
        summary = read_object(self.directory.summary_json)
        self.console.result(f"run directory: {self.directory.path}")
        if summary:
            self.console.result(summary_table(summary))

    # ---- derived facts -----------------------------------------------------------------------------------------------

    @property
    def living(self) -> list[Process]:
        return [process for process in self.processes.values() if not process.gone]

    @property
    def orchestrator(self) -> Process:
        return next(process for process in self.processes.values() if process.plan.role == "orchestrator")

    @property
    def endings(self) -> dict[str, Ending]:
        return {name: process.ending for name, process in self.processes.items() if process.ending is not None}

    @property
    def failed(self) -> list[str]:
        """Processes that ended badly without being told to, and that are not to be started again."""
        back = self.revival.pending
        return [name for name, ending in self.endings.items() if ending.status != 0 and not ending.ordered and name not in back]

    @property
    def carrier_lost(self) -> str:
        """The process that ended the run, where what carried it to its node failed and not the process itself."""
        ending = self.endings.get(self.cause.process) if self.cause else None
        process = self.processes.get(self.cause.process) if self.cause else None
        lost = ending is not None and ending.shim_died and process is not None and self.surroundings.carrier(process.plan)
        return self.cause.process if lost and self.cause else ""

    @property
    def only_orchestrator_left(self) -> bool:
        others = (process for process in self.processes.values() if process is not self.orchestrator)
        return not self.revival.pending and all(process.ended for process in others)

    @property
    def orchestrator_status(self) -> int | None:
        ending = self.endings.get("orchestrator")
        return ending.status if ending else None

    @property
    def exit_code(self) -> int:
        if self.cause:
            own = self.cause.process == "orchestrator" and self.orchestrator_status == ERROR
            return ERROR if own else COMPONENT_FAILED
        if self.warned and self.orchestrator_status != 0:  # else it was done before it heard
            return STOPPED
        return 0 if self.interrupted is None else 128 + self.interrupted


def free_port() -> int:
    """A port on loopback that was free just now, for the trainer ranks' meeting point."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def exit_record(code: int, cause: Cause | None, endings: dict[str, Ending], lives: dict[str, int]) -> str:
    """What `exit.json` says: the exit code of the run, the cause, how each process ended, and which were started again."""
    ended = {name: ending.status for name, ending in endings.items()}
    restarts = {name: life - 1 for name, life in lives.items()}
    record = {"exit_code": code, "cause": cause, "processes": ended, "restarts": restarts}
    return msgspec.json.format(msgspec.json.encode(record)).decode()
