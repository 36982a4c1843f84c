"""The supervisor of one node: starts every process of `plan.json`, watches, and leaves nothing behind.

Owns signals, deadlines and the exit code of a run. It is not a peer on the wire and knows nothing of training: it sees
processes end. A silent or stuck peer is the orchestrator's to notice: it asks for a server to be fenced (server_restarts.py),
and for any other it exits 70, and the supervisor ends the rest. Their channel holds neither of them up.

Exit codes: 0 done, 1 the orchestrator ended with an error of its own (a full disk, say), 70 a component failed, 129/130/143
ended by SIGHUP/SIGINT/SIGTERM, 75 stopped before its walltime, or by one of these signals with all that was trained in a
checkpoint: run it again.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from telescope._launch import shim
from telescope._launch.causes import (
    FailureCause,
    describe_end,
    find_root_cause,
    find_suspect,
    make_cause,
    read_own_sentence,
    read_tail,
)
from telescope._launch.child_processes import CaughtSignals, ChildProcesses, ManagedProcess, ProcessEnd
from telescope._launch.closing_words import format_closing
from telescope._launch.file_thread import FileThread
from telescope._launch.held_signals import HeldSignals
from telescope._launch.hosts.other_nodes import OtherNodes
from telescope._launch.meeting_place import open_meeting_place
from telescope._launch.process_plan import LaunchPlan, ProcessPlan, read_plan
from telescope._launch.progress import Console, LogCopy, ProgressDisplay, format_summary
from telescope._launch.run_dir_watch import LOOK_S as DIRECTORY_LOOK_S
from telescope._launch.run_dir_watch import RunDirWatch
from telescope._launch.server_restarts import ServerRestarts
from telescope._launch.unblocked_output import count_dropped_lines, drain_output, unblock_output
from telescope.exit_codes import BY_SIGNAL, COMPONENT_FAILED, DONE, ERROR, STOPPED
from telescope.runlog import temporary
from telescope.runlog.files import read_object
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.weights.transports import shared_memory
from telescope.wire.security import make_keys
from telescope.wire.supervisor_channel import OrchestratorChannel

T = TypeVar("T")

DISPLAY_S = 0.5
STOPPING = "Stopping:"
"""How the sentence begins that says that the run was told to stop."""


@dataclass(frozen=True)
class SupervisorTimeouts:
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
    node_s: float = 2.0
    """The same for what another node is told and says, on the way."""
    stack_s: float = 1.0
    """A process that is given up as silent, to write where it is."""
    fence_s: float = 2 * shim.KILL_WAIT_S
    """The shim of a fenced server, to end all that it has; then the shim itself is killed and the supervisor sweeps up."""


DEFAULT_TIMEOUTS = SupervisorTimeouts()


@dataclass(frozen=True)
class BatchSystem:
    """What a batch system adds to a supervisor's life; on a plain host nothing."""

    carrier: Callable[[ProcessPlan], tuple[str, ...]] = lambda _: ()
    """The command that carries a process to its node; empty: it runs here."""
    warning: int | None = None
    """The signal that says that the time is nearly up."""
    warned_of: str = ""
    """What the run's summary then gives as its reason, e.g. `walltime`."""
    warned_before: Callable[[], bool] = lambda: False
    """Whether the warning came before the supervisor could hear it."""
    stop_s: float = 6.5
    """What the orchestrator gets to stop after the warning."""


NO_BATCH_SYSTEM = BatchSystem()


@dataclass(frozen=True)
class SupervisedRunEnd:
    """How a supervised run ended."""

    code: int
    warned: bool
    """It was stopped because of the warning."""
    interrupted: int | None
    """The signal that stopped it else."""
    carrier_lost: str
    """The process whose carrier failed rather than itself, if that ended the run; else empty."""


class ShutdownPhase(Enum):
    RUNNING = "running"
    ASKED = "asked"
    """The orchestrator was asked to stop."""
    LEAVING = "leaving"
    """The orchestrator is done; its peers leave by themselves."""
    ENDING = "ending"
    """Everything was told to leave, and is killed after a grace."""
    KILLING = "killing"


def supervise(
    run: RunDirectory,
    timeouts: SupervisorTimeouts = DEFAULT_TIMEOUTS,
    nodes: OtherNodes | None = None,
    port: int = 0,
    held: HeldSignals | None = None,
) -> int:
    """Run the plan in `run` to its end in the foreground, and return the exit code. Call it from the main thread.

    `nodes`: the other hosts of the run, ready. `port`: kept where the trainer's rank 0 will be; 0: one of this host's. `held`:
    a signal that came while the run was made ready, and counts as its first.
    """
    return supervise_in_batch_system(run, NO_BATCH_SYSTEM, timeouts, nodes, port, held).code


def supervise_in_batch_system(
    run: RunDirectory,
    batch_system: BatchSystem,
    timeouts: SupervisorTimeouts = DEFAULT_TIMEOUTS,
    nodes: OtherNodes | None = None,
    port: int = 0,
    held: HeldSignals | None = None,
) -> SupervisedRunEnd:
    """The same within a batch system."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("supervise() must be called from the main thread: processes die with the thread that started them")
    plan = read_plan(run.plan_json)
    if nodes is None:
        make_keys(run, plan.names)
    with (
        CaughtSignals(batch_system.warning) as wakeup,
        open_meeting_place(plan, port) as meeting,
        unblock_output(),
    ):
        if held is not None and held.number is not None:
            signal.raise_signal(held.number)
        supervisor = Supervisor(run, plan, Console(sys.stderr, sys.stdout), wakeup, timeouts, nodes, batch_system)
        code = supervisor.run(meeting)
        supervisor.conclude(code)
        drain_output()
        late = [number for number in wakeup.arrived() if number in shim.ENDING_SIGNALS]
    code = 128 + late[0] if late and code == 0 else code  # the summary is whole, but a sweep has to end
    return SupervisedRunEnd(code, supervisor.warned, supervisor.interrupted, supervisor.carrier_lost)


class Supervisor:
    """The life of one run's processes, as a loop over signals, reports and one deadline."""

    def __init__(
        self,
        run: RunDirectory,
        plan: LaunchPlan,
        console: Console,
        wakeup: shim.Wakeup,
        timeouts: SupervisorTimeouts,
        nodes: OtherNodes | None = None,
        batch_system: BatchSystem = NO_BATCH_SYSTEM,
    ) -> None:
        self.directory = run
        self.batch_system = batch_system
        self.warned = False
        self.plan = plan
        self.console = console
        self.wakeup = wakeup
        self.timeouts = timeouts
        self.nodes = nodes
        self.phase = ShutdownPhase.RUNNING
        self.deadline = float("inf")
        self.asked, self.stack_due = "", float("inf")
        """The silent process that was asked where it is, and when it has had its time."""
        self.interrupted: int | None = None
        self.cause: FailureCause | None = None
        self.late: list[str] = []
        self.processes: dict[str, ManagedProcess] = {}
        self.channel = OrchestratorChannel()
        watched = (wakeup.reader, self.channel.descriptor, *(nodes.descriptors if nodes else ()))
        self.children = ChildProcesses(watched, console.say, batch_system.carrier)
        self.progress = ProgressDisplay(run, console, quoting=not plan.log_to_console) if plan.progress else None
        self.log_copy = LogCopy(run, plan.names, console) if plan.log_to_console else None
        self.files = FileThread()
        self.restarts = ServerRestarts(run, plan, self.channel, console.say, timeouts.fence_s, self.files)
        self.directory_watch = RunDirWatch(run.plan_json)
        self.directory_lost = ""
        """The sentence of a run whose directory is gone."""

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self, meeting: dict[str, str]) -> int:
        """`meeting`: variables that tell the trainer ranks where they meet."""
        try:
            sweep_up()  # after runs that were killed with their supervisor
            self.start(meeting)
            if self.batch_system.warned_before():
                self.warn()
            while self.alive:
                self.wait()
                self.notice_signals()
                self.look_after_nodes()
                self.look_after_directory()
                self.look_after_servers()
                self.notice_ends()
                if time.monotonic() >= self.deadline:
                    self.pass_deadline()
                self.display()
        finally:
            self.children.close()
            self.channel.close()
            sweep_up()
            if self.nodes and self.alive:
                self.release_nodes(ERROR, "the head ended with a defect of its own")
        self.correct_cause()
        if self.cause is None and (sentence := self.ask_files(self.directory_watch.check_at_end, "")):
            self.cause = FailureCause("supervisor", sentence, str(self.directory.path), ())
        return self.exit_code

    def start(self, meeting: dict[str, str]) -> None:
        """The orchestrator first. Hundreds take a while: the terminal is told, and a signal is heard in between."""
        for begun, plan in enumerate(self.plan.processes, start=1):
            self.cause = self.begin(plan, meeting if plan.role == "trainer" else {})
            if self.cause:
                self.kill_all()
                return
            if self.progress:
                self.files.post(functools.partial(self.progress.start, begun, len(self.plan.processes)))
            if "orchestrator" in self.processes:
                self.notice_signals()
            if self.phase is not ShutdownPhase.RUNNING:
                return

    def begin(self, plan: ProcessPlan, extra: dict[str, str], incarnation: int = 1) -> FailureCause | None:
        """Start one process and watch it. The cause if it can't be started."""
        if plan.node and self.nodes:
            self.processes[plan.name] = self.nodes.begin(plan, extra, incarnation)
            return None
        passed: tuple[int, ...] = ()
        if plan.role == "orchestrator":
            extra, passed = extra | self.channel.variables, (self.channel.passed,)
        if sentence := self.children.begin(plan, self.directory, extra, incarnation, passed):
            return FailureCause(plan.name, sentence, str(self.directory.log(plan.name, incarnation)), ())
        self.processes[plan.name] = self.children.processes[plan.name]
        return None

    def wait(self) -> None:
        waits_s = [self.deadline - time.monotonic()]
        if self.progress or self.log_copy:
            waits_s.append(DISPLAY_S)
        waits_s.append(self.stack_due - time.monotonic() if self.phase is ShutdownPhase.RUNNING else float("inf"))
        if self.phase is ShutdownPhase.RUNNING:
            waits_s += [DIRECTORY_LOOK_S, self.restarts.next_look_at(self.processes) - time.monotonic()]
        if self.nodes:
            self.nodes.pump()
            waits_s.append(self.nodes.next_beat_s)
        timeout = max(0.0, min(waits_s))
        self.children.wait(None if timeout == float("inf") else timeout)
        if self.nodes:
            self.nodes.pump()

    # ---- what happened -----------------------------------------------------------------------------------------------

    def notice_signals(self) -> None:
        for number in self.wakeup.arrived():
            if number in shim.ENDING_SIGNALS:
                self.interrupt(number)
            elif number == self.batch_system.warning:
                self.warn()

    def warn(self) -> None:
        """The time is nearly up: a stop like after Ctrl-C, with more time and another reason."""
        if self.phase is ShutdownPhase.RUNNING and not self.warned:
            self.warned = True
            self.console.say(f"{STOPPING} {self.batch_system.warned_of}.")
            self.channel.tell_stop(self.batch_system.warned_of, failed=False)
            self.ask_orchestrator(self.batch_system.stop_s)

    def interrupt(self, number: int) -> None:
        first, self.interrupted = self.interrupted is None, self.interrupted or number
        if not first or self.phase in (ShutdownPhase.ENDING, ShutdownPhase.KILLING):
            self.kill_all()
        elif self.phase is ShutdownPhase.RUNNING:
            saves = " the step under way, saves it" if self.plan.save_s else ""
            self.console.say(f"{STOPPING} the orchestrator finishes{saves} and tells the others. Ctrl-C again kills at once.")
            # the same signal, so that its summary names it
            self.ask_orchestrator(self.timeouts.stop_s + self.plan.save_s, number)
        else:
            self.end_all(self.timeouts.follow_s)

    def look_after_nodes(self) -> None:
        """A node that is lost ends the run: nobody can start its processes again."""
        if self.nodes is None:
            return
        if self.nodes.interrupted and self.interrupted is None:
            self.interrupt(self.nodes.interrupted)
        while lost := self.nodes.take_lost(time.monotonic()):
            name, sentence = lost
            if self.phase is ShutdownPhase.RUNNING:
                self.fail(FailureCause(name, sentence, str(self.directory.path), ()))
            else:
                self.console.say(sentence)

    def look_after_directory(self) -> None:
        """A run that leaves nothing behind is not worth going on with."""
        if self.phase is ShutdownPhase.RUNNING and self.directory_lost:
            self.fail(FailureCause("supervisor", self.directory_lost, str(self.directory.path), ()))

    def look_after_servers(self) -> None:
        """Fence and start again what the run can go on without for a while."""
        self.channel.read()
        if self.phase is not ShutdownPhase.RUNNING or self.cause or self.orchestrator.ended:
            return
        now = time.monotonic()
        try:
            spent = self.restarts.look(self.processes, now)
            if spent:
                name, sentence = spent
                log = self.restarts.log(name)
                self.fail(FailureCause(name, sentence, str(log), self.ask_files(lambda: read_tail(log), ())))
                return
            for plan, incarnation in self.restarts.take_due(self.processes, now):
                if self.log_copy:
                    log = self.directory.log(plan.name, incarnation)
                    self.files.post(functools.partial(self.log_copy.follow, plan.name, log))
                if cause := self.begin(plan, {}, incarnation):
                    self.fail(cause)
                    return
        except OSError as error:  # what an earlier incarnation has left can't be put aside
            self.fail(FailureCause("supervisor", f"no server can be started again: {error}", str(self.directory.path), ()))

    def notice_ends(self) -> None:
        if self.phase is ShutdownPhase.RUNNING:
            self.mark_early_ends()
        if self.phase is ShutdownPhase.RUNNING and self.failed:
            for process in self.alive:
                process.read_reports()  # an earlier death may lie in another lifeline
            if self.waits_for_stack():
                return
            ends = {name: end for name, end in self.ends.items() if name not in self.restarts.pending}
            self.fail(self.locate(self.find_cause(ends)))
        elif self.phase is ShutdownPhase.RUNNING and self.orchestrator.ended:
            self.enter(ShutdownPhase.LEAVING, self.timeouts.leave_s)
        elif self.phase is ShutdownPhase.ASKED and self.orchestrator.end:
            # One that had to be killed has told nobody to leave.
            killed = self.orchestrator.end.status == -signal.SIGKILL
            self.enter(ShutdownPhase.LEAVING, 0.0 if killed else self.timeouts.follow_s)
        elif self.phase is ShutdownPhase.RUNNING and self.deadline == float("inf") and self.only_orchestrator_left:
            self.deadline = time.monotonic() + self.timeouts.close_s

    def mark_early_ends(self) -> None:
        """A process that leaves with exit code 0 before the orchestrator has said that the run ends (`os._exit(0)` in a reward,
        say) is missed at once, not when its silence is noticed."""
        for process in self.processes.values() if self.channel.underway else ():
            if process.end is not None and process.end.status == 0 and process is not self.orchestrator:
                process.end = replace(process.end, early=not process.end.ordered)

    def waits_for_stack(self) -> bool:
        """Whether a process that is given up as silent has yet to say where it is; it is asked once."""
        if self.stack_due == float("inf"):
            ends = {name: end for name, end in self.ends.items() if name not in self.restarts.pending}
            suspect = self.processes.get(self.ask_files(lambda: find_suspect(self.directory, self.plan.names, ends), ""))
            if suspect is None or suspect.ended:
                return False
            suspect.ask_stack()
            self.asked = suspect.name
            on_the_way_s = self.timeouts.node_s if self.nodes and suspect.plan.node else 0.0
            self.stack_due = time.monotonic() + self.timeouts.stack_s + on_the_way_s
        return time.monotonic() < self.stack_due

    def pass_deadline(self) -> None:
        if self.phase is ShutdownPhase.RUNNING:
            sentence = f"orchestrator did not end within {self.timeouts.close_s:g} s after every other process had left."
            self.fail(FailureCause("orchestrator", sentence, str(self.directory.log("orchestrator")), ()))
        elif self.phase in (ShutdownPhase.ASKED, ShutdownPhase.LEAVING):
            self.late = [process.name for process in self.alive if not process.ended]
            self.end_all(self.timeouts.hurry_s if self.interrupted or self.cause else self.timeouts.grace_s)
        elif self.phase is ShutdownPhase.ENDING:
            self.kill_all()
        else:
            self.kill_shims()

    # ---- what is done about it ---------------------------------------------------------------------------------------

    def enter(self, phase: ShutdownPhase, seconds: float) -> None:
        self.phase = phase
        self.deadline = time.monotonic() + seconds

    def fail(self, cause: FailureCause | None) -> None:
        """The orchestrator hears first, and why, so that its summary says so; where it is gone, everybody is told to leave."""
        self.cause = cause
        if cause:
            self.write(self.directory.run_failure, cause.sentence + "\n")
        if self.orchestrator.ended:
            self.end_all(self.timeouts.grace_s)
        else:
            if cause:
                self.channel.tell_stop(cause.sentence, failed=True)
            self.ask_orchestrator(self.timeouts.grace_s)

    def find_cause(self, ends: dict[str, ProcessEnd]) -> FailureCause | None:
        """Why a process has failed, by what all have written; by its exit code alone where the files can't be read."""
        try:
            return self.files.run(
                lambda: find_root_cause(self.directory, self.plan.names, ends, self.restarts.incarnations, self.asked)
            )
        except OSError as error:
            first = min(self.failed, key=lambda name: ends[name].at)
            sentence = f"{first} {describe_end(ends[first])}; why can't be read: {error.strerror}"
            return FailureCause(first, sentence, str(self.restarts.log(first)), ())

    def locate(self, cause: FailureCause | None) -> FailureCause | None:
        """The cause with the name of its node, where that is not the head."""
        where = self.nodes.find_node(cause.process) if self.nodes and cause else ""
        if cause is None or not where or where.partition(" ")[0] in cause.sentence:
            return cause
        return FailureCause(cause.process, f"on {where}: {cause.sentence}", cause.log, cause.last_lines)

    def release_nodes(self, code: int, reason: str) -> None:
        """Let the other nodes go."""
        staying = self.nodes.end(code, reason) if self.nodes else []
        if staying:
            self.console.say(f"{', '.join(staying)} did not say that they have ended: look at their processes.")

    def ask_orchestrator(self, seconds: float, number: int = signal.SIGTERM) -> None:
        self.orchestrator.leave(seconds, number)
        self.enter(ShutdownPhase.ASKED, seconds + self.shim_s)

    def end_all(self, grace_s: float) -> None:
        for process in self.alive:
            process.leave(grace_s, signal.SIGTERM)
        self.enter(ShutdownPhase.ENDING, grace_s + self.shim_s)

    def kill_all(self) -> None:
        for process in self.alive:
            process.kill()
        self.enter(ShutdownPhase.KILLING, self.shim_s)

    def kill_shims(self) -> None:
        """A shim that does not even follow `kill` (stopped, say) goes itself, and the sweep takes what it held."""
        for process in self.alive:
            process.kill_shim()
        self.deadline = time.monotonic() + self.shim_s

    def correct_cause(self) -> None:
        """What broke while the orchestrator closed is not why the run ends: with 0 it has trained and saved all, and with an
        error of its own that came first, or it would name the other."""
        if self.cause is None or self.cause.process == "orchestrator":
            return
        if self.orchestrator_status == DONE:
            self.cause = None
            with contextlib.suppress(OSError):
                self.files.run(lambda: self.directory.run_failure.unlink(missing_ok=True))
        elif self.orchestrator_status == ERROR:
            self.cause = self.ask_files(
                lambda: make_cause(self.directory, "orchestrator", "orchestrator", self.ends), self.cause
            )
            self.write(self.directory.run_failure, self.cause.sentence + "\n")

    # ---- what the user sees ------------------------------------------------------------------------------------------

    def display(self) -> None:
        """In the files' own thread: neither a terminal nor a file system may keep the supervisor from its work."""
        self.files.post_if_idle(self.look_at_files)

    def look_at_files(self) -> None:
        self.directory_lost = self.directory_watch.check(time.monotonic())
        self.show()

    def show(self, last: bool = False) -> None:
        if self.log_copy:
            self.log_copy.copy(last)
        if self.progress:
            self.progress.show()

    def ask_files(self, question: Callable[[], T], otherwise: T) -> T:
        """`otherwise` where the file system does not answer."""
        try:
            return self.files.run(question)
        except OSError as error:
            self.console.say(f"{self.directory.path}: {error.strerror or error}")
            return otherwise

    def write(self, path: Path, text: str) -> None:
        """A full disk must not keep the supervisor from its work, nor one that hangs."""
        try:
            self.files.run(lambda: write_atomically(path, text))
        except OSError as error:
            self.console.say(f"{path} cannot be written: {error.strerror}")

    def conclude(self, code: int) -> None:
        """The last words: what went wrong, where the run lies, what it came to."""
        self.ask_files(functools.partial(self.show, last=True), None)
        if self.late and not self.cause:
            self.console.say(f"Had to be ended, because they did not leave in time: {', '.join(self.late)}.")
        for name in self.failed if self.cause is None and self.interrupted is None else ():
            self.console.say(
                f"After the run was done, {name} {describe_end(self.ends[name])}; its log: {self.restarts.log(name)}"
            )
        if self.cause:
            self.console.say(f"The run failed: {self.cause.text()}")
        record = format_exit_record(
            code, self.cause, self.ends, self.restarts.incarnations, self.interrupted, count_dropped_lines()
        )
        self.write(self.directory.exit_json, record)
        summary: Mapping[str, Any] = self.ask_files(lambda: read_object(self.directory.summary_json), {})
        unfinished = self.describe_unfinished(summary)
        self.release_nodes(code, self.cause.sentence if self.cause else unfinished)
        self.console.result(f"run directory: {self.directory.path}")
        if summary:
            failed = self.cause is not None
            self.console.result(format_summary(summary) if self.plan.verbose else format_closing(summary, failed=failed))
        if code == STOPPED and self.interrupted is not None:
            unfinished = ""
        lost = count_lost_rows(summary)
        if unfinished or lost:
            drain_output()  # nothing of the run is left, and a terminal has what went wrong below what the run came to
        if unfinished:
            self.console.say(unfinished)
        if lost:
            log = self.directory.log("orchestrator")
            self.console.say(f"{lost} rows of this run are lost, since they could not be written: {log} says why.")

    def describe_unfinished(self, summary: Mapping[str, Any]) -> str:
        """What the orchestrator could not do at the end. A full disk may have no summary: then the sentence that it wrote of
        itself, where it was told to stop and no cause has said it."""
        if summary.get("lost_checkpoint"):
            return f"The last checkpoint is lost: {summary.get('exit_reason')}."
        if self.cause or self.orchestrator_status != ERROR:
            return ""
        own = self.ask_files(lambda: read_own_sentence(self.directory, "orchestrator"), "")
        own = own or f"it could not write down which (is the disk full?), and {self.directory.log('orchestrator')} may say"
        return (
            f"The orchestrator ended with an error of its own: {own.rstrip('.')}. What was trained since the latest complete "
            "checkpoint is not saved."
        )

    # ---- derived facts -----------------------------------------------------------------------------------------------

    @property
    def shim_s(self) -> float:
        """Orders and reports of other nodes take a moment on the way."""
        return self.timeouts.shim_s + (self.timeouts.node_s if self.nodes else 0.0)

    @property
    def alive(self) -> list[ManagedProcess]:
        return [process for process in self.processes.values() if not process.gone]

    @property
    def orchestrator(self) -> ManagedProcess:
        return next(process for process in self.processes.values() if process.plan.role == "orchestrator")

    @property
    def ends(self) -> dict[str, ProcessEnd]:
        return {name: process.end for name, process in self.processes.items() if process.end is not None}

    @property
    def failed(self) -> list[str]:
        """Processes that ended badly without being told to, and that are not to be started again."""
        bad = (name for name, end in self.ends.items() if end.failed)
        return [name for name in bad if name not in self.restarts.pending]

    @property
    def carrier_lost(self) -> str:
        """The process that ended the run, where what carried it to its node failed and not the process itself."""
        end = self.ends.get(self.cause.process) if self.cause else None
        process = self.processes.get(self.cause.process) if self.cause else None
        lost = end is not None and end.shim_died and process is not None and self.batch_system.carrier(process.plan)
        return process.name if lost and process else ""

    @property
    def only_orchestrator_left(self) -> bool:
        others = (process for process in self.processes.values() if process is not self.orchestrator)
        return not self.restarts.pending and all(process.ended for process in others)

    @property
    def orchestrator_status(self) -> int | None:
        end = self.ends.get("orchestrator")
        return end.status if end else None

    @property
    def exit_code(self) -> int:
        return choose_exit_code(self.cause, self.orchestrator_status, warned=self.warned, interrupted=self.interrupted)


def count_lost_rows(summary: Mapping[str, Any]) -> int:
    """Of the run's streams, by its summary; 0 where it does not say."""
    rows = summary.get("log")
    lost = rows.get("rows_unlogged") if isinstance(rows, Mapping) else None
    return lost if isinstance(lost, int) else 0


def sweep_up() -> None:
    """Remove what processes of this user left that were killed: what belongs to one that lives is locked by it."""
    temporary.sweep()  # folders, and shared memory that is noted in them
    shared_memory.sweep()  # weights


def choose_exit_code(cause: FailureCause | None, orchestrator: int | None, *, warned: bool, interrupted: int | None) -> int:
    """The supervisor's exit code, of all that it has seen: the order of these questions is the whole of it.

    `cause`: of the end, if a part failed; `orchestrator`: its status, None where it has none; `warned`: that the time is nearly
    up; `interrupted`: the signal that the supervisor got."""
    if cause:
        return ERROR if cause.process == "orchestrator" and orchestrator == ERROR else COMPONENT_FAILED
    if orchestrator == DONE:  # also where somebody told it to stop meanwhile
        return DONE
    if orchestrator == STOPPED or warned:
        return STOPPED
    return DONE if interrupted is None else 128 + interrupted


def note_failed_start(run: RunDirectory, code: int, sentence: str) -> None:
    """Leave what a supervisor leaves of an attempt whose processes were not started, for those who ask how it ended. Raises
    OSError."""
    interrupted = code - 128 if code in BY_SIGNAL else None
    cause = None if interrupted else FailureCause("supervisor", sentence, str(run.path), ())
    if cause:
        write_atomically(run.run_failure, sentence + "\n")
    write_atomically(run.exit_json, format_exit_record(code, cause, {}, {}, interrupted))


def format_exit_record(
    code: int,
    cause: FailureCause | None,
    ends: dict[str, ProcessEnd],
    incarnations: dict[str, int],
    interrupted: int | None,
    dropped_lines: int = 0,
) -> str:
    """What `exit.json` says: the exit code of the run, the cause, how each process ended, which were started again, the signal
    that the supervisor got, if any, and how many lines the terminal did not take."""
    statuses = {name: end.status for name, end in ends.items()}
    restarts = {name: incarnation - 1 for name, incarnation in incarnations.items()}
    record = {
        "exit_code": code,
        "cause": cause,
        "processes": statuses,
        "restarts": restarts,
        "interrupted": interrupted,
        "dropped_lines": dropped_lines,
    }
    return msgspec.json.format(msgspec.json.encode(record)).decode()
