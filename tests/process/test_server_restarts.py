"""A server that dies or hangs while the run is under way is ended with all below it and started again, within its budget."""

from __future__ import annotations

import json
import os
import signal

import msgspec
import psutil
from conftest import Launch, Launched, stand_in, tell_supervisor, until

from telescope._launch.server_restarts import WINDOW_S, RestartBudget
from telescope.wire.supervisor_channel import FenceServer, RunEnding, RunUnderway, ServerEnded

ORCHESTRATOR, WORKER = stand_in("orchestrator", "relays"), stand_in("worker-0", "obey")


def next_life(launched: Launched, name: str, before: int) -> int:
    """The pid of the process's next life, once that is up."""
    until(lambda: launched.pids(name)[0] != before, f"another life of {name}")
    launched.remember()
    return launched.pids(name)[0]


def heard(launched: Launched) -> list[ServerEnded]:
    """What the supervisor has told the orchestrator of servers."""
    path = launched.run.path / "heard"
    return [msgspec.json.decode(line, type=ServerEnded) for line in path.read_bytes().splitlines()] if path.exists() else []


def under_way(launched: Launched) -> Launched:
    launched.wait_until_up()
    tell_supervisor(launched.run, RunUnderway())
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
    until(lambda: heard(launched) != [], "told of the end")
    assert heard(launched) == [ServerEnded("server-0", 1, first, "server-0 was killed by signal 9 (SIGKILL).")]
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
    tell_supervisor(launched.run, FenceServer("server-0", first, "it was not heard for 15 s."))
    next_life(launched, "server-0", first)
    assert not any(psutil.pid_exists(pid) for pid in (first, *below))
    record, err = interrupted(launched)
    assert record["restarts"] == {"server-0": 1}
    assert "server-0 was fenced: it was not heard for 15 s. It is started again." in err


def test_a_request_to_fence_an_earlier_life_hits_nobody(launch: Launch) -> None:
    launched = under_way(launch(ORCHESTRATOR, stand_in("server-0", "obey"), stand_in("server-1", "obey"), restarts=3))
    (pid,), (other,) = launched.pids("server-0"), launched.pids("server-1")
    tell_supervisor(launched.run, FenceServer("server-0", pid - 1, "late"))
    tell_supervisor(launched.run, FenceServer("server-1", other, "in time"))
    next_life(launched, "server-1", other)  # what was said before is heard too
    record, _ = interrupted(launched)
    assert (record["restarts"], psutil.pid_exists(pid)) == ({"server-1": 1}, False)


def test_a_stopped_shim_does_not_keep_its_server_from_a_next_life(launch: Launch) -> None:
    launched = under_way(launch(ORCHESTRATOR, stand_in("server-0", "obey"), WORKER, restarts=3, fence_s=0.5))
    (pid,) = launched.pids("server-0")
    os.kill(launched.shim("server-0"), signal.SIGSTOP)
    tell_supervisor(launched.run, FenceServer("server-0", pid, "stuck."))
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
    budget = RestartBudget(3)
    assert [budget.spend("server-0", now) for now in (0.0, 10.0, 20.0, 30.0)] == [0.0, 1.0, 2.0, None]
    assert budget.spend("server-1", 30.0) == 0.0
    assert budget.describe_spent("server-0") == " It was started again 3 times within an hour (cluster.max_server_restarts)."
    assert budget.spend("server-0", WINDOW_S) == 2.0
    assert budget.spend("server-0", WINDOW_S + 5.0) is None
    assert budget.spend("server-0", 2 * WINDOW_S + 100.0) == 0.0


def test_a_budget_waits_half_a_minute_at_the_most():
    budget = RestartBudget(10)
    assert [budget.spend("server-0", float(now)) for now in range(9)] == [0, 1, 2, 4, 8, 16, 30, 30, 30]


def test_once_the_run_ends_a_death_starts_nothing(launch: Launch) -> None:
    launched = under_way(launch(ORCHESTRATOR, stand_in("server-0", "obey"), WORKER, restarts=3, grace_s=0.5))
    tell_supervisor(launched.run, RunEnding())
    tell_supervisor(launched.run, FenceServer("server-0", launched.pids("server-0")[0], "too late"))
    os.kill(launched.pids("server-0")[0], signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 70
    assert "The run failed: server-0 was killed by signal 9 (SIGKILL)." in err
    assert json.loads(launched.run.exit_json.read_bytes())["restarts"] == {}
