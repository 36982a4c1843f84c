"""The shim around one process of a run. Started as a script of its own, so it imports the standard library only.

It leads a session, adopts every orphan below it, and ends with nothing left: the process, and whatever the process has
forked, gets SIGTERM, a grace, and SIGKILL. It acts on orders from the supervisor over the lifeline (a socket), on SIGTERM,
and when the lifeline closes or its parent dies, which means that the supervisor is gone. It refuses to judge: it reports
how its process ended and leaves.

On another node of a Slurm job it is started by srun (`shim.py -`): stdin and stdout are then its lifeline, and the first line
says what to start (`{"command": […], "log": "…", "environment": {…}, "unset": […], "gpus": ["0"], "sweeper": "…", "redactor":
"…", "redacted": ["PGPASSWORD"]}`), so that nothing secret stands on a command line. No supervisor is on that node: the shim
itself then removes what the dead have noted to go with them, by the sweeper, a file of the standard library's means too.

What the process and all below it print, a C library's words too, comes here through a pipe and leaves for the log without the
run's secrets (telescope/config/redaction.py, which the shim is told where to find).

Orders are lines, `leave 5.0 15` (signal 15 to the process now, SIGKILL to all after 5 s), `kill`, and `stack` (the process
writes to its log where its threads are); reports are lines of JSON,
`{"started": 4711, "at": 12.5}` and later `{"status": -9, "at": 99.2}` (exit code, or minus the signal; CLOCK_MONOTONIC).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import runpy
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

ORPHAN_GRACE_S = 3.0
"""What a process gets to leave by itself when the supervisor is gone."""
LEFTOVER_GRACE_S = 1.0
"""What the processes that a dead process leaves behind get."""
KILL_WAIT_S = 5.0
"""SIGKILL is final, but a process inside the kernel (a GPU driver's teardown, say) dies when it comes out."""
RELAYED = "-"
"""The argument of a shim whose lifeline is its stdin and stdout."""
HOLD, FREE = "hold", "free"
"""Whether INT, TERM and HUP wait until the process lets them in, through `exec` and all that it imports; one that never does is
killed after its grace."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a process to end."""
STACK_SIGNAL = signal.SIGUSR1
"""A process of a run answers it with its stacks (telescope/wire/process.py), even while no Python code of it can run."""
OUTPUT_BYTES = 65_536
OUTPUT_S = 1.0
"""For what a dead process has printed, to reach its log: a disk that hangs must not keep the shim."""
EXIT_ORPHANED = 3
EXIT_NO_EXEC = 127


def set_process_flag(option: int, value: int) -> None:
    """prctl(option, value). Raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def read_process_table() -> dict[int, int]:
    """Parent of every living process (a zombie is dead already), read from /proc."""
    parents: dict[int, int] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if state not in (b"Z", b"X"):
            parents[int(pid)] = int(parent)
    return parents


def find_descendants(roots: Collection[int], parents: dict[int, int]) -> list[int]:
    """The processes below `roots` in a process table, `roots` left out, parents before children."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    generation = list(roots)
    while generation:
        generation = [pid for parent in generation for pid in children.get(parent, ())]
        found.extend(generation)
    return found


def send_signal(pid: int, signal_number: int) -> None:
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return  # it went by itself


def end_all(find: Callable[[], Collection[int]], wait: Callable[[float], None], grace_s: float) -> list[int]:
    """SIGTERM, `grace_s`, SIGKILL to whatever `find` finds, until it finds nothing. Returns what even SIGKILL left.

    `wait(seconds)` sleeps until a child has died, and reaps it.
    """
    started = time.monotonic()
    told: set[int] = set()
    while left := list(find()):
        elapsed = time.monotonic() - started
        if elapsed >= grace_s + KILL_WAIT_S:
            return left
        if elapsed < grace_s:
            for pid in set(left) - told:
                send_signal(pid, signal.SIGTERM)
            told.update(left)
            wait(grace_s - elapsed)
        else:
            for pid in left:
                send_signal(pid, signal.SIGKILL)
            wait(grace_s + KILL_WAIT_S - elapsed)
    return []


def may_answer(number: int) -> bool:
    """False for a hang-up that whoever started this process, nohup say, has it ignore. A SIGINT is answered all the same: it is
    how a run is asked to stop, and a script's shell has each background job ignore it."""
    return number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


class Wakeup:
    """A pipe that becomes readable when a signal arrives, so that one `select` waits for signals and sockets. Of the main
    thread, while it listens."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._before: dict[int, Any] = {}

    def listen(self, signals: Collection[int]) -> None:
        """For these and no other, until `rest`."""
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in filter(may_answer, signals):
            self._before[number] = signal.signal(number, lambda *_: None)

    def rest(self) -> None:
        """The handlers are those from before again."""
        signal.set_wakeup_fd(-1)
        while self._before:
            signal.signal(*self._before.popitem())

    def close(self) -> None:
        os.close(self.reader)
        os.close(self._writer)

    def arrived(self) -> list[int]:
        """Numbers of the signals since the last call."""
        try:
            return list(os.read(self.reader, 4096))
        except BlockingIOError:
            return []


class Lifeline:
    """The way to the supervisor and back: one socket, or the two pipes that srun relays."""

    def __init__(self, reader: int, writer: int) -> None:
        self.reader, self._writer = reader, writer

    def receive(self) -> bytes:
        """What has come; empty where the other end is closed."""
        try:
            return os.read(self.reader, 4096)
        except ConnectionError:
            return b""  # closed with a report unread: as good as closed

    def send(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._writer, line) :]


class RedactedOutput:
    """The pipe into which a process prints, and the thread that writes its log. `redactor`: the file of the class; `names`: of
    the variables whose values are secret."""

    def __init__(self, log: int, redactor: str, names: Collection[str]) -> None:
        kind = _load_file(redactor)
        self._log = log
        self._lines = kind.RedactedLines(kind.Redactor.of(os.environ, names), self._write)
        self._reader, self.writer = os.pipe()
        self._changed = threading.Condition()
        self._busy = self._over = False
        self._thread = threading.Thread(target=self._pump, name="output", daemon=True)

    def start(self) -> None:
        """After the fork: the pipe ends with the last process that has it."""
        os.close(self.writer)
        self._thread.start()

    def drain(self) -> None:
        """Until what was printed so far is in the log."""
        until = time.monotonic() + OUTPUT_S
        with self._changed:
            while not self._over and (self._busy or select.select([self._reader], [], [], 0)[0]):
                if not self._changed.wait(until - time.monotonic()) and time.monotonic() >= until:
                    return
            self._lines.close()

    def finish(self) -> None:
        """The same once nobody is left who could print."""
        self._thread.join(OUTPUT_S)

    def _pump(self) -> None:
        while not self._over:
            select.select([self._reader], [], [])
            with self._changed:
                self._busy = True
            data = os.read(self._reader, OUTPUT_BYTES)
            if data:
                self._lines.feed(data)
            else:
                self._lines.close()
            with self._changed:
                self._busy, self._over = False, not data
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk keeps nobody from printing
            while data:
                data = data[os.write(self._log, data) :]


def _load_file(path: str) -> Any:
    """A file of the package that needs the standard library alone, as a module of its own."""
    spec = importlib.util.spec_from_file_location("redaction", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Shim:
    """One process and everything below it."""

    def __init__(self, lifeline: Lifeline, command: list[str], output: RedactedOutput, *, hold: bool = False) -> None:
        self.lifeline = lifeline
        self.output = output
        self.wakeup = Wakeup()
        self.wakeup.listen((signal.SIGCHLD, *ENDING_SIGNALS))
        self.listening = [self.wakeup.reader, lifeline.reader]
        self.status: int | None = None
        self.told = False
        self.kill_at: float | None = None
        self.partial = b""
        self.child = _spawn(command, output.writer, hold)
        output.start()
        self.report(started=self.child)

    def report(self, **facts: int) -> None:
        try:
            self.lifeline.send(json.dumps(facts | {"at": time.monotonic()}).encode() + b"\n")
        except OSError:
            return  # nobody listens any more

    def run(self) -> None:
        """Until the process has ended, by itself or by order, and nothing below is left."""
        while self.status is None:
            timeout = None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())
            ready, _, _ = select.select(self.listening, [], [], timeout)
            if self.lifeline.reader in ready:
                self.obey(self.lifeline.receive())
            self.notice_signals()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.end_rest(0.0)
        self.output.drain()  # whoever hears of the end reads the last words
        self.report(status=self.status)
        self.end_rest(LEFTOVER_GRACE_S if self.kill_at is None else 0.0)
        self.output.finish()
        self.reap()  # the dead whom nobody waited for would go to the supervisor, and lie there as long as it lives

    def obey(self, received: bytes) -> None:
        if not received:
            self.listening.remove(self.lifeline.reader)
            self.ask_to_leave(ORPHAN_GRACE_S)
            return
        *lines, self.partial = (self.partial + received).split(b"\n")
        for line in lines:
            match line.decode().split():
                case ["leave", grace_s, number]:
                    self.ask_to_leave(float(grace_s), int(number))
                case ["stack"]:
                    send_signal(self.child, STACK_SIGNAL)
                case _:
                    self.kill_at = time.monotonic()

    def notice_signals(self) -> None:
        numbers = self.wakeup.arrived()
        if set(ENDING_SIGNALS) & set(numbers):
            self.ask_to_leave(ORPHAN_GRACE_S)
        if signal.SIGCHLD in numbers:
            self.reap()

    def ask_to_leave(self, grace_s: float, number: int = signal.SIGTERM) -> None:
        """One signal to the process; a second order can only bring the end nearer."""
        if not self.told:
            send_signal(self.child, number)
            self.told = True
        kill_at = time.monotonic() + grace_s
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)

    def reap(self) -> None:
        """Collect every child that has died: the process itself, and orphans that came to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.status = os.waitstatus_to_exitcode(status)

    def end_rest(self, grace_s: float) -> None:
        left = end_all(lambda: find_descendants([os.getpid()], read_process_table()), self.wait_for_death, grace_s)
        if left and self.status is None:
            self.status = -signal.SIGKILL  # sent; the kernel will get to it

    def wait_for_death(self, timeout_s: float) -> None:
        select.select([self.wakeup.reader], [], [], timeout_s)
        self.wakeup.arrived()
        self.reap()


def _spawn(command: list[str], log: int, hold: bool) -> int:
    shim = os.getpid()
    # from before the fork: until exec the handlers are the shim's, and would swallow what is for the process
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid
    try:
        os.setsid()  # a process that signals its own group must not hit the shim
        set_process_flag(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim:
            os._exit(EXIT_ORPHANED)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # until the process can answer it
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if not hold:
            for number in ENDING_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execv(command[0], command)
    except OSError as error:
        os.write(log, f"cannot start {command[0]}: {error}\n".encode())
    os._exit(EXIT_NO_EXEC)


def _read_order(lifeline: Lifeline) -> dict[str, Any]:
    """The first line of a relayed lifeline; an end of it instead is a supervisor that has gone."""
    line = b""
    while not line.endswith(b"\n"):  # the supervisor says nothing more before the report of the start
        if not (received := lifeline.receive()):
            raise EOFError
        line += received
    order: dict[str, Any] = json.loads(line)
    return order


def _choose_visible(gpus: list[str], environment: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a process that the plan gives the node's first, second, … GPU: as the step calls them."""
    there = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(there[int(gpu)] if int(gpu) < len(there) else gpu for gpu in gpus)


def _run_relayed() -> int:
    # Copies, which the process itself does not inherit; it gets 0, 1 and 2 anew.
    lifeline = Lifeline(os.dup(0), os.dup(1))
    try:
        order = _read_order(lifeline)
    except EOFError:
        return EXIT_ORPHANED
    visible = _choose_visible(order["gpus"], os.environ)
    for name in order["unset"]:
        os.environ.pop(name, None)
    os.environ.update(order["environment"])
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    output = RedactedOutput(_open_log(order["log"]), order["redactor"], order["redacted"])
    Shim(lifeline, order["command"], output).run()
    with contextlib.suppress(OSError):
        runpy.run_path(order["sweeper"], run_name="__main__")
    return 0


def _open_log(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def main(arguments: list[str]) -> int:
    set_process_flag(PR_SET_PDEATHSIG, signal.SIGTERM)
    set_process_flag(PR_SET_CHILD_SUBREAPER, 1)
    if arguments == [RELAYED]:
        return _run_relayed()
    supervisor, number, log, manner, redactor, redacted, *command = arguments
    if os.getppid() != int(supervisor):
        return EXIT_ORPHANED  # it died before the first line took effect
    os.set_inheritable(int(number), False)  # the process itself must not keep it open
    output = RedactedOutput(_open_log(log), redactor, redacted.split(","))
    Shim(Lifeline(int(number), int(number)), command, output, hold=manner == HOLD).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
