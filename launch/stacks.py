"""Where a silent or a crashed process was: its stacks, which it wrote to its log, as one sentence. Text in, text out.

Reads the form of `faulthandler`. Owns the choice of the thread that matters; refuses to know why they were written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')
_CRASH = "Fatal Python error:"
_WAITING = frozenset({"threading.py", "selectors.py", "queue.py", "socket.py", "ssl.py", "connection.py", "subprocess.py"})
"""Files of the standard library in whose functions a thread does nothing but wait."""
_POOL = "concurrent/futures/thread.py"
_OURS = "/telescope/"
_ENVIRONMENTS = tuple(f"/telescope/environments/{folder}/" for folder in ("tasks", "adapters", "graders"))
"""Where the code of single environments is; what stands beside it is machinery for all of them."""


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def of_library(self) -> bool:
        return "/site-packages/" in self.file or "/lib/python3" in self.file or self.file.startswith("<")

    @property
    def of_environment(self) -> bool:
        """What a user or an environment of ours wrote, not the machinery around it."""
        return not self.of_library and (_OURS not in self.file or any(folder in self.file for folder in _ENVIRONMENTS))

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(frozen=True)
class StackReport:
    """The thread that matters: `busy`: it was not only waiting; `frames`: the innermost first, at least one."""

    frames: tuple[Frame, ...]
    busy: bool

    @property
    def place(self) -> Frame:
        """The innermost frame that is not a library's, else the innermost."""
        return next((frame for frame in self.frames if not frame.of_library), self.frames[0])

    def describe(self) -> str:
        """`it was at /x/hard.py:12 (reward), in /usr/lib/python3.11/re/__init__.py:166 (match)`."""
        place, inner = self.place, self.frames[0]
        where = f"it was at {place}" + (f", in {inner}" if inner != place else "")
        return where if self.busy else f"all of its threads were waiting; {where}"

    def find_environment(self, names: Iterable[tuple[str, str]]) -> str:
        """The label of the environment whose code the thread was in; `names`: label and registered name of each of the run's,
        which is that of its file. Empty where it was in none."""
        stems = [Path(frame.file).stem for frame in self.frames if frame.of_environment]
        return next((label for stem in stems for label, name in names if stem == name), "")


def read_stacks(log: str) -> StackReport | None:
    """The stacks at the end of a log's text; None where there are none."""
    threads, _ = _last_dump(log)
    if not threads:
        return None
    best = _choose(threads)
    return StackReport(tuple(best), _weigh(best) > 0)


def read_crash(log: str) -> StackReport | None:
    """Where a process was that a fault of its own killed (SIGSEGV, SIGABRT); None where the log does not say."""
    _, crashed, after = log.rpartition(_CRASH)
    threads, current = _last_dump(after) if crashed else ([], [])
    best = current or (_choose(threads) if threads else [])
    return StackReport(tuple(best), bool(current) or _weigh(best) > 0) if best else None


def _last_dump(log: str) -> tuple[list[list[Frame]], list[Frame]]:
    """Threads of the last dump that have a frame, and the one that wrote it, empty where it has none. A blank line stands
    between two threads of a dump."""
    threads: list[list[Frame]] = []
    current: list[Frame] = []
    before = "a dump's first line"
    for line in log.splitlines():
        if _THREAD.match(line):
            if before:
                threads, current = [], []
            threads.append([])
            current = threads[-1] if line.startswith("Current") else current
        elif threads and (found := _FRAME.match(line)):
            threads[-1].append(Frame(found["file"], int(found["line"]), found["function"]))
        before = line
    return [thread for thread in threads if thread], current


def _choose(threads: Sequence[Sequence[Frame]]) -> Sequence[Frame]:
    """The thread that weighs most; of several the oldest, which a dump has last: a process is heard from its main thread, and
    a helper thread that only waits for the interpreter looks as busy as the one that holds it."""
    return max(reversed(threads), key=_weigh)


def _weigh(thread: Sequence[Frame]) -> int:
    top = Path(thread[0].file)
    if top.name in _WAITING or thread[0].file.endswith(_POOL):
        return 0
    return 2 if any(frame.of_environment for frame in thread) else 1
