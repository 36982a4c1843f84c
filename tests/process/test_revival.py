"""A server that dies or hangs while the run is under way is ended with all below it and started again, within its budget."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import LIMIT_S, Launch, Launched, stand_in

from telescope._launch.plan import Plan, ProcessPlan
from telescope._launch.restarts import WINDOW_S, Restarts
from telescope._launch.revival import Revival
from telescope.runlog import control
from telescope.runlog.layout import RunDirectory

ORCHESTRATOR, WORKER = stand_in("orchestrator", "obey"), stand_in("worker-0", "obey")


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not {what}"
        time.sleep(0.02)


def next_life(launched: Launched, name: str, before: int) -> int:
    """The pid of the process's next life, once that is up."""
    until(lambda: launched.pids(name)[0] != before, f"another life of {name}")
    launched.remember()
    return launched.pids(name)[0]


def under_way(launched: Launched) -> Launched:
    launched.wait_until_up()
    control.open_run(launched.run)
    return launched


def interrupted(launched: Launched) -> tuple[dict[str, object], str]:
    launched.signal(signal.SIGINT)
    _, _, err = launched.end()
    assert launched.left_after(0) == []
    return json.loads(launched.run.exit_json.read_bytes()), err


def test_a_killed_server_gets_a_second_life_with_a_log_of_its_own(launch: Launch) -> None:
    launched = under_way(launch(ORCHESTRATOR, stand_in("server-0", "family"), WORKER, restarts=3))
    first, *below = launched.pids("server-0")
    listens = launched.run.server("server-0")
    listens.parent.mkdir(exist_ok=True)
    listens.write_text('{"url": "http://127.0.0.1:8100/v1"}')
    os.kill(first, signal.SIGKILL)
    second = next_life(launched, "server-0", first)
    assert not listens.exists()  # nor does the run directory say that it listens
    assert not any(psutil.pid_exists(pid) for pid in (first, *below))  # nothing of the first life holds its memory or port
    ended = control.ends(launched.run)
    assert ended == {"server-0": control.Ended(1, first, "server-0 was killed by signal 9 (SIGKILL).")}
    assert psutil.pid_exists(second)
    record, err = interrupted(launched)
    assert (record["exit_code"], record["cause"], record["restarts"]) == (130, None, {"server-0": 1})
    assert "server-0 was killed by signal 9 (SIGKILL). It is started again." in err
    assert launched.run.log("server-0", 2).name == "server-0.2.log"
    assert launched.run.log("server-0", 2).exists()


def test_a_stopped_server_is_fenced_at_the_orchestrators_word(launch: Launch) -> None:
    launched = under_way(launch(ORCHESTRATOR, stand_in("server-0", "family"), WORKER, restarts=3))
    first, *below = launched.pids("server-0")
    os.kill(first, signal.SIGSTOP)
    control.ask_to_fence(launched.run, "server-0", control.Fence(first, "it was not heard for 15 s."))
    next_life(launched, "server-0", first)
    assert not any(psutil.pid_exists(pid) for pid in (first, *below))
    assert not launched.run.fence("server-0").exists()
    record, err = interrupted(launched)
    assert record["restarts"] == {"server-0": 1}
    assert "server-0 was fenced: it was not heard for 15 s. It is started again." in err


def test_a_request_to_fence_an_earlier_life_hits_nobody(launch: Launch) -> None:
    launched = under_way(launch(ORCHESTRATOR, stand_in("server-0", "obey"), WORKER, restarts=3))
    (pid,) = launched.pids("server-0")
    control.ask_to_fence(launched.run, "server-0", control.Fence(pid - 1, "late"))
    until(lambda: not launched.run.fence("server-0").exists(), "read")
    record, _ = interrupted(launched)
    assert (record["restarts"], psutil.pid_exists(pid)) == ({}, False)


def test_a_stopped_shim_does_not_keep_its_server_from_a_next_life(launch: Launch) -> None:
    launched = under_way(launch(ORCHESTRATOR, stand_in("server-0", "obey"), WORKER, restarts=3, fence_s=0.5))
    (pid,) = launched.pids("server-0")
    os.kill(launched.shim("server-0"), signal.SIGSTOP)
    control.ask_to_fence(launched.run, "server-0", control.Fence(pid, "stuck."))
    next_life(launched, "server-0", pid)
    assert interrupted(launched)[0]["restarts"] == {"server-0": 1}


def test_a_shim_that_is_stopped_after_its_report_does_not_keep_its_server_from_a_next_life_either(launch: Launch) -> None:
    launched = under_way(launch(ORCHESTRATOR, stand_in("server-0", "stop_shim"), WORKER, restarts=3, fence_s=0.5))
    first, below = launched.pids("server-0")
    os.kill(first, signal.SIGKILL)
    next_life(launched, "server-0", first)
    assert not psutil.pid_exists(below)
    record, err = interrupted(launched)
    assert record["restarts"] == {"server-0": 1}
    assert "server-0 was killed by signal 9 (SIGKILL). It is started again." in err


def test_a_reason_without_a_full_stop_is_told_as_a_sentence_and_once_with_its_name(launch: Launch) -> None:
    """The model's folder went between the start and the restart, say."""
    own = "server-0: model.name=/models/mine: there is no such folder"
    launched = under_way(
        launch(ORCHESTRATOR, stand_in("server-0", "confess", "1", own, "0.2"), WORKER, restarts=1, grace_s=0.5)
    )
    code, _, err = launched.end()
    assert code == 70
    told = "server-0 ended with exit code 1: model.name=/models/mine: there is no such folder."
    assert f"{told} It is started again.\n" in err
    assert f"The run failed: {told} It was started again 1 times within an hour (cluster.max_server_restarts)." in err


def test_a_server_whose_restarts_are_used_up_ends_the_run_with_its_own_reason(launch: Launch) -> None:
    launched = under_way(
        launch(ORCHESTRATOR, stand_in("server-0", "crash", "70", "the engine is gone", "0.2"), WORKER, restarts=2, grace_s=0.5)
    )
    code, _, err = launched.end()
    assert code == 70
    assert (
        "The run failed: server-0 ended with exit code 70. "
        "It was started again 2 times within an hour (cluster.max_server_restarts)." in err
    )
    assert str(launched.run.log("server-0", 3)) in err
    assert json.loads(launched.run.exit_json.read_bytes())["restarts"] == {"server-0": 2}
    assert launched.left_after(0) == []


def test_before_the_run_is_under_way_a_death_ends_it(launch: Launch) -> None:
    launched = launch(ORCHESTRATOR, stand_in("server-0", "obey"), WORKER, restarts=3, grace_s=0.5)
    launched.wait_until_up()
    os.kill(launched.pids("server-0")[0], signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 70
    assert "The run failed: server-0 was killed by signal 9 (SIGKILL)." in err


def test_a_worker_is_not_started_again(launch: Launch) -> None:
    launched = under_way(launch(ORCHESTRATOR, stand_in("server-0", "obey"), WORKER, restarts=3, grace_s=0.5))
    os.kill(launched.pids("worker-0")[0], signal.SIGKILL)
    assert "The run failed: worker-0 was killed by signal 9 (SIGKILL)." in launched.end()[2]


def test_a_budget_of_three_waits_longer_each_time_and_is_full_again_after_an_hour():
    budget = Restarts(3)
    assert [budget.spend("server-0", now) for now in (0.0, 10.0, 20.0, 30.0)] == [0.0, 1.0, 2.0, None]
    assert budget.spend("server-1", 30.0) == 0.0
    assert budget.used_up("server-0") == " It was started again 3 times within an hour (cluster.max_server_restarts)."
    assert budget.spend("server-0", WINDOW_S) == 2.0
    assert budget.spend("server-0", WINDOW_S + 5.0) is None
    assert budget.spend("server-0", 2 * WINDOW_S + 100.0) == 0.0


def test_a_budget_waits_half_a_minute_at_the_most():
    budget = Restarts(10)
    assert [budget.spend("server-0", float(now)) for now in range(9)] == [0, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_file_system_that_fails_for_a_moment_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the supervisor's look for fences nor the orchestrator's for ends: what was under way is, and both look again."""
    run = RunDirectory.create(tmp_path / "run")
    plan = Plan("cpu", (ProcessPlan("server-0", "server", 0, "here", (), {}, (), 1),), max_server_restarts=1)
    revival = Revival(run, plan, print, 1.0)
    looked: list[str] = []
    monkeypatch.setattr(revival, "_look_at", lambda process, now: looked.append(process) or "")

    def stale(*_: object, **__: object) -> None:
        raise OSError(116, "Stale file handle")

    def seen() -> tuple[object, object]:
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", stale)
            patched.setattr(os, "scandir", stale)
            return revival.look({"server-0": "the server"}, 0.0), control.ends(run)  # type: ignore[dict-item]

    assert (seen(), looked) == ((None, {}), [])
    control.open_run(run)
    assert revival.look({"server-0": "the server"}, 0.0) is None  # type: ignore[dict-item]
    assert (seen(), looked) == ((None, {}), ["the server", "the server"])
