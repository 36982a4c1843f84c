"""Which servers of a run are fenced and started again, how often and how soon. supervisor.py starts and ends them.

A server that falls over now and then is started again for as long as the run lasts; one that cannot live ends the run. From the
moment that the orchestrator says that the run is under way until it says that it ends, a server that dies, or that the
orchestrator wants fenced, is killed with all below it and gets another incarnation, as long as its budget lasts. Before that
moment a death ends the run: what cannot even start needs its user.
"""

from __future__ import annotations

import errno
import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from telescope._launch.causes import describe_end, describe_stack, read_own_sentence
from telescope._launch.child_processes import ManagedProcess
from telescope._launch.file_thread import FileThread
from telescope._launch.process_plan import LaunchPlan, ProcessPlan
from telescope.runlog.layout import RunDirectory
from telescope.wire.supervisor_channel import OrchestratorChannel

WINDOW_S = 3600.0
"""`cluster.max_server_restarts` counts the restarts of one server within this time."""
STACK_S = 0.5
"""What a server gets to write where it is, before it is fenced."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""The first restart within the window comes at once, the next after a second, then twice that each time."""


class RestartBudget:
    """The budget of each server of a run. `limit`: restarts of one server within an hour."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._spent: dict[str, deque[float]] = {}

    def spend(self, name: str, now: float) -> float | None:
        """Seconds until the server may be started again; None where its restarts are used up. E.g. 0.0, 1.0, 2.0, None."""
        spent = self._spent.setdefault(name, deque())
        while spent and now - spent[0] >= WINDOW_S:
            spent.popleft()
        if len(spent) >= self.limit:
            return None
        spent.append(now)
        return 0.0 if len(spent) == 1 else min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (len(spent) - 2))

    def describe_spent(self, name: str) -> str:
        """What to add to the reason of a run that ends for this server."""
        if not self.limit:
            return ""
        return f" It was started again {len(self._spent.get(name, ()))} times within an hour (cluster.max_server_restarts)."


class ServerRestarts:
    """The servers' further incarnations. `say` tells the user; `fence_s`: see `SupervisorTimeouts`; `files` touches the run's
    files."""

    def __init__(
        self,
        run: RunDirectory,
        plan: LaunchPlan,
        channel: OrchestratorChannel,
        say: Callable[[str], None],
        fence_s: float,
        files: FileThread,
    ) -> None:
        self._run, self._channel, self._say, self._fence_s, self._files = run, channel, say, fence_s, files
        self._budget = RestartBudget(plan.max_server_restarts)
        self._servers = tuple(process.name for process in plan.processes if process.role == "server")
        self._due: dict[str, float] = {}
        self._asked: dict[str, tuple[float, str]] = {}
        """Servers to be fenced that have yet to say where they are: until when they may, and why they are fenced."""
        self.incarnations: dict[str, int] = {}
        """Of the servers that were started again: which one each is in."""

    @property
    def active(self) -> bool:
        """Whether a server that ends now is started again."""
        return bool(self._budget.limit and self._servers) and self._channel.underway

    @property
    def pending(self) -> frozenset[str]:
        """Servers that are down and will be started again."""
        return frozenset(self._due)

    def next_look_at(self, processes: Mapping[str, ManagedProcess]) -> float:
        """When there is something to do even if nothing happens, by CLOCK_MONOTONIC; infinite where there is not."""
        if not self.active:
            return float("inf")
        started = (processes[name] for name in self._servers if name in processes)
        shims = (process.kill_shim_at for process in started if not process.gone)
        starts = (at for name, at in self._due.items() if processes[name].gone)
        fences = (at for at, _ in self._asked.values())
        return min((*shims, *starts, *fences), default=float("inf"))

    def look(self, processes: Mapping[str, ManagedProcess], now: float) -> tuple[str, str] | None:
        """Obey requests to fence, note ends, and plan restarts. `(server, sentence)` where one has none left."""
        if not self.active:
            return None
        for name in self._servers:
            self._kill_late_shim(processes[name], now)
            if name not in self._due and (sentence := self._look_at(processes[name], now)):
                return name, sentence
        return None

    def _kill_late_shim(self, process: ManagedProcess, now: float) -> None:
        """A shim may be stopped, even after it has said that its process ended: it is only waited for so long."""
        if not process.gone and now >= process.kill_shim_at:
            process.kill_shim_at = now + self._fence_s
            process.kill_shim()

    def _look_at(self, process: ManagedProcess, now: float) -> str:
        fence = self._channel.fences.pop(process.name, None)
        if fence is not None and fence.pid == process.pid and not process.fence_reason and process.name not in self._asked:
            process.ask_stack()
            self._asked[process.name] = (now + STACK_S, fence.reason)
        asked = self._asked.get(process.name)
        if asked is not None and (now >= asked[0] or process.ended):
            del self._asked[process.name]
            process.fence(asked[1], self._fence_s)
        if process.end is None:
            return ""
        if not process.fence_reason and process.end.ordered:
            return ""
        own = self._read_sentence(process.name).removeprefix(f"{process.name}: ")
        where = self._read_stack(process) if process.fence_reason else ""
        why = describe_end(process.end) + (f": {own}" if own else "")
        sentence = _close_sentence(
            f"{process.name} was fenced: {process.fence_reason}" if process.fence_reason else f"{process.name} {why}"
        )
        sentence += where
        wait_s = self._budget.spend(process.name, now)
        if wait_s is None:
            return sentence + self._budget.describe_spent(process.name)
        self._due[process.name] = now + wait_s
        process.kill_shim_at = now + self._fence_s
        self._say(f"{sentence} It is started again" + (f" in {wait_s:g} s." if wait_s else "."))
        address = self._run.server(process.name)
        self._files.post(lambda: address.unlink(missing_ok=True))  # one that was killed listens no more, and could not say so
        self._channel.tell_end(process.name, process.incarnation, process.pid or 0, sentence)
        return ""

    def take_due(self, processes: Mapping[str, ManagedProcess], now: float) -> Iterable[tuple[ProcessPlan, int]]:
        """Servers to be started now, with the number of the incarnation that begins; nothing of the last one is left."""
        for name in [name for name, at in self._due.items() if now >= at and processes[name].gone]:
            last = processes[name]
            try:
                self._files.run(functools.partial(self._put_aside, last))
            except OSError as error:
                if error.errno != errno.ETIMEDOUT:
                    raise
                self._due[name] = now + FIRST_WAIT_S  # a log can't be opened either while the file system hangs
                continue
            del self._due[name]
            self.incarnations[name] = last.incarnation + 1
            yield last.plan, last.incarnation + 1

    def _read_stack(self, process: ManagedProcess) -> str:
        log = self._run.log(process.name, process.incarnation)
        try:
            return self._files.run(lambda: describe_stack(self._run, process.name, log))
        except OSError:
            return ""

    def _read_sentence(self, name: str) -> str:
        try:
            return self._files.run(lambda: read_own_sentence(self._run, name))
        except OSError:
            return ""

    def log(self, name: str) -> Path:
        """Where the server writes now."""
        return self._run.log(name, self.incarnations.get(name, 1))

    def _put_aside(self, process: ManagedProcess) -> None:
        """The reason of an incarnation that is over must not pass for that of a later one."""
        failure = self._run.failure(process.name)
        if failure.exists():
            failure.replace(self._run.earlier_failure(process.name, process.incarnation))


def _close_sentence(sentence: str) -> str:
    """With the full stop that most reasons lack: another sentence follows."""
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
