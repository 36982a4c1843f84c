"""Processor time of a run's processes on this host, from /proc. Reads; decides nothing.

Seconds of a busy machine depend on what else runs there; processor seconds hardly do. They are what the planner is calibrated
with on shared CPUs (docs/planning.md). Refuses to guess: peers on other hosts, and systems without /proc, have no figure.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from telescope.wire.messages import Hello

PROC = Path("/proc")
ROLES = {"worker": "workers", "server": "servers", "trainer": "trainers"}
ENGINES = "engines"
"""Processes that servers have started: a vLLM engine steps in one of its own."""


class CpuTime:
    """Processor seconds by part: `orchestrator`, `workers`, `servers`, `engines`, `trainers`, each the sum of its processes."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._last: dict[int, float] = {}
        self._trees: dict[tuple[str, str], tuple[int, ...]] = {}

    def measure(self, peers: Iterable[Hello]) -> dict[str, float]:
        """Since the last call, by part; empty where a peer is elsewhere or unreadable. The first call of a process counts from
        its start."""
        parts = {"orchestrator": [os.getpid()], "workers": [], "servers": [], ENGINES: [], "trainers": []}
        for hello in peers:
            if hello.host != self._host:
                return {}
            tree = self._find_tree(hello)
            parts[ROLES[hello.role]].append(tree[0])
            parts[ENGINES if hello.role == "server" else ROLES[hello.role]].extend(tree[1:])
        now = {pid: seconds for pids in parts.values() for pid in pids if (seconds := self._read_seconds(pid)) is not None}
        if os.getpid() not in now:
            return {}
        last, self._last = self._last, now
        return {
            part: sum(max(0.0, now[pid] - last.get(pid, 0.0)) for pid in pids if pid in now) for part, pids in parts.items()
        }

    def _find_tree(self, hello: Hello) -> tuple[int, ...]:
        """The process and its find_descendants, looked for once: what works for long has started before its hello."""
        key = hello.name, hello.incarnation
        if key not in self._trees:
            self._trees[key] = (hello.pid, *find_descendants(hello.pid))
        return self._trees[key]

    def _read_seconds(self, pid: int) -> float | None:
        try:
            text = (PROC / str(pid) / "stat").read_text()
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()  # the name before it may hold anything
        return (int(fields[11]) + int(fields[12])) / self._ticks_per_s  # user and system, fields 14 and 15 of proc(5)


def find_descendants(pid: int) -> Iterator[int]:
    """Children of all threads of the process, and theirs. What ends meanwhile is left out."""
    try:
        threads = list((PROC / str(pid) / "task").iterdir())
        found = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return
    for child in found:
        yield child
        yield from find_descendants(child)
