"""What the end of an attempt means, what an attempt leaves to the next, and a shim at the far end of a carrier."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil
import pytest

from telescope._launch.child_processes import LocalProcess
from telescope._launch.process_plan import LaunchPlan, ProcessPlan, write_plan
from telescope._launch.slurm.queue import QueuedJob, describe_state
from telescope._launch.slurm.requeueing import AttemptEnd, AttemptOutcome, JobFacts, Next, Why, judge_end
from telescope.config.slurm import SlurmSettings
from telescope.runlog import attempts
from telescope.runlog.identity import new_identity, read_identity, write_identity
from telescope.runlog.layout import RunDirectory
from telescope.runlog.opening import look
from telescope.wire.supervisor_channel import StopNotice
from tests.deadlines import refuse_late

STAND_IN = str(Path(__file__).parents[1] / "process" / "stand_in.py")
LIMIT_S = 60.0
SUPERVISE = """
import signal, sys
from pathlib import Path
from telescope._launch.supervisor import supervise_in_batch_system
from telescope._launch.supervisor import BatchSystem
from telescope.runlog.opening import look
from telescope.runlog.layout import RunDirectory
slurm = BatchSystem(warning=signal.SIGUSR2, warned_of="walltime", warned_before=lambda: sys.argv[2] == "1", stop_s=60)
print(supervise_in_batch_system(RunDirectory(Path(sys.argv[1])), slurm))
"""


@pytest.mark.parametrize(
    ("ended", "job", "why", "then"),
    [
        (AttemptEnd(0), JobFacts(), "done", "leave"),
        (AttemptEnd(0, warned=True), JobFacts(), "done", "leave"),
        (AttemptEnd(75, warned=True), JobFacts("RUNNING"), "walltime", "requeue"),
        (AttemptEnd(70), JobFacts("RUNNING"), "failed", "leave"),
        (AttemptEnd(70), JobFacts("COMPLETING", preempted=True, requeued=True), "preempted", "await"),
        (AttemptEnd(70), JobFacts("RUNNING", preempted=True), "preempted", "await"),
        (AttemptEnd(143), JobFacts("COMPLETING", requeued=True), "requeued", "await"),
        (AttemptEnd(143, interrupted=True), JobFacts("COMPLETING", requeued=True), "requeued", "go"),
        (AttemptEnd(70, interrupted=True), JobFacts("COMPLETING", preempted=True, requeued=True), "preempted", "go"),
        (AttemptEnd(143, interrupted=True), JobFacts("RUNNING", preempted=True), "preempted", "await"),
        (AttemptEnd(143, interrupted=True), JobFacts("CANCELLED"), "cancelled", "leave"),
        (AttemptEnd(143, interrupted=True), JobFacts(""), "cancelled", "leave"),
        (AttemptEnd(70, carrier_lost=True), JobFacts("RUNNING"), "node_failed", "requeue"),
        (AttemptEnd(70), JobFacts("RUNNING", nodes_down=("n2",)), "node_failed", "requeue"),
        (AttemptEnd(70), JobFacts("COMPLETING", nodes_down=("n2",), requeued=True), "node_failed", "await"),
    ],
)
def test_the_end_of_an_attempt_is_told_from_a_failure(ended: AttemptEnd, job: JobFacts, why: Why, then: Next):
    outcome = judge_end(ended, job, requeue=True, restart_after_walltime=True, budget=1)
    assert (outcome.why, outcome.next) == (why, then)


def test_a_lost_last_checkpoint_asks_for_no_other_attempt_but_a_last_save_that_the_walltime_cut_short_does():
    """The full disk is still full for the next attempt; time is what the other lacked."""
    rules = {"requeue": True, "restart_after_walltime": True, "budget": 3}
    assert judge_end(AttemptEnd(1), JobFacts("RUNNING"), **rules) == AttemptOutcome("failed", "leave")
    assert judge_end(AttemptEnd(75, warned=True), JobFacts("RUNNING"), **rules) == AttemptOutcome("walltime", "requeue")


def test_no_attempt_follows_where_none_is_wanted_or_left():
    for requeue, budget in ((False, 5), (True, 0)):
        outcome = judge_end(
            AttemptEnd(75, warned=True), JobFacts(), requeue=requeue, restart_after_walltime=True, budget=budget
        )
        assert outcome.next == "leave"
    preempted = JobFacts(preempted=True)
    assert judge_end(AttemptEnd(70), preempted, requeue=False, restart_after_walltime=True, budget=5).next == "leave"


def test_a_run_that_would_begin_at_step_1_again_is_not_restarted_after_its_walltime_unless_told_so():
    ended = AttemptEnd(75, warned=True)
    assert SlurmSettings().restart_after_walltime is None  # where it makes checkpoints
    outcome = judge_end(ended, JobFacts("RUNNING"), requeue=True, restart_after_walltime=False, budget=100)
    assert (outcome.why, outcome.next) == ("walltime", "leave")
    lost = judge_end(
        AttemptEnd(70, carrier_lost=True), JobFacts("RUNNING"), requeue=True, restart_after_walltime=False, budget=100
    )
    assert (lost.why, lost.next) == ("node_failed", "requeue")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path / "run")
    write_identity(directory, new_identity("x", datetime.now(UTC), "0" * 16))
    return directory


def test_the_second_attempt_finds_an_empty_house_and_the_first_ones_things_put_aside(run: RunDirectory):
    run_id = read_identity(run).run_id
    first = attempts.begin(run, "12", "12.0", ("n1", "n2"))
    run.log("trainer-0").write_text("one")
    run.summary_json.write_text("{}")
    run.config_json.write_text("the same")
    attempts.end(run, first, "walltime", 75, requeued=True)
    second = attempts.begin(run, "12", "12.1", ("n3", "n4"))
    assert second.number == 2
    aside = RunDirectory(run.path / "attempts" / "1")
    assert aside.log("trainer-0").read_text() == "one"
    assert aside.summary_json.exists()
    assert not run.summary_json.exists()
    assert list((run.path / "logs").iterdir()) == []
    assert run.config_json.read_text() == "the same"
    assert (read_identity(run).run_id, read_identity(run).attempt) == (run_id, "12.1")
    found = attempts.read_attempts(run)
    assert [(attempt.attempt, attempt.why, attempt.requeued) for attempt in found] == [
        ("12.0", "walltime", True),
        ("12.1", "", False),
    ]


def test_putting_aside_goes_on_where_it_was_cut_short(run: RunDirectory):
    attempts.begin(run, "12", "12.0", ("n1",))
    run.log("trainer-0").write_text("one")
    attempts.put_aside(run, 1)
    attempts.put_aside(run, 1)
    assert (run.path / "attempts" / "1" / "logs" / "trainer-0.log").read_text() == "one"
    assert run.journal.parent.is_dir()


def test_a_line_that_was_cut_short_spoils_neither_the_next_nor_the_others(run: RunDirectory):
    first = attempts.begin(run, "12", "12.0", ("n1",))
    attempts.end(run, first, "preempted", 70, requeued=True)
    whole = run.attempts.read_bytes()
    run.attempts.write_bytes(whole + b'{"number":2,"job_id":"1\xc3')
    second = attempts.begin(run, "12", "12.1", ("n1",))
    attempts.end(run, second, "done", 0, requeued=False)
    assert [(one.number, one.attempt, one.why) for one in attempts.read_attempts(run)] == [
        (1, "12.0", "preempted"),
        (2, "12.1", "done"),
    ]
    assert len(run.attempts.read_bytes().splitlines()) == 5
    run.attempts.write_bytes(whole[:-1])  # whole but for its newline
    assert attempts.read_attempts(run)[0].why == "preempted"


def test_a_run_says_how_it_stands_with_and_without_slurm(run: RunDirectory, tmp_path: Path):
    assert describe_state(look(run), {}) == ""
    attempts.write_submission(run, "", tmp_path / "script")
    assert describe_state(look(run), {}) == "not submitted"
    attempts.write_submission(run, "12_3", tmp_path / "script")
    assert describe_state(look(run), {"12_3": QueuedJob("PENDING")}) == "pending"
    first = attempts.begin(run, "12_3", "12_3.0", ("n1",))
    assert describe_state(look(run), {"12_3": QueuedJob("RUNNING")}) == "running"
    assert describe_state(look(run), {}) == "unknown"
    attempts.end(run, first, "preempted", 70, requeued=True)
    assert describe_state(look(run), {"12_3": QueuedJob("PENDING")}) == "pending"
    attempts.end(run, first, "failed", 70, requeued=False)
    assert describe_state(look(run), {"12_3": QueuedJob("FAILED")}) == "failed"


def test_a_carried_process_gets_its_variables_and_its_gpus_over_the_lifeline_and_none_on_a_command_line(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET_TOKEN", "hush-hush")
    monkeypatch.setenv("RANK", "foreign")
    variables = {"TOKEN": "${oc.env:SECRET_TOKEN}", "CUDA_VISIBLE_DEVICES": "1"}
    plan = ProcessPlan("server-0", "server", 0, "there", (STAND_IN, "show_environment"), variables, ("1",), 1)
    write_plan(LaunchPlan("gpu", (plan,)), run.plan_json)
    carrier = ("/usr/bin/env", "CUDA_VISIBLE_DEVICES=4,7", "SLURMD_NODENAME=n2")  # what srun does on the other node
    process = LocalProcess.start(plan, run, {"EXTRA": "yes"}, carrier=carrier)
    assert "hush-hush" not in " ".join(process.shim_process.args)
    until_gone(process)
    assert process.end.status == 0
    found = dict(line.split("=", 1) for line in (run.path / "environment" / "server-0").read_text().splitlines())
    assert (found["CUDA_VISIBLE_DEVICES"], found["TOKEN"], found["EXTRA"]) == ("7", "hush-hush", "yes")
    assert found["SLURMD_NODENAME"] == "n2"
    assert "RANK" not in found


@pytest.mark.parametrize("by_order", [False, True])
def test_what_a_carried_process_has_noted_goes_with_it_when_it_is_killed(run: RunDirectory, tmp_path: Path, by_order: bool):
    """Shared memory, say: no supervisor of the run is on its node."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    shared, ours = tmp_path / "psm_1", tmp_path / "psm_2"
    ours.write_text("of a process that lives")
    plan = ProcessPlan(
        "server-0", "server", 0, "there", (STAND_IN, "notes"), {"TMPDIR": str(place), "NOTED": str(shared)}, (), 1
    )
    write_plan(LaunchPlan("cpu", (plan,)), run.plan_json)
    process = LocalProcess.start(plan, run, {"KILLED": "" if by_order else "yes"}, carrier=("/usr/bin/env",))
    try:
        if by_order:
            deadline = time.monotonic() + LIMIT_S
            while not (run.path / "pids" / "server-0").exists():
                refuse_late(deadline)
                time.sleep(0.01)
            assert shared.exists()
            process.kill()
        until_gone(process)
        assert process.end.status == -signal.SIGKILL
        assert (shared.exists(), ours.exists(), list(place.iterdir())) == (False, True, [])
    finally:
        shutil.rmtree(place)


def test_a_carried_process_ends_with_all_below_it_when_its_lifeline_does(run: RunDirectory):
    plan = ProcessPlan("server-0", "server", 0, "there", (STAND_IN, "family"), {}, (), 1)
    write_plan(LaunchPlan("cpu", (plan,)), run.plan_json)
    process = LocalProcess.start(plan, run, {}, carrier=("/usr/bin/env",))
    deadline = time.monotonic() + LIMIT_S
    while not (pids := run.path / "pids" / "server-0").exists():
        refuse_late(deadline)
        time.sleep(0.01)
    family = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    process.lifeline.shutdown(2)  # the supervisor is gone, and srun closes the far end
    _, alive = psutil.wait_procs(family, timeout=LIMIT_S)
    assert alive == []
    assert process.shim_process.wait(LIMIT_S) == 0
    os.close(process.pidfd)
    process.lifeline.close()


def test_a_carrier_that_is_killed_is_told_from_its_process(run: RunDirectory):
    plan = ProcessPlan("server-0", "server", 0, "there", (STAND_IN, "obey"), {}, (), 1)
    process = LocalProcess.start(plan, run, {}, carrier=(sys.executable, "-c", "import time; time.sleep(600)"))
    os.kill(process.shim_process.pid, signal.SIGKILL)
    process.collect()
    assert (process.end.status, process.end.shim_died) == (-9, True)


@pytest.mark.parametrize("early", [False, True])
def test_the_warning_before_the_walltime_is_a_stop_with_a_reason_of_its_own(run: RunDirectory, early: bool):
    names = ("orchestrator", "trainer-0")
    processes = (
        ProcessPlan("orchestrator", "orchestrator", 0, "here", (STAND_IN, "waits_for_the_signal"), {}, (), 1),
        ProcessPlan("trainer-0", "trainer", 0, "here", (STAND_IN, "obey"), {}, (), 1),
    )
    write_plan(LaunchPlan("cpu", processes, progress=False), run.plan_json)
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(run.path), str(int(early))], stdout=subprocess.PIPE, text=True
    )
    if not early:
        deadline = time.monotonic() + LIMIT_S
        while not all((run.path / "pids" / name).exists() for name in names):
            refuse_late(deadline)
            time.sleep(0.01)
        supervisor.send_signal(signal.SIGUSR2)
    said, _ = supervisor.communicate(timeout=LIMIT_S)
    assert said.splitlines()[-1] == "SupervisedRunEnd(code=75, warned=True, interrupted=None, carrier_lost='')"
    heard = [msgspec.json.decode(line, type=StopNotice) for line in (run.path / "heard").read_bytes().splitlines()]
    assert heard == [StopNotice("walltime", failed=False)]


def until_gone(process: LocalProcess) -> None:
    assert process.shim_process.wait(LIMIT_S) == 0
    process.lifeline.settimeout(LIMIT_S)
    process.collect()
