"""Which servers of a run are fenced and started again. Looks at processes and mailboxes; `node.py` starts and ends them.

From the moment that the orchestrator says that the run is under way (`control/underway`) until it says that it ends, a server
that dies, or that the orchestrator wants fenced, is killed with all below it and gets another life, as long as its budget
lasts. Before that moment a death ends the run: what cannot even start needs its user.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from telescope._launch.causes import how, own_sentence
from telescope._launch.plan import Plan, ProcessPlan
from telescope._launch.processes import Held
from telescope._launch.restarts import Restarts
from telescope.runlog import control
from telescope.runlog.layout import RunDirectory

LOOK_S = 0.25
"""Between two looks into the mailboxes."""


class Revival:
    """The servers' further lives. `say` tells the user; `fence_s`: see `Patience`."""

    def __init__(self, run: RunDirectory, plan: Plan, say: Callable[[str], None], fence_s: float) -> None:
        self._run, self._say, self._fence_s = run, say, fence_s
        self._budget = Restarts(plan.max_server_restarts)
        self._servers = tuple(process.name for process in plan.processes if process.role == "server")
        self._due: dict[str, float] = {}
        self._underway = False
        self.lives: dict[str, int] = {}
        """Of the servers that were started again: the life each is in."""

    @property
    def watching(self) -> bool:
        """Whether any server could be started again at all."""
        return bool(self._budget.limit and self._servers)

    @property
    def pending(self) -> frozenset[str]:
        """Servers that are down and will be started again."""
        return frozenset(self._due)

    def look(self, processes: Mapping[str, Held], now: float) -> tuple[str, str] | None:
        """Obey requests to fence, note ends, and plan further lives. `(server, sentence)` where one has none left."""
        if not self.watching or not self._is_under_way():
            return None
        for name in self._servers:
            if name in self._due:
                self._hurry(processes[name], now)
            elif sentence := self._look_at(processes[name], now):
                return name, sentence
        return None

    def _is_under_way(self) -> bool:
        """As it was, where the file system can't say: an error of it may pass, and a server that dies just then is one more to
        be started again."""
        with contextlib.suppress(OSError):
            self._underway = self._run.underway.exists()
        return self._underway

    def _hurry(self, process: Held, now: float) -> None:
        """A shim may be stopped after it has said that its process ended: it too is only waited for so long."""
        if not process.gone and now >= process.give_up_at:
            process.give_up_at = now + self._fence_s
            process.give_up()

    def _look_at(self, process: Held, now: float) -> str:
        fence = control.take_fence(self._run, process.name)
        if fence is not None and fence.pid == process.pid and not process.fenced:
            process.fence(fence.reason, self._fence_s)
        if process.ending is None:
            if now >= process.give_up_at:
                process.give_up()
            return ""
        if not process.fenced and (process.ending.status == 0 or process.ending.ordered):
            return ""  # it left by itself: if the run still needs it, the orchestrator asks for the fence
        own = own_sentence(self._run, process.name).removeprefix(f"{process.name}: ")
        why = how(process.ending) + (f": {own}" if own else "")
        sentence = _whole(f"{process.name} was fenced: {process.fenced}" if process.fenced else f"{process.name} {why}")
        wait_s = self._budget.spend(process.name, now)
        if wait_s is None:
            return sentence + self._budget.used_up(process.name)
        self._due[process.name] = now + wait_s
        process.give_up_at = now + self._fence_s
        self._say(f"{sentence} It is started again" + (f" in {wait_s:g} s." if wait_s else "."))
        self._run.server(process.name).unlink(missing_ok=True)  # one that was killed listens no more, and could not say so
        control.note_end(self._run, process.name, control.Ended(process.life, process.pid or 0, sentence))
        return ""

    def due(self, processes: Mapping[str, Held], now: float) -> Iterable[tuple[ProcessPlan, int]]:
        """Servers to be started now, with the number of the life that begins; nothing of the last one is left."""
        for name in [name for name, at in self._due.items() if now >= at and processes[name].gone]:
            del self._due[name]
            last = processes[name]
            self._put_aside(last)
            self.lives[name] = last.life + 1
            yield last.plan, last.life + 1

    def log(self, name: str) -> Path:
        """Where the server's present life writes."""
        return self._run.log(name, self.lives.get(name, 1))

    def _put_aside(self, process: Held) -> None:
        """The reason of a life that is over must not pass for that of a later one."""
        failure = self._run.failure(process.name)
        if failure.exists():
            failure.replace(self._run.earlier_failure(process.name, process.life))


def _whole(sentence: str) -> str:
    """With the full stop that most reasons lack: another sentence follows."""
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
