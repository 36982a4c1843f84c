"""Runs a whole lane, `slow` or `not slow`: several pytest calls, a few of them at a time. Called by scripts/test.

Much of a test of whole runs is waiting for processes to start and to end, and one pytest call leaves half of two cores idle.
Owns which tests go together. What no stream names goes into one of its own, so a new folder is never left out. Each call's
output is printed when it has ended; the exit code is 0 only where all are. A test that ran out of time among the others is
played once more by itself: its limit is there for what hangs, and says nothing of a machine that was busy. A signal that ends
this ends them all: each call is a process group of its own, so that it gets one Ctrl-C and no more, whoever was told to stop.
"""

from __future__ import annotations

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
"""For calls that are broken off to put things in order; then they are killed with all that they started."""
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WIDE = "240"
"""Columns for pytest, which cuts the cause of a failure at the terminal's width."""
MOST_AGAIN = 5
"""More tests than these out of time are a fault of the product or of the machine, and are not played again."""
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
    "environments": ("tests/environments", "tests/cli/env", "tests/sandboxes"),
    "config": ("tests/config", "tests/cli", "tests/planning"),
    "backends": ("tests/backends", "tests/trainer", "tests/weights"),
    "inference": ("tests/inference", "tests/doctor", "tests/workers"),
    "fake runs": ("tests/run/test_fake_runs.py", "tests/run/test_bare_metal.py", "tests/run/test_resumed_runs.py"),
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


def pytest(lane: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", lane, "-p", "no:cacheprovider", "--durations=15", "--durations-min=5"]


def calls(lane: str) -> dict[str, list[str]]:
    """Every command by name, in the order in which they begin."""
    tests = {name: [*pytest(lane), *arguments] for name, arguments in streams(lane).items()}
    checks = {"types": [sys.executable, "-m", "mypy"], "floors": [sys.executable, "-c", FLOORS]}
    return {**tests, **checks}


class Told(Exception):
    """A signal has come."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def hear() -> int:
    """From now on a signal ends nothing by itself: the descriptor given tells its number."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    for number in INTERRUPTS:  # a handler, not SIG_IGN, which the calls and the processes that tests interrupt would inherit
        signal.signal(number, lambda number, frame: None)
    return told


def begin(name: str, command: Sequence[str]) -> Call:
    output = tempfile.TemporaryFile()  # noqa: SIM115 closed when it has been read
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": WIDE},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    print(f"{name}: begun", flush=True)
    return Call(name, process, output, time.monotonic())


def end(call: Call, code: int) -> str:
    """Print what it said, which is given back."""
    said = call.said()
    call.output.close()
    print(f"\n===== {call.name}: exit code {code} after {time.monotonic() - call.begun:.0f} s\n{said}", flush=True)
    return said


def break_off(running: Mapping[int, Call], leave_s: float) -> None:
    """A Ctrl-C to each; what has not ended then, and what it has left behind, is killed. What they said is printed."""
    for call in running.values():
        call.process.send_signal(signal.SIGINT)
    limit = time.monotonic() + leave_s
    for descriptor, call in running.items():
        select.select([descriptor], [], [], max(0.0, limit - time.monotonic()))
        os.killpg(call.process.pid, signal.SIGKILL)  # it has not been waited for, so the number is still its own
        call.process.wait()
        os.close(descriptor)
    for call in running.values():
        end(call, call.process.returncode)


def run(
    commands: Mapping[str, Sequence[str]], at_a_time: int, told: int | None = None, leave_s: float = LEAVE_S
) -> dict[str, tuple[int, str]]:
    """Exit code and output of each. Raises `Told` where the descriptor `told` has a signal's number. None outlives it."""
    waiting, running, ended = list(commands), dict[int, Call](), dict[str, tuple[int, str]]()
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                call = begin(waiting[0], commands[waiting.pop(0)])
                running[os.pidfd_open(call.process.pid)] = call
            ready = select.select([*running, *([] if told is None else [told])], [], [])[0]
            for number in ready:
                if number == told:
                    raise Told(os.read(number, 1)[0])
                done = running.pop(number)
                os.close(number)
                code = done.process.wait()
                ended[done.name] = code, end(done, code)
    finally:
        break_off(running, leave_s)
    return ended


def main() -> int:
    told = hear()
    lane, begun = "slow" if sys.argv[1:] == ["slow"] else "not slow", time.monotonic()
    try:
        every = calls(lane)
        ended = run({name: every.pop(name) for name in ALONE[lane]}, 1, told)
        ended |= run(every, AT_A_TIME[lane], told)
        late = {name: tests for name, (code, said) in ended.items() if code == 1 and (tests := only_late(said))}
        if 0 < sum(map(len, late.values())) <= MOST_AGAIN:
            commands = {f"{name}, again": [*pytest(lane), *tests] for name, tests in late.items()}
            again = run(commands, 1, told)
            ended |= {name: again.pop(f"{name}, again") for name in late}
    except Told as signalled:
        print(f"broken off by {signalled}", flush=True)
        return 128 + signalled.number
    print("=" * 40)
    for name, (code, said) in ended.items():
        for test in late.get(name, ()):
            print(f"OUT OF TIME beside others, so played again by itself: {test}")
        print(f"{name}: {'good' if code == 0 else f'FAILED with exit code {code}'}{counts(said)}")
        print("".join(f"  {line}\n" for line in said.splitlines() if re.match(r"(FAILED|ERROR) tests/", line)), end="")
    print(f"{time.monotonic() - begun:.0f} s in all")
    return int(any(code for code, _ in ended.values()))


def only_late(said: str) -> list[str]:
    """The tests that failed by pytest's summary `said`, where all of them ran out of time; otherwise none."""
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S.*?)(?: - (.*))?$", said, re.MULTILINE)
    late = [test for test, cause in failed if re.match(r"Failed: Timeout|TimeoutError\b|subprocess\.TimeoutExpired\b", cause)]
    return late if len(late) == len(failed) else []


def counts(said: str) -> str:
    """`, 809 passed, 10 deselected in 376.65s` of pytest's output; nothing of another's."""
    found = re.findall(r"^=+ (\d+ (?:passed|failed|error|skipped|deselected).*?) =+$", said, re.MULTILINE)
    return f", {found[-1]}" if found else ""


if __name__ == "__main__":
    sys.exit(main())
