"""Whole runs that lose servers: nothing is trained twice or lost, and what comes back gets the current version first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.replay import decode_line
from tests.run.conftest import ROOT, Start, WholeRun

STEPS = 25
FAKE = ("experiment=fake", f"number_of_steps={STEPS}", "cluster.device=cpu", "backend.step_s=0.1")
BUSY = "inference.fake_token_s=0.05"
"""Requests are in flight at any time."""
SLOW = "inference.fake_weights_s=0.5"
"""So is a weight update."""
LONG = "backend.step_s=0.5"
"""So that a run which another server carries on alone is not over before the killed one is back."""
FEW = 14
"""Steps of a run with slow updates: more than pass until a server that was killed is back."""


def journal(run: WholeRun) -> list[tuple[float, Any, list[Any]]]:
    lines = run.directory.journal.read_bytes().splitlines()[1:]
    read = [decode_line(line, number) for number, line in enumerate(lines, 2)]
    return [(line.now, line.event, line.commands) for line in read]


def assert_complete(run: WholeRun, *, restarts: dict[str, int], said: str = "", steps: int = STEPS) -> None:
    """Every step was trained, every group has its end, the journal replays, and the restarts are counted and explained."""
    assert run.wait() == 0, run.said()
    summary = run.summary()
    assert (summary["ok"], summary["steps"], summary["restarts"]) == (True, steps, restarts)
    assert [row["step"] for row in run.rows("step_metrics")] == list(range(1, steps + 1))
    trained = [group for row in run.rows("batches") for group in row["group_ids"]]
    assert len(trained) == len(set(trained)) == steps * 4
    assert (summary["rollouts"]["failed"], summary["tokens"]["lost"]) == (0, 0)
    last = {row["group_id"]: row["state"] for row in run.rows("groups")}
    assert set(last.values()) <= {"trained", "discarded", "cancelled"}
    assert sorted(last) == list(range(len(last)))
    assert said in run.said()
    replayed = subprocess.run(
        [sys.executable, "-m", "telescope", "replay", str(run.directory.path)],
        capture_output=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert replayed.returncode == 0, replayed.stdout
    assert run.left_after(30) == []
    assert_no_group_on_an_older_server(run)


def assert_no_group_on_an_older_server(run: WholeRun) -> None:
    """From the journal alone: each request went to a server that had committed its group's version."""
    served: dict[str, int] = {}
    travelling: list[str] = []
    starts: dict[int, int] = {}
    asked: dict[str, int] = {}
    for _, event, commands in journal(run):
        match event:
            case seen.ServerJoined(server=server, version=version):
                served[server] = version
            case seen.ServerLost(server=server):
                served.pop(server, None)
                travelling = [name for name in travelling if name != server]
            case seen.UpdateDone(version=version):
                served |= dict.fromkeys(travelling, version)
            case seen.TurnStarted():
                asked[event.request_id] = event.rollout_id // 4
        for command in commands:
            match command:
                case do.UpdateWeights():
                    travelling = list(served)
                case do.RecordGroupState(group_id=group, version=version):
                    starts[group] = version
                case do.PlaceRequest(request_id=request_id, server=server):
                    assert served[server] >= starts[asked[request_id]]


def in_phase(run: WholeRun, phase: str) -> bool:
    return phase in str(run.status().get("doing"))


def test_kill_9_of_the_only_server_in_mid_generation(start: Start):
    run = start(*FAKE, BUSY)
    run.until_step(2)
    run.until(lambda: run.status()["in_flight"] > 0, "generating")
    os.kill(run.find("server-0").pid, signal.SIGKILL)
    assert_complete(run, restarts={"server-0": 1}, said="server-0 was killed by signal 9 (SIGKILL). It is started again.")
    assert run.directory.log("server-0", 2).exists()
    assert any("given up and started again" in row["message"] for row in run.rows("alerts"))


@pytest.mark.slow
def test_requests_of_a_killed_server_go_to_the_other_at_once(start: Start):
    run = start(*FAKE, BUSY, LONG, "cluster.inference_num_workers=2")
    run.until_step(2)
    run.until(lambda: run.status()["in_flight"] > 0, "generating")
    os.kill(run.find("server-1").pid, signal.SIGKILL)
    assert_complete(run, restarts={"server-1": 1})
    (lost,) = [commands for _, event, commands in journal(run) if isinstance(event, seen.ServerLost)]
    assert {command.server for command in lost if isinstance(command, do.PlaceRequest)} <= {"server-0"}
    assert run.summary()["rollouts"]["retried"] == 0


def test_kill_9_between_prepare_and_commit(start: Start):
    run = start(*FAKE, SLOW, "cluster.inference_num_workers=2", f"number_of_steps={FEW}")
    run.until_step(2)
    run.until(lambda: in_phase(run, "being prepared"), "preparing")
    os.kill(run.find("server-0").pid, signal.SIGKILL)
    assert_complete(run, restarts={"server-0": 1}, steps=FEW)
    commits = [row for row in run.rows("weights") if row["phase"] == "committed"]
    assert {row["version"] for row in commits} == set(range(1, FEW + 1))


@pytest.mark.slow
def test_kill_9_of_the_only_server_in_mid_update(start: Start):
    run = start(*FAKE, SLOW)
    run.until_step(2)
    run.until(lambda: in_phase(run, "being prepared"), "preparing")
    os.kill(run.find("server-0").pid, signal.SIGKILL)
    assert_complete(run, restarts={"server-0": 1})


@pytest.mark.slow
def test_the_survivor_of_a_broken_broadcast_is_not_taken_for_one_that_hangs(start: Start):
    """Killed shortly before an update: its sending mostly fails at the first byte, before the other has begun to receive."""
    run = start(*FAKE, SLOW, "backend.step_s=0.3", "weight_sync.transport=gloo", "cluster.inference_num_workers=2")
    run.until_step(3)
    run.until(lambda: in_phase(run, "being prepared"), "preparing")
    run.until(lambda: not in_phase(run, "being prepared"), "done")  # a step follows before the next one
    os.kill(run.find("server-0").pid, signal.SIGKILL)
    assert_complete(run, restarts={"server-0": 1})
    assert not any("hangs" in row["message"] for row in run.rows("alerts"))


@pytest.mark.slow
def test_every_server_killed_at_once(start: Start):
    run = start(*FAKE, BUSY, "cluster.inference_num_workers=2")
    run.until_step(2)
    for name in ("server-0", "server-1"):
        os.kill(run.find(name).pid, signal.SIGKILL)
    assert_complete(run, restarts={"server-0": 1, "server-1": 1})


def test_a_silent_server_is_fenced_and_started_again(start: Start):
    run = start(*FAKE, BUSY, "cluster.inference_num_workers=2", "orchestrator.silent_s=6")
    run.until_step(2)
    stopped = run.find("server-0")
    os.kill(stopped.pid, signal.SIGSTOP)
    assert_complete(run, restarts={"server-0": 1}, said="server-0 was fenced: server-0 (pid")
    assert not stopped.is_running()


@pytest.mark.slow
def test_a_server_that_never_answers_prepare_is_fenced_and_the_others_go_on(start: Start):
    run = start(*FAKE, "inference.fake_weights_s=0.2", "cluster.inference_num_workers=2", "weight_sync.update_timeout_s=3")
    run.until_step(2)
    run.until(lambda: in_phase(run, "being prepared"), "preparing")
    os.kill(run.find("server-1").pid, signal.SIGSTOP)
    assert_complete(run, restarts={"server-1": 1}, said="within weight_sync.update_timeout_s=3 s")


@pytest.mark.slow
def test_a_server_that_dies_after_each_start_ends_the_run_with_its_reason(start: Start):
    run = start(
        *FAKE[:1], "number_of_steps=100000", "backend.step_s=0.1", "cluster.max_server_restarts=2", "cluster.device=cpu"
    )
    run.until_step(1)
    for life in (1, 2, 3):
        pid = run.find("server-0").pid
        os.kill(pid, signal.SIGKILL)
        run.seen.clear()
        if life < 3:
            run.until(lambda life=life: run.status()["restarts"].get("server-0") == life, f"back in life {life + 1}")
    assert run.wait() == 70
    sentence = (
        "server-0 was killed by signal 9 (SIGKILL). It was started again 2 times within an hour (cluster.max_server_restarts)."
    )
    assert sentence in run.said()
    assert run.summary()["exit_reason"] == sentence
    assert run.left_after(30) == []


def test_without_restarts_a_servers_death_ends_the_run(start: Start):
    run = start(*FAKE, "cluster.max_server_restarts=0")
    run.until_step(1)
    os.kill(run.find("server-0").pid, signal.SIGKILL)
    assert run.wait() == 70
    assert "The run failed: server-0 was killed by signal 9 (SIGKILL)." in run.said()
    assert run.summary()["exit_reason"] == "server-0 was killed by signal 9 (SIGKILL)."


@pytest.mark.slow
def test_a_killed_server_whose_requests_came_straight_from_the_worker(start: Start):
    run = start(*FAKE, BUSY, LONG, "cluster.inference_num_workers=2", "wire.direct=true")
    run.until_step(2)
    run.until(lambda: run.status()["in_flight"] > 0, "generating")
    os.kill(run.find("server-1").pid, signal.SIGKILL)
    assert_complete(run, restarts={"server-1": 1})
