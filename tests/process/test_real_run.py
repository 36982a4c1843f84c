"""The kill matrix on a real run: all processes as they are, with the engine and the backend that need no model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import LIMIT_S, PROMISED_S, Launched

from telescope._launch.process_plan import read_plan
from telescope.runlog.layout import RunDirectory
from telescope.weights.transports.shared_memory import default_folder, run_prefix
from tests.deadlines import refuse_late

START_S = 120.0


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Launched]:
    """A run that has trained two steps and would go on for hours."""
    run = RunDirectory(tmp_path / "run")
    command = [sys.executable, "-m", "telescope.run", "experiment=fake", "number_of_steps=1000000", "cluster.device=cpu"]
    supervisor = subprocess.Popen(
        [*command, f"run_dir={run.path}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + START_S
    while step_of(run) < 2:
        assert supervisor.poll() is None, supervisor.communicate()
        refuse_late(deadline, "no step within a minute")
        time.sleep(0.05)
    launched = Launched(run, supervisor, read_plan(run.plan_json))
    launched.remember()
    yield launched
    if supervisor.poll() is None:
        supervisor.kill()
        supervisor.communicate(timeout=LIMIT_S)
    for process in launched.left_after(LIMIT_S):
        process.kill()


def step_of(run: RunDirectory) -> int:
    return int(json.loads(run.status_json.read_bytes()).get("step", 0)) if run.status_json.exists() else 0


def pid_of(launched: Launched, name: str) -> int:
    """The process itself, not its shim, which has the same words on its command line."""
    (process,) = (
        process
        for process in launched.seen
        if process.cmdline()[-2:] == ["--name", name]
        and process.cmdline()[1] == "-m"
        and process.ppid() != launched.supervisor.pid
    )
    return process.pid


@pytest.mark.parametrize("victim", ["orchestrator", "trainer-0", "worker-0"])
def test_kill_9_of_one_process_ends_a_real_run(training: Launched, victim: str) -> None:
    os.kill(pid_of(training, victim), signal.SIGKILL)
    code, _, err = training.end()
    assert code == 70
    assert f"The run failed: {victim} was killed by signal 9 (SIGKILL)." in err
    assert str(training.run.log(victim)) in err
    assert training.left_after(0) == []
    run_id = json.loads(training.run.run_json.read_bytes())["run_id"]
    assert list(default_folder().glob(f"{run_prefix(run_id)}*")) == []
    if victim != "orchestrator":
        summary = json.loads(training.run.summary_json.read_bytes())
        assert summary["exit_reason"] == f"{victim} was killed by signal 9 (SIGKILL)."
        assert summary["exit_code"] == 70


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["orchestrator", "trainer-0", "worker-0", "Ctrl-C"])
def test_a_real_run_is_over_within_10_s(training: Launched, victim: str) -> None:
    started = time.monotonic()
    if victim == "Ctrl-C":
        training.signal(signal.SIGINT)
    else:
        os.kill(pid_of(training, victim), signal.SIGKILL)
    training.end()
    assert training.left_after(LIMIT_S) == []
    assert time.monotonic() - started < PROMISED_S


def test_kill_9_of_the_supervisor_ends_a_real_run(training: Launched) -> None:
    training.signal(signal.SIGKILL)
    assert training.end()[0] == -signal.SIGKILL
    assert training.left_after(LIMIT_S) == []


def test_ctrl_c_ends_a_real_run_with_a_summary(training: Launched) -> None:
    training.signal(signal.SIGINT)
    code, out, err = training.end()
    assert code == 130
    assert training.left_after(0) == []
    assert "Traceback" not in err
    assert "Had to be ended" not in err
    summary = json.loads(training.run.summary_json.read_bytes())
    assert summary["steps"] >= 2
    assert (summary["exit_reason"], summary["exit_code"]) == ("interrupted by SIGINT", 130)
    assert json.loads(training.run.exit_json.read_bytes())["cause"] is None
    assert str(training.run.path) in out


def test_a_second_ctrl_c_kills_a_real_run(training: Launched) -> None:
    os.kill(pid_of(training, "orchestrator"), signal.SIGSTOP)  # so that the first one is not enough
    training.signal(signal.SIGINT)
    assert training.supervisor.stderr is not None
    while "kills at once" not in training.supervisor.stderr.readline():
        assert training.supervisor.poll() is None
    training.signal(signal.SIGINT)
    assert training.end()[0] == 130
    assert training.left_after(0) == []
