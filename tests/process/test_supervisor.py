"""The supervisor with real processes: whatever dies, nothing is left, in time, and the cause is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from conftest import LIMIT_S, PROMISED_S, Launch, stand_in

from telescope._launch.process_plan import MEETING_FILE, LaunchPlan, write_plan
from telescope._launch.supervisor import SupervisorTimeouts
from telescope.runlog.layout import RunDirectory
from tests.deadlines import refuse_late

FLEET = (
    stand_in("orchestrator", "obey"),
    stand_in("server-0", "family"),
    stand_in("trainer-0", "obey"),
    stand_in("trainer-1", "obey"),
    stand_in("worker-0", "family"),
)
WITH_A_DEAF_RANK = (*FLEET[:3], stand_in("trainer-1", "deaf"), FLEET[4])


def test_a_run_whose_orchestrator_finishes_ends_with_0_and_leaves_nothing(launch: Launch) -> None:
    launched = launch(
        stand_in("orchestrator", "finish", "0.5"), stand_in("server-0", "finish"), stand_in("worker-0", "finish", "0.7")
    )
    launched.wait_until_up()
    code, out, err = launched.end()
    assert (code, err) == (0, "")
    assert str(launched.run.path) in out
    assert launched.left_after(0) == []
    record = json.loads(launched.run.exit_json.read_bytes())
    ended = {"orchestrator": 0, "server-0": 0, "worker-0": 0}
    whole = {"exit_code": 0, "cause": None, "processes": ended, "restarts": {}, "interrupted": None, "dropped_lines": 0}
    assert record == whole


@pytest.mark.parametrize("victim", ["orchestrator", "server-0", "trainer-0", "trainer-1", "worker-0"])
def test_kill_9_of_any_process_ends_the_run_and_names_it(launch: Launch, victim: str) -> None:
    launched = launch(*(WITH_A_DEAF_RANK if victim == "trainer-0" else FLEET))
    launched.wait_until_up()
    os.kill(launched.pids(victim)[0], signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 70
    assert f"The run failed: {victim} was killed by signal 9 (SIGKILL)." in err
    assert str(launched.run.log(victim)) in err
    assert launched.left_after(0) == []
    assert json.loads(launched.run.exit_json.read_bytes())["cause"]["process"] == victim


def test_what_processes_get_after_a_failure_and_after_ctrl_c_comes_to_less_than_10_s() -> None:
    patience = SupervisorTimeouts()
    shims = 2 * patience.shim_s
    assert patience.grace_s + patience.follow_s + patience.hurry_s + shims == 8.0
    assert patience.stop_s + patience.follow_s + patience.hurry_s + patience.shim_s == 9.5


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["orchestrator", "server-0", "trainer-0", "supervisor", "Ctrl-C"])
def test_whatever_is_killed_the_run_is_over_within_10_s(launch: Launch, victim: str) -> None:
    launched = launch(*WITH_A_DEAF_RANK)
    launched.wait_until_up()
    started = time.monotonic()
    if victim in launched.plan.names:
        os.kill(launched.pids(victim)[0], signal.SIGKILL)
    else:
        launched.signal(signal.SIGINT if victim == "Ctrl-C" else signal.SIGKILL)
    launched.end()
    assert launched.left_after(LIMIT_S) == []
    assert time.monotonic() - started < PROMISED_S


@pytest.mark.parametrize("victim", ["orchestrator", "server-0", "trainer-1"])
def test_kill_9_of_a_shim_takes_its_process_with_it_and_names_it(launch: Launch, victim: str) -> None:
    launched = launch(*FLEET, grace_s=0.5)
    launched.wait_until_up()
    os.kill(launched.shim(victim), signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 70
    assert f"{victim} ended, because its shim was killed by signal 9 (SIGKILL)." in err
    assert launched.left_after(0) == []


def test_kill_9_of_the_supervisor_leaves_nothing(launch: Launch) -> None:
    launched = launch(*WITH_A_DEAF_RANK)
    launched.wait_until_up()
    launched.signal(signal.SIGKILL)
    assert launched.end()[0] == -signal.SIGKILL
    assert launched.left_after(LIMIT_S) == []


def test_a_stopped_shim_does_not_hold_the_run_up(launch: Launch) -> None:
    launched = launch(*FLEET, grace_s=0.5)
    launched.wait_until_up()
    os.kill(launched.shim("server-0"), signal.SIGSTOP)
    os.kill(launched.pids("trainer-0")[0], signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 70
    assert "trainer-0 was killed by signal 9" in err
    assert launched.left_after(0) == []


def test_kill_9_of_an_engine_is_told_in_its_owners_words(launch: Launch) -> None:
    launched = launch(stand_in("orchestrator", "obey"), stand_in("server-0", "engine_owner"), stand_in("worker-0", "obey"))
    launched.wait_until_up()
    os.kill(launched.pids("server-0")[1], signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 70
    assert "server-0 ended with exit code 1: the engine process of server-0 died (-9)" in err
    assert launched.left_after(0) == []


def test_a_crash_shows_its_last_lines(launch: Launch) -> None:
    launched = launch(stand_in("orchestrator", "obey"), stand_in("worker-0", "crash", "1", "ValueError: no such dataset"))
    launched.wait_until_up()
    code, _, err = launched.end()
    assert code == 70
    assert "The run failed: worker-0 ended with exit code 1." in err
    assert "    ValueError: no such dataset\n" in err


def test_the_first_to_die_is_the_cause_not_the_loudest(launch: Launch) -> None:
    launched = launch(
        stand_in("orchestrator", "follow", "trainer-0", "70", "lost a peer"),
        stand_in("trainer-0", "crash", "1", "out of memory"),
        stand_in("worker-0", "follow", "trainer-0", "1", "connection reset"),
    )
    launched.wait_until_up()
    assert "The run failed: trainer-0 ended with exit code 1." in launched.end()[2]


def test_an_orchestrator_that_ends_for_a_silent_peer_speaks_for_it(launch: Launch) -> None:
    launched = launch(
        stand_in("orchestrator", "confess", "70", "server-0 has been silent for 15 s."),
        stand_in("server-0", "deaf"),
        stand_in("worker-0", "obey"),
        grace_s=0.5,
    )
    launched.wait_until_up()
    code, _, err = launched.end()
    assert code == 70
    assert "The run failed: server-0 has been silent for 15 s." in err
    assert str(launched.run.log("server-0")) in err
    assert launched.left_after(0) == []


def test_an_error_of_the_orchestrators_own_is_exit_code_1_in_its_words(launch: Launch) -> None:
    sentence = "the journal /data/run/journal/core.jsonl cannot be written (No space left on device): free disk space"
    launched = launch(stand_in("orchestrator", "confess", "1", sentence), stand_in("trainer-0", "obey"))
    launched.wait_until_up()
    code, _, err = launched.end()
    assert code == 1
    assert f"The run failed: orchestrator ended with exit code 1: {sentence}" in err


def test_a_run_that_lost_its_last_checkpoint_ends_with_an_error_of_its_own(launch: Launch) -> None:
    """The sentence names a rank, whose fault it is not: 70 would start the run again, which would train and lose the same."""
    sentence = "all 5 steps are trained; no checkpoint of it: trainer-0 could not write its part: the disk is full. Mend it"
    launched = launch(
        stand_in("orchestrator", "confess", "1", sentence), stand_in("trainer-0", "finish"), stand_in("server-0", "finish")
    )
    launched.wait_until_up()
    code, out, err = launched.end()
    assert code == 1
    assert err.startswith(f"The run failed: orchestrator ended with exit code 1: {sentence}\n")
    assert out == f"run directory: {launched.run.path}\n"
    record = json.loads(launched.run.exit_json.read_text())
    assert (record["exit_code"], record["cause"]["process"]) == (1, "orchestrator")


def test_an_error_of_the_orchestrators_own_is_the_cause_whatever_breaks_while_it_closes(launch: Launch) -> None:
    """A rank that ends badly while the orchestrator, whose last checkpoint is lost, says so."""
    launched = launch(stand_in("orchestrator", "closing_badly", "it was lost"), stand_in("trainer-0", "crash", "1", "late"))
    launched.wait_until_up()
    code, _, err = launched.end()
    assert code == 1
    assert err.startswith("The run failed: orchestrator ended with exit code 1: it was lost\n")
    assert launched.run.run_failure.read_text() == "orchestrator ended with exit code 1: it was lost\n"


def test_an_error_of_the_orchestrators_own_is_told_of_a_stopped_run_too(launch: Launch) -> None:
    """It was stopped while it saved, and the full disk took no summary either."""
    launched = launch(stand_in("orchestrator", "closing_badly", "no checkpoint: the disk is full"))
    launched.wait_until_up()
    launched.signal(signal.SIGTERM)
    code, _, err = launched.end()
    assert code == 143
    assert err.endswith(
        "\nThe orchestrator ended with an error of its own: no checkpoint: the disk is full. What was trained since the latest "
        "complete checkpoint is not saved.\n"
    )


def test_what_a_process_leaves_behind_is_ended_with_it(launch: Launch) -> None:
    launched = launch(stand_in("orchestrator", "finish", "0.5"), stand_in("worker-0", "leave_orphan"))
    launched.wait_until_up()
    assert launched.end()[0] == 0
    assert launched.left_after(0) == []


def test_a_process_that_kills_its_own_group_does_not_hit_its_shim(launch: Launch) -> None:
    launched = launch(stand_in("orchestrator", "obey"), stand_in("worker-0", "signal_group"))
    launched.wait_until_up()
    assert "worker-0 was killed by signal 9 (SIGKILL)." in launched.end()[2]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_one_interrupt_ends_cleanly(launch: Launch, number: int, code: int) -> None:
    launched = launch(*WITH_A_DEAF_RANK)
    launched.wait_until_up()
    launched.signal(number)
    assert launched.end()[0] == code
    assert launched.left_after(0) == []


def test_under_nohup_a_hang_up_is_none(launch: Launch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launched = launch(stand_in("orchestrator", "obey"), stand_in("worker-0", "obey"))
    finally:
        signal.signal(signal.SIGHUP, before)
    launched.wait_until_up()
    status = Path(f"/proc/{launched.supervisor.pid}/status").read_text()
    (ignored,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn:"))
    assert ignored & 1 << (signal.SIGHUP - 1)
    launched.signal(signal.SIGHUP)
    launched.signal(signal.SIGTERM)
    assert launched.end()[0] == 143
    assert launched.left_after(0) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_before_the_orchestrator_can_hear_waits_for_it(launch: Launch, number: int) -> None:
    """It still imports: a signal that it has said nothing about would be its death, without a summary."""
    launched = launch(stand_in("orchestrator", "waits_for_the_signal"), stand_in("worker-0", "obey"))
    launched.wait_until_up()
    launched.signal(number)
    code, _, _ = launched.end()
    assert code == 128 + number
    ended = json.loads(launched.run.exit_json.read_bytes())["processes"]
    assert ended["orchestrator"] == 128 + number  # by its own decision; by the signal it would be -number
    assert json.loads(launched.run.summary_json.read_bytes()) == {"steps": 0}


def test_an_orchestrator_that_ignores_the_interrupt_is_killed(launch: Launch) -> None:
    launched = launch(stand_in("orchestrator", "deaf"), stand_in("server-0", "family"), stand_in("worker-0", "deaf"))
    launched.wait_until_up()
    launched.signal(signal.SIGINT)
    code, _, err = launched.end()
    assert code == 130
    assert "worker-0" in err
    assert launched.left_after(0) == []


def test_an_interrupt_while_the_summary_prints_lets_it_finish_and_is_the_exit_code(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary is longer than a pipe holds, so the supervisor stands in the middle of it when the signal comes."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # an unbuffered Python loses the rest of an interrupted write
    launched = launch(stand_in("orchestrator", "finish", "0.5"), stand_in("worker-0", "finish"))
    launched.run.summary_json.write_text(json.dumps({"exit_reason": "x" * 300_000}))
    deadline = time.monotonic() + LIMIT_S
    while not launched.run.exit_json.exists():
        refuse_late(deadline)
        time.sleep(0.01)
    time.sleep(0.3)
    launched.signal(signal.SIGINT)
    code, out, err = launched.end()
    assert (code, err) == (130, "")
    assert out.count("x") >= 300_000


EARLY = """
import os, signal, sys
from pathlib import Path
from telescope._launch.supervisor import Console, Supervisor
from telescope._launch.child_processes import CaughtSignals
from telescope._launch.process_plan import read_plan
from telescope._launch.supervisor import DEFAULT_TIMEOUTS
from telescope.runlog.layout import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
with CaughtSignals() as wakeup:
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit(Supervisor(run, read_plan(run.plan_json), Console(sys.stderr, sys.stdout), wakeup, DEFAULT_TIMEOUTS).run(0))
"""


def test_an_interrupt_while_processes_are_being_started_is_heard_before_all_are(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    write_plan(LaunchPlan("cpu", (stand_in("orchestrator", "obey"), stand_in("worker-0", "obey")), False), run.plan_json)
    command = [sys.executable, "-c", EARLY, str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 130, done.stderr
    assert "Stopping: the orchestrator finishes" in done.stderr
    assert not run.log("worker-0").exists()


def test_a_second_interrupt_kills_at_once(launch: Launch) -> None:
    launched = launch(stand_in("orchestrator", "deaf"), stand_in("server-0", "family"), stand_in("worker-0", "deaf"))
    launched.wait_until_up()
    launched.signal(signal.SIGINT)
    assert launched.supervisor.stderr is not None
    assert "Ctrl-C again kills at once" in launched.supervisor.stderr.readline()
    launched.signal(signal.SIGINT)
    assert launched.end()[0] == 130
    assert launched.left_after(0) == []


def test_a_peer_that_stays_after_the_end_is_ended_and_reported(launch: Launch) -> None:
    launched = launch(stand_in("orchestrator", "finish"), stand_in("worker-0", "deaf"), leave_s=1.0, grace_s=0.5)
    launched.wait_until_up()
    code, _, err = launched.end()
    assert code == 0
    assert "Had to be ended, because they did not leave in time: worker-0." in err
    assert launched.left_after(0) == []


def test_an_orchestrator_that_stays_when_all_have_left_is_ended_and_named(launch: Launch) -> None:
    launched = launch(stand_in("orchestrator", "deaf"), stand_in("worker-0", "finish"), close_s=1.0, grace_s=0.5)
    launched.wait_until_up()
    code, _, err = launched.end()
    assert code == 70
    assert "orchestrator did not end within 1 s after every other process had left." in err
    assert launched.left_after(0) == []


def test_a_bad_end_after_the_run_is_told_but_does_not_undo_it(launch: Launch) -> None:
    launched = launch(stand_in("orchestrator", "finish"), stand_in("server-0", "crash", "1", "late", "1.0"))
    launched.wait_until_up()
    code, _, err = launched.end()
    assert code == 0
    assert "After the run was done, server-0 ended with exit code 1" in err


def test_a_bad_end_before_an_orchestrator_that_has_done_all_is_gone_does_not_undo_it_either(launch: Launch) -> None:
    """A server that died in the last second of a run whose summary said that all is well was called the run's failure."""
    launched = launch(stand_in("orchestrator", "closing"), stand_in("server-0", "crash", "70", "late"))
    launched.wait_until_up()
    code, _, err = launched.end()
    assert code == 0
    assert err == f"After the run was done, server-0 ended with exit code 70; its log: {launched.run.log('server-0')}\n"
    record = json.loads(launched.run.exit_json.read_text())
    assert (record["exit_code"], record["cause"], record["processes"]) == (0, None, {"orchestrator": 0, "server-0": 70})
    assert not launched.run.run_failure.exists()  # which says why a run has failed


def test_a_program_that_cannot_start_is_named(launch: Launch) -> None:
    missing = msgspec.structs.replace(stand_in("worker-0", "obey"), program=("-m", "telescope.no_such_part"))
    launched = launch(stand_in("orchestrator", "obey"), missing)
    code, _, err = launched.end()
    assert code == 70
    assert "worker-0 ended with exit code 1." in err
    assert "No module named telescope.no_such_part" in err


def test_logs_go_to_files_and_on_request_to_the_console(launch: Launch) -> None:
    launched = launch(
        stand_in("orchestrator", "finish", "0.5"), stand_in("worker-0", "crash", "0", "hello"), log_to_console=True
    )
    launched.wait_until_up()
    assert "worker-0 | hello\n" in launched.end()[2]
    assert launched.run.log("worker-0").read_text() == "hello\n"


def test_progress_is_a_line_a_step_and_the_summary_comes_last(launch: Launch) -> None:
    launched = launch(stand_in("orchestrator", "write_status"), progress=True)
    code, out, err = launched.end()
    assert code == 0
    said = err.splitlines()
    assert said[0] == f"0:00 · starting 1 process, logs in {launched.run.path}/logs"
    assert [line for line in said if "starting" not in line] == [
        f"step {step}/3 · reward 0.{step}00 · 5.1k sampled tok/s" for step in (1, 2, 3)
    ]
    assert out.splitlines() == [
        f"run directory: {launched.run.path}",
        "  reward    – → 0.300",
        "  steps     3",
        "  rollouts  24 trained",
    ]


def test_trainers_share_one_meeting_point_and_foreign_ranks_are_dropped(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "99")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("MY_SERVICE_KEY", "secret")
    launched = launch(
        stand_in("orchestrator", "finish", "0.5"),
        stand_in("trainer-0", "show_environment", RANK="0", OMP_NUM_THREADS="2"),
        stand_in("trainer-1", "show_environment", RANK="1", OMP_NUM_THREADS="2"),
        stand_in("worker-0", "show_environment"),
    )
    assert launched.end()[0] == 0
    seen = {
        name: dict(line.split("=", 1) for line in (launched.run.path / "environment" / name).read_text().splitlines())
        for name in ("trainer-0", "trainer-1", "worker-0")
    }
    assert (seen["trainer-0"]["RANK"], seen["trainer-1"]["RANK"]) == ("0", "1")
    meeting = Path(seen["trainer-0"][MEETING_FILE])
    assert seen["trainer-1"][MEETING_FILE] == str(meeting)
    assert not meeting.parent.exists()  # any more
    assert MEETING_FILE not in seen["worker-0"]
    for variables in seen.values():
        assert "WORLD_SIZE" not in variables
        assert "TORCHELASTIC_RUN_ID" not in variables
        assert variables["MY_SERVICE_KEY"] == "secret"


LEFT_BEHIND = """
import os, signal
from telescope.runlog import temporary
print(temporary.make(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_swept_up_by_the_next_run(launch: Launch) -> None:
    killed = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    folder = Path(killed.stdout.strip())
    assert folder.is_dir()
    launched = launch(stand_in("orchestrator", "obey"), stand_in("worker-0", "obey"))
    launched.wait_until_up()
    assert not folder.exists()
    launched.signal(signal.SIGTERM)
    assert launched.end()[0] == 143
