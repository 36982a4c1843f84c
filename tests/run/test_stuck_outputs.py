"""Whole runs whose terminal takes nothing any more (Ctrl-S, a pipe that nobody reads) or whose files hang: the run goes on, a
server that dies is started again, and a signal ends it as ever."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import time
from collections.abc import Iterator

import pytest

from telescope.exit_codes import STOPPED
from tests.deadlines import refuse_late
from tests.run.conftest import Start, WholeRun

LONG = ("experiment=fake", "number_of_steps=100000", "cluster.device=cpu", "backend.step_s=0.05", "checkpoint.every=50")
CTRL_S, CTRL_Q = b"\x13", b"\x11"


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Its two ends: what a person has, and what the run has."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def read_all(descriptor: int, limit_s: float = 5.0) -> str:
    """What comes until nothing has come for a moment."""
    read, until = b"", time.monotonic() + limit_s
    while time.monotonic() < until:
        try:
            more = os.read(descriptor, 65_536)
        except BlockingIOError:
            time.sleep(0.1)
            continue
        except OSError:
            break
        read += more
    return read.decode(errors="replace")


def assert_supervised(run: WholeRun) -> None:
    """A server that is killed is back, and the run goes on with it."""
    run.find("server-0").kill()
    run.until(lambda: run.directory.log("server-0", 2).exists(), "a second server-0")
    run.until_step((run.status().get("step") or 0) + 20)


@pytest.mark.timeout(180)
def test_a_terminal_that_is_stopped_stops_neither_the_run_nor_its_end(start: Start, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    run = start(*LONG, shown_on=theirs)
    run.until_step(10)
    assert "step" in read_all(ours, 2.0)
    os.write(ours, CTRL_S)
    assert_supervised(run)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60) == STOPPED
    assert run.summary()["exit_reason"]
    assert json.loads(run.directory.exit_json.read_text())["exit_code"] == STOPPED
    assert run.left_after(10) == []


@pytest.mark.timeout(180)
def test_what_a_stopped_terminal_did_not_take_is_shown_once_it_goes_on(start: Start, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    run = start(*LONG, shown_on=theirs)
    run.until_step(10)
    read_all(ours, 1.0)
    os.write(ours, CTRL_S)
    run.until_step((run.status().get("step") or 0) + 20)
    os.write(ours, CTRL_Q)
    assert "step" in read_all(ours, 3.0)
    run.process.send_signal(signal.SIGINT)
    said = ""
    deadline = time.monotonic() + 60
    while run.process.poll() is None:
        refuse_late(deadline, said)
        said += read_all(ours, 0.5)
    said += read_all(ours, 1.0)
    assert run.process.returncode == STOPPED
    assert re.search(r"to go on from the checkpoint of step \d+: .*telescope runs resume", said)


@pytest.mark.timeout(180)
def test_a_pipe_that_nobody_reads_loses_lines_and_nothing_else(start: Start) -> None:
    unread, theirs = os.pipe()
    try:
        run = start(*LONG, "logging.log_to_console=true", "debug=true", shown_on=theirs)
        run.until_step(300, 120)
        assert_supervised(run)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(60) == STOPPED
    finally:
        os.close(unread)
        os.close(theirs)
    assert run.left_after(10) == []


@pytest.mark.timeout(180)
@pytest.mark.parametrize("answers", [True, False])
def test_a_file_that_hangs_delays_a_restart_and_no_signal(start: Start, answers: bool) -> None:
    """A FIFO stands for a file on a server that does not answer: opening it waits until somebody opens its other end."""
    run = start(*LONG)
    run.until_step(10)
    hangs = run.directory.failure("server-0")
    hangs.parent.mkdir(exist_ok=True)
    os.mkfifo(hangs)
    run.find("server-0").kill()
    run.until(lambda: "server-0 was killed by signal 9" in run.said(), "noticed")
    if answers:
        with hangs.open("w"):
            pass
        run.until(lambda: run.directory.log("server-0", 2).exists(), "a second server-0")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(90) == STOPPED, run.said()
    assert [part for part in run.left_after(10) if "python" in part] == []
