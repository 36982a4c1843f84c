"""The processes that one supervisor has on its own host: starting them, watching for their ends, sweeping up after them.

Owns the selector, shims and orphans. Refuses to decide who starts and who ends (`node.py` and `join.py` do).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence

from telescope._launch import child
from telescope._launch.plan import ProcessPlan
from telescope._launch.processes import Process
from telescope.config.secrets import SecretMissing
from telescope.runlog.layout import RunDirectory


class Household:
    """`watched`: descriptors that end a wait too. `say` tells the user. `carrier`: the command that takes a process elsewhere,
    with its shim (see `Process.start`)."""

    def __init__(
        self,
        watched: Sequence[int],
        say: Callable[[str], None],
        carrier: Callable[[ProcessPlan], tuple[str, ...]] = lambda _: (),
    ) -> None:
        self.processes: dict[str, Process] = {}
        self._say = say
        self._carrier = carrier
        self._strangers = children()
        self._selector = selectors.DefaultSelector()
        for descriptor in watched:
            self._selector.register(descriptor, selectors.EVENT_READ)

    @property
    def living(self) -> list[Process]:
        return [process for process in self.processes.values() if not process.gone]

    def begin(self, plan: ProcessPlan, run: RunDirectory, extra: dict[str, str], life: int = 1) -> str:
        """Start one process and watch it. Gives the reason where it can't be started, else nothing."""
        try:
            process = Process.start(plan, run, extra, life, self._carrier(plan))
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

    def _collect(self, process: Process) -> None:
        for source in (process.lifeline, process.pidfd):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        if not process.collect():
            self.sweep()  # what it held came to us

    def sweep(self) -> None:
        """End whatever of this run came to us as an orphan; what was here before the run is left alone."""
        give_up_at = time.monotonic() + child.KILL_WAIT_S
        while left := self._orphans():
            seconds = give_up_at - time.monotonic()
            if seconds <= 0:
                self._say(f"Processes {', '.join(map(str, left))} of this run do not die, SIGKILL or not: look at them.")
                return
            for pid in left:
                child.send(pid, signal.SIGKILL)
            wait_for_any_end(left, seconds)
            reap(left)

    def close(self) -> None:
        """Each shim that is left ends what it has, and then nothing is."""
        for process in self.living:
            process.lifeline.close()  # only after a defect of ours
        self.sweep()
        self._selector.close()

    def _orphans(self) -> list[int]:
        roots = children() - self._strangers - {process.shim.pid for process in self.processes.values()}
        return [*roots, *child.below(roots, child.process_table())]


def children() -> set[int]:
    """Direct children of this process."""
    return {pid for pid, parent in child.process_table().items() if parent == os.getpid()}


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
