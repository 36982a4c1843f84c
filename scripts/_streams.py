"""Runs a whole lane, `slow` or `not slow`: several pytest calls, a few of them at a time. Called by scripts/test.

Much of a test of whole runs is waiting for processes to start and to end, and one pytest call leaves half of two cores idle.
Owns which tests go together. What no stream names goes into one of its own, so a new folder is never left out. Each call's
output is printed when it has ended; the exit code is 0 only where all are.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
AT_A_TIME = {"not slow": 3, "slow": 2}
"""Most tests of the slow lane fill a core by themselves."""
LEAVE_S = 60.0
FLOORS = "from importlinter.cli import lint_imports_command; lint_imports_command()"
Streams = Mapping[str, tuple[str, ...]]

FAST: Streams = {
    "learning runs": ("tests/run",),
    "learning": ("tests/learning", "tests/flow", "tests/digits"),
    "processes": ("tests/process", "tests/slurm"),
    "faults": (
        *("tests/run/test_faults.py", "tests/run/test_recovery.py", "tests/run/test_real_engine.py"),
        *("tests/run/test_flow_runs.py", "tests/run/test_direct_runs.py"),
    ),
    "backends": ("tests/backends", "tests/trainer", "tests/weights"),
    "inference": ("tests/inference", "tests/doctor", "tests/workers"),
    "fake runs": ("tests/run/test_fake_runs.py", "tests/run/test_bare_metal.py", "tests/run/test_resumed_runs.py"),
    "environments": ("tests/environments", "tests/env", "tests/sandboxes"),
    "config": ("tests/config", "tests/cli", "tests/planning"),
}
"""The long ones first, and those that wait beside those that compute; what no stream names comes last."""
SLOW: Streams = {
    "seconds": ("tests/process", "tests/planning", "tests/run/test_real_engine.py"),
    "learning runs": ("tests/run/test_learning.py",),
    "runs": ("tests/run",),
    "pythons": ("tests/packaging", "tests/learning", "tests/flow"),
    "slurm": ("tests/slurm", "tests/doctor", "tests/orchestrator"),
    "backends": ("tests/backends",),
}
ALONE = {"not slow": (), "slow": ("seconds",)}
"""They measure seconds, so nothing else runs at the time."""


@dataclass
class Call:
    """One command at work."""

    name: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    begun: float

    def said(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")


def streams(lane: str, root: Path = ROOT) -> dict[str, list[str]]:
    """What each pytest call is given: its paths, and without what others of them name below these."""
    named = FAST if lane == "not slow" else SLOW
    known = {path for paths in named.values() for path in paths}
    folders = sorted({f"tests/{path.relative_to(root).parts[1]}" for path in root.glob("tests/**/test_*.py")})
    rest = tuple(folder for folder in folders if folder not in known)
    every = {**named, **({"rest": rest} if rest else {})}
    return {
        name: [*paths, *(f"--ignore={other}" for other in sorted(known - set(paths)) if _below(other, paths))]
        for name, paths in every.items()
    }


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)


def calls(lane: str) -> dict[str, list[str]]:
    """Every command by name, in the order in which they begin."""
    pytest = [sys.executable, "-m", "pytest", "-m", lane, "-p", "no:cacheprovider"]
    tests = {name: [*pytest, *arguments] for name, arguments in streams(lane).items()}
    checks = {"types": [sys.executable, "-m", "mypy"], "floors": [sys.executable, "-c", FLOORS]}
    return {**tests, **checks}


def begin(name: str, command: Sequence[str]) -> Call:
    output = tempfile.TemporaryFile()  # noqa: SIM115 closed when it has been read
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    print(f"{name}: begun", flush=True)
    return Call(name, process, output, time.monotonic())


def end(call: Call, code: int) -> None:
    """Print what it said."""
    print(f"\n===== {call.name}: exit code {code} after {time.monotonic() - call.begun:.0f} s\n{call.said()}", flush=True)


def run(commands: Mapping[str, Sequence[str]], at_a_time: int) -> dict[str, tuple[int, str]]:
    """Exit code and output of each. Everything ends with this process: a Ctrl-C goes to all of them."""
    waiting, running, ended = list(commands), dict[int, Call](), dict[str, tuple[int, str]]()
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                call = begin(waiting[0], commands[waiting.pop(0)])
                running[os.pidfd_open(call.process.pid)] = call
            for ready in select.select(list(running), [], [])[0]:
                done = running.pop(ready)
                os.close(ready)
                ended[done.name] = done.process.wait(), done.said()
                end(done, ended[done.name][0])
                done.output.close()
    finally:
        for call in running.values():  # a Ctrl-C has reached them as well; a second one would break off what they put in order
            with contextlib.suppress(subprocess.TimeoutExpired):
                call.process.wait(LEAVE_S)
            call.process.terminate()
            call.process.wait()
    return ended


def main() -> int:
    # Inherited as ignored where this was started behind an &, and so would the processes be that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lane, begun = "slow" if sys.argv[1:] == ["slow"] else "not slow", time.monotonic()
    try:
        every = calls(lane)
        ended = run({name: every.pop(name) for name in ALONE[lane]}, at_a_time=1)
        ended |= run(every, AT_A_TIME[lane])
    except KeyboardInterrupt:
        return 130
    print("=" * 40)
    for name, (code, said) in ended.items():
        print(f"{name}: {'good' if code == 0 else f'FAILED with exit code {code}'}{counts(said)}")
        print("".join(f"  {line}\n" for line in said.splitlines() if re.match(r"(FAILED|ERROR) tests/", line)), end="")
    print(f"{time.monotonic() - begun:.0f} s in all")
    return int(any(code for code, _ in ended.values()))


def counts(said: str) -> str:
    """`, 809 passed, 10 deselected in 376.65s` of pytest's output; nothing of another's."""
    found = re.findall(r"^=+ (\d+ (?:passed|failed|error|skipped|deselected).*?) =+$", said, re.MULTILINE)
    return f", {found[-1]}" if found else ""


if __name__ == "__main__":
    sys.exit(main())
