"""The supervisor of one node: starts every process of `plan.json`, watches, and leaves nothing behind.

Owns signals, deadlines and the exit code of a run. It is no peer on the wire and knows nothing of training: it sees
processes end. A silent or stuck peer is the orchestrator's to notice: it asks for a server to be fenced (revival.py), and for
any other it exits 70, and the supervisor ends the rest.

Exit codes: 0 done, 1 the orchestrator ended with an error of its own (a full disk, say), 70 a component failed, 74 all steps
are trained and the last checkpoint is lost (decision 9), 129/130/143 ended by SIGHUP/SIGINT/SIGTERM, 75 stopped before its
walltime, or by one of these signals with all that was trained in a checkpoint: run it again.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import threading
import time
from enum import Enum
from pathlib import Path

from telescope._launch import child
from telescope._launch.address import KeptPort
from telescope._launch.causes import Cause, how, own_sentence, root_cause, tail
from telescope._launch.ground import LOOK_S as GROUND_S
from telescope._launch.ground import Ground
from telescope._launch.household import Household
from telescope._launch.plan import Plan, ProcessPlan, read_plan
from telescope._launch.processes import Ending, Held
from telescope._launch.progress import Console, LogCopy, Progress, summary_table
from telescope._launch.remote import Nodes
from telescope._launch.revival import LOOK_S, Revival
from telescope._launch.signals import INTERRUPTS, Signals
from telescope._launch.terms import PATIENCE, PLAIN_HOST, Conclusion, Patience, Surroundings, exit_record
from telescope._launch.verdict import exit_code
from telescope.exit_codes import ERROR, STOPPED, UNSAVED
from telescope.runlog import temporary
from telescope.runlog.ending import read_object, reason
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.weights.transports import shared_memory
from telescope.wire.security import make_keys

DISPLAY_S = 0.5


class Phase(Enum):
    RUNNING = "running"
    ASKED = "asked"
    """The orchestrator was asked to stop."""
    LEAVING = "leaving"
    """The orchestrator is done; its peers leave by themselves."""
    ENDING = "ending"
    """Everything was told to leave, and is killed after a grace."""
    KILLING = "killing"


def supervise(run: RunDirectory, patience: Patience = PATIENCE, nodes: Nodes | None = None, port: int = 0) -> int:
    """Run the plan in `run` to its end in the foreground, and return the exit code. Call it from the main thread.

    `nodes`: the other hosts of the run, ready. `port`: kept where the trainer's rank 0 will be; 0: one of this host's.
    """
    return supervise_in(run, PLAIN_HOST, patience, nodes, port).code


def supervise_in(
    run: RunDirectory,
    surroundings: Surroundings,
    patience: Patience = PATIENCE,
    nodes: Nodes | None = None,
    port: int = 0,
) -> Conclusion:
    """The same within a batch system."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("supervise() must be called from the main thread: processes die with the thread that started them")
    plan = read_plan(run.plan_json)
    console = Console(sys.stderr, sys.stdout)
    if nodes is None:
        make_keys(run, plan.names)
    with Signals(surroundings.warning) as wakeup, contextlib.closing(KeptPort(plan.head_address)) as kept:
        supervisor = Supervisor(run, plan, console, wakeup, patience, nodes, surroundings)
        code = supervisor.run(port or kept.number)
        supervisor.conclude(code)
        late = [number for number in wakeup.arrived() if number in INTERRUPTS]
    code = 128 + late[0] if late and code == 0 else code  # the summary is whole, but a sweep has to end
    return Conclusion(code, supervisor.warned, supervisor.interrupted, supervisor.carrier_lost)


class Supervisor:
    """The life of one run's processes, as a loop over signals, reports and one deadline."""

    def __init__(
        self,
        run: RunDirectory,
        plan: Plan,
        console: Console,
        wakeup: child.Wakeup,
        patience: Patience,
        nodes: Nodes | None = None,
        surroundings: Surroundings = PLAIN_HOST,
    ) -> None:
        self.directory = run
        self.surroundings = surroundings
        self.warned = False
        self.plan = plan
        self.console = console
        self.wakeup = wakeup
        self.patience = patience
        self.nodes = nodes
        self.phase = Phase.RUNNING
        self.deadline = float("inf")
        self.interrupted: int | None = None
        self.cause: Cause | None = None
        self.late: list[str] = []
        self.processes: dict[str, Held] = {}
        watched = (wakeup.reader, *(nodes.descriptors if nodes else ()))
        self.home = Household(watched, console.say, surroundings.carrier)
        self.progress = Progress(run, console, quoting=not plan.log_to_console) if plan.progress else None
        self.log_copy = LogCopy(run, plan.names, console) if plan.log_to_console else None
        self.revival = Revival(run, plan, console.say, patience.fence_s)
        self.ground = Ground(run.plan_json)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self, port: int) -> int:
        """`port`: where the trainer ranks meet, on the host of rank 0."""
        try:
            self.start({"MASTER_PORT": str(port)})
            if self.surroundings.warned_before():
                self.warn()
            while self.living:
                self.wait()
                self.notice_signals()
                self.look_after_nodes()
                self.look_after_directory()
                self.look_after_servers()
                self.notice_endings()
                if time.monotonic() >= self.deadline:
                    self.deadline_passed()
                self.display()
        finally:
            self.home.close()
            temporary.sweep()  # folders of processes that were killed, and shared memory that is noted in them
            shared_memory.sweep()  # weights whose writer was killed; those of other runs alive are locked by theirs
            if self.nodes and self.living:
                self.say_farewell(ERROR, "the head ended with a defect of its own")
        self.absolve()
        if self.cause is None and (sentence := self.ground.lost_at_the_end()):
            self.cause = Cause("supervisor", sentence, str(self.directory.path), ())
        return self.exit_code

    def start(self, port: dict[str, str]) -> None:
        """The orchestrator first. Hundreds take a while: the terminal is told, and a signal is heard in between."""
        for begun, plan in enumerate(self.plan.processes, start=1):
            self.cause = self.begin(plan, port if plan.role == "trainer" else {})
            if self.cause:
                self.kill_all()
                return
            if self.progress:
                self.progress.start(begun, len(self.plan.processes))
            if "orchestrator" in self.processes:
                self.notice_signals()
            if self.phase is not Phase.RUNNING:
                return

    def begin(self, plan: ProcessPlan, extra: dict[str, str], life: int = 1) -> Cause | None:
        """Start one process and watch it. The cause if it can't be started."""
        if plan.node and self.nodes:
            self.processes[plan.name] = self.nodes.begin(plan, extra, life)
            return None
        if sentence := self.home.begin(plan, self.directory, extra, life):
            return Cause(plan.name, sentence, str(self.directory.log(plan.name, life)), ())
        self.processes[plan.name] = self.home.processes[plan.name]
        return None

    def wait(self) -> None:
        display_s = DISPLAY_S if self.progress or self.log_copy else float("inf")
        look_s = (LOOK_S if self.revival.watching else GROUND_S) if self.phase is Phase.RUNNING else float("inf")
        beat_s = float("inf")
        if self.nodes:
            self.nodes.pump()
            beat_s = self.nodes.next_beat_s
        timeout = min(display_s, look_s, beat_s, max(0.0, self.deadline - time.monotonic()))
        self.home.wait(None if timeout == float("inf") else timeout)
        if self.nodes:
            self.nodes.pump()

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
            saves = " the step under way, saves it" if self.plan.save_s else ""
            self.console.say(f"Stopping: the orchestrator finishes{saves} and tells the others. Ctrl-C again kills at once.")
            # the same signal, so that its summary names it
            self.ask_orchestrator(self.patience.stop_s + self.plan.save_s, number)
        else:
            self.end_all(self.patience.follow_s)

    def look_after_nodes(self) -> None:
        """A node that is lost ends the run: nobody can start its processes again."""
        if self.nodes is None:
            return
        if self.nodes.interrupted and self.interrupted is None:
            self.interrupt(self.nodes.interrupted)
        while lost := self.nodes.silent(time.monotonic()):
            name, sentence = lost
            if self.phase is Phase.RUNNING:
                self.fail(Cause(name, sentence, str(self.directory.path), ()))
            else:
                self.console.say(sentence)

    def look_after_directory(self) -> None:
        """A run that leaves nothing behind is none."""
        if self.phase is Phase.RUNNING and (sentence := self.ground.lost(time.monotonic())):
            self.fail(Cause("supervisor", sentence, str(self.directory.path), ()))

    def look_after_servers(self) -> None:
        """Fence and start again what the run can go on without for a while."""
        if self.phase is not Phase.RUNNING or self.cause or self.orchestrator.ended:
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
            told = {name: ending for name, ending in self.endings.items() if self.counts(name)}
            self.fail(self.located(root_cause(self.directory, self.plan.names, told, self.revival.lives)))
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

    def located(self, cause: Cause | None) -> Cause | None:
        """With the name of the node, where that is not the head."""
        where = self.nodes.where(cause.process) if self.nodes and cause else ""
        if cause is None or not where or where.partition(" ")[0] in cause.sentence:
            return cause
        return Cause(cause.process, f"on {where}: {cause.sentence}", cause.log, cause.last_lines)

    def say_farewell(self, code: int, reason: str) -> None:
        """Let the other nodes go."""
        staying = self.nodes.end(code, reason) if self.nodes else []
        if staying:
            self.console.say(f"{', '.join(staying)} did not say that they have ended: look at their processes.")

    def ask_orchestrator(self, seconds: float, number: int = signal.SIGTERM) -> None:
        self.orchestrator.leave(seconds, number)
        self.enter(Phase.ASKED, seconds + self.shim_s)

    def end_all(self, grace_s: float) -> None:
        for process in self.living:
            process.leave(grace_s, signal.SIGTERM)
        self.enter(Phase.ENDING, grace_s + self.shim_s)

    def kill_all(self) -> None:
        for process in self.living:
            process.kill()
        self.enter(Phase.KILLING, self.shim_s)

    def give_up_shims(self) -> None:
        """A shim that does not even follow `kill` (stopped, say) goes itself, and the sweep takes what it held."""
        for process in self.living:
            process.give_up()
        self.deadline = time.monotonic() + self.shim_s

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
        self.write(self.directory.exit_json, exit_record(code, self.cause, self.endings, self.revival.lives, self.interrupted))
        summary = read_object(self.directory.summary_json)
        # of a run that was stopped at its last save the summary alone says so
        lost = self.lost_sentence if self.lost_checkpoint or summary.get("lost_checkpoint") else ""
        self.say_farewell(code, self.cause.sentence if self.cause else lost)
        self.console.result(f"run directory: {self.directory.path}")
        if summary:
            self.console.result(summary_table(summary))
        if code == STOPPED and self.interrupted is not None:
            self.console.result(f"to go on: python -m telescope.runs resume {shlex.quote(str(self.directory.path))}")
        elif lost and not self.cause:
            self.console.say(lost)

    # ---- derived facts -----------------------------------------------------------------------------------------------

    @property
    def shim_s(self) -> float:
        """Orders and reports of other nodes take a moment on the way."""
        return self.patience.shim_s + (self.patience.node_s if self.nodes else 0.0)

    @property
    def living(self) -> list[Held]:
        return [process for process in self.processes.values() if not process.gone]

    @property
    def orchestrator(self) -> Held:
        return next(process for process in self.processes.values() if process.plan.role == "orchestrator")

    @property
    def endings(self) -> dict[str, Ending]:
        return {name: process.ending for name, process in self.processes.items() if process.ending is not None}

    @property
    def failed(self) -> list[str]:
        """Processes that ended badly without being told to, and that are not to be started again."""
        bad = (name for name, ending in self.endings.items() if ending.status != 0 and not ending.ordered)
        return [name for name in bad if self.counts(name)]

    def counts(self, name: str) -> bool:
        """Whether a bad end of the process would be the run's: a server may be on its way back, and the orchestrator of a run
        whose last checkpoint is lost has done all else."""
        return name not in self.revival.pending and not (name == "orchestrator" and self.lost_checkpoint)

    @property
    def lost_checkpoint(self) -> bool:
        return self.orchestrator_status == UNSAVED

    @property
    def lost_sentence(self) -> str:
        why = reason(self.directory) or own_sentence(self.directory, "orchestrator")  # a full disk may have no summary
        return f"The last checkpoint is lost: {why}."

    def absolve(self) -> None:
        """An orchestrator that ends with 0 has trained and saved all: what broke while it closed is no failure of the run."""
        if self.cause and self.cause.process != "orchestrator" and self.orchestrator_status in (0, UNSAVED):
            self.cause = None
            with contextlib.suppress(OSError):
                self.directory.verdict.unlink(missing_ok=True)

    @property
    def carrier_lost(self) -> str:
        """The process that ended the run, where what carried it to its node failed and not the process itself."""
        ending = self.endings.get(self.cause.process) if self.cause else None
        process = self.processes.get(self.cause.process) if self.cause else None
        lost = ending is not None and ending.shim_died and process is not None and self.surroundings.carrier(process.plan)
        return process.name if lost and process else ""

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
        return exit_code(self.cause, self.orchestrator_status, warned=self.warned, interrupted=self.interrupted)
