"""`telescope runs`: how each run of a folder stands, the end of a log, and an end for a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from telescope._launch.prepare_attempt import CannotResume, begin_attempt, refuse_queued
from telescope.cli import runs, servers
from telescope.config.run import _hash_of, load_run
from telescope.config.secrets import SecretMissing
from telescope.inference.main import http_api_key
from telescope.runlog import attempts, http_key
from telescope.runlog.holder import Holder, find_state, hold, read_holder, stop
from telescope.runlog.identity import new_identity, write_identity
from telescope.runlog.layout import RunDirectory
from telescope.runlog.opening import look

WATCHING = """
import signal, sys
from pathlib import Path
from telescope.runlog import attempts
from telescope.runlog.holder import hold
from telescope.runlog.layout import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
got = []
signal.signal(signal.SIGINT, lambda *_: got.append(1))
hold(run)
print("held", flush=True)
while not got:
    signal.pause()
run.exit_json.write_text('{"exit_code": 130}')
"""


IDENTITY = {
    "format": 1, "run_id": "r", "attempt": "a", "name": "x", "created": "2030-01-01T00:00:00+00:00", "config_hash": "",
    "warnings": [],
}  # fmt: skip


def settings(**chosen: object) -> dict[str, object]:
    """What config.json holds, with a hash that fits."""
    return {"format": 1, "config_hash": _hash_of(chosen), **chosen}


def made(path: Path, **files: object) -> RunDirectory:
    run = RunDirectory.create(path)
    run.run_json.write_text("{}")
    for name, told in files.items():
        getattr(run, name).write_text(json.dumps(told))
    return run


def test_runs_and_the_points_of_sweeps_are_listed_with_state_step_reward_and_reason(tmp_path: Path, capsys):
    made(
        tmp_path / "a",
        exit_json={"exit_code": 0},
        status_json={"step": 3, "steps": 3},
        summary_json={"reward_policy_last": 0.75, "policy_last": {"rollouts": 1160}},
    )
    failed = made(tmp_path / "sweep/000", exit_json={"exit_code": 70}, status_json={"step": 1, "steps": 3, "reward": 0.5})
    failed.run_failure.write_text("server-0 was killed by SIGKILL.\n")
    going = {"step": 2, "steps": 9, "reward": 0.5, "reward_policy_last": 0.1, "policy_last": {"rollouts": 96}}
    hold(made(tmp_path / "b", status_json=going))
    lost = made(tmp_path / "c")
    lost.holder_json.write_bytes(msgspec.json.encode(Holder(socket.gethostname(), os.getpid(), 1)))
    made(tmp_path / "d")
    made(tmp_path / "e", exit_json={"exit_code": 75}, summary_json={"exit_reason": "the checkpoint of step 7 is complete"})
    (tmp_path / "other").mkdir()
    assert runs.main(["list", str(tmp_path), "--json"]) == 0
    found = {Path(one["run_dir"]).name: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {name: one["state"] for name, one in found.items()} == {
        "a": "done", "000": "failed", "b": "running", "c": "lost", "d": "waiting", "e": "stopped",
    }  # fmt: skip
    assert (found["a"]["reward"], found["b"]["step"]) == (0.75, 2)
    assert [found[name]["rollouts"] for name in "abc"] == [1160, 96, None]
    assert found["e"]["reason"] == "the checkpoint of step 7 is complete"
    assert found["000"]["reason"] == "server-0 was killed by SIGKILL."
    assert runs.main(["list", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "running          2/9    0.100        96  " in shown  # of the last versions, as at the end, not of the last step
    assert "done             3/3    0.750     1,160  " in shown
    assert "lost               -        -         -  " in shown
    assert runs.main(["list", str(tmp_path / "nowhere")]) == 1


def test_a_list_shows_the_latest_score_of_each_eval_and_the_best_checkpoint(tmp_path: Path, capsys):
    scores = {"math500": {"step": 40, "reward": 0.4125}, "letters": {"step": 0, "reward": None}}
    best = {"measure": "the reward of math500", "step": 20, "score": 0.5, "version_first": 20, "version_last": 20}
    made(tmp_path / "a", exit_json={"exit_code": 0}, status_json={"step": 40, "eval_rewards": scores, "best_checkpoint": best})
    made(tmp_path / "b", exit_json={"exit_code": 0}, status_json={"step": 40})
    younger = {**best, "version_first": 20, "version_last": 22}
    made(tmp_path / "c", exit_json={"exit_code": 0}, status_json={"step": 40, "best_checkpoint": younger})
    assert runs.main(["list", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "/a  (eval math500 0.412; best step 20: the reward of math500 0.5;" in shown
    assert "/c  (best step 20: the reward of math500 0.5 by versions 20 to 22;" in shown
    assert shown.count("(eval ") == 1
    assert runs.main(["list", str(tmp_path), "--json"]) == 0
    found = {Path(one["run_dir"]).name: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (found["a"]["evals"], found["a"]["best_step"]) == (scores, 20)
    assert (found["b"]["evals"], found["b"]["best_step"]) == ({}, None)


def test_a_list_of_a_run_or_of_a_part_of_one_says_so(tmp_path: Path, capsys):
    run = made(tmp_path / "a", exit_json={"exit_code": 0}, status_json={"step": 3, "steps": 3})
    (run.path / "attempts" / "1").mkdir(parents=True)
    assert runs.main(["list", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_dir"] == str(run.path)
    assert runs.main(["list", str(run.path / "attempts"), "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"is a part of the run {run.path}, not a folder of runs: `list {run.path}` shows how it stands" in shown.err
    (tmp_path / "empty").mkdir()
    assert runs.main(["list", str(tmp_path / "empty")]) == 0
    assert "there is no run in it, nor in a folder of it" in capsys.readouterr().err


def test_a_folder_that_can_not_be_read_is_named_and_hides_no_other(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """Somebody else's run, 0700, in a folder that several people use."""
    for name in ("a", "z"):
        made(tmp_path / name, exit_json={"exit_code": 0})
    (tmp_path / "m").mkdir()
    real = Path.iterdir

    def iterdir(path: Path):
        if path.name == "m":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert runs.main(["list", str(tmp_path), "--json"]) == 0
    told = capsys.readouterr()
    assert [Path(json.loads(line)["run_dir"]).name for line in told.out.splitlines()] == ["a", "z"]
    assert told.err == f"{tmp_path}/m is passed over: Permission denied\n"


def test_a_folder_with_a_run_json_that_no_run_wrote_is_no_run_that_waits(tmp_path: Path, capsys):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.json").write_text("my notes on a run")
    assert runs.main(["list", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.startswith("no run ")
    assert f"{tmp_path}/odd/run.json" in line


def test_a_log_is_shown_to_its_end_once_the_run_is_over(tmp_path: Path, capsys):
    run = made(tmp_path / "a", exit_json={"exit_code": 0})
    run.log("orchestrator").write_text("".join(f"line {number}\n" for number in range(50)))
    assert runs.main(["tail", str(run.path), "-n", "2"]) == 0
    assert capsys.readouterr().out == "line 48\nline 49\n"
    assert runs.main(["tail", str(run.path), "--process", "server-9"]) == 1
    assert "has no log of server-9; there are: orchestrator" in capsys.readouterr().err
    assert runs.main(["tail", str(tmp_path / "nowhere")]) == 1
    assert "nowhere is not a run directory: it has neither logs nor config.json" in capsys.readouterr().err


def test_stop_asks_the_process_that_watches_as_ctrl_c_would_and_waits_for_its_end(tmp_path: Path, capsys):
    run = made(tmp_path / "a")
    with subprocess.Popen([sys.executable, "-c", WATCHING, str(run.path)], stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "held\n"
        holder = read_holder(run)
        assert holder is not None
        assert find_state(holder, run) == "alive"
        reaped = subprocess.Popen([sys.executable, "-m", "telescope", "runs", "stop", str(run.path)])
        assert watcher.wait(60) == 0
        assert reaped.wait(60) == 0
    assert json.loads(run.exit_json.read_text()) == {"exit_code": 130}
    assert find_state(holder, run) == "gone"
    assert stop(holder, 60) == "gone"
    assert runs.main(["stop", str(run.path)]) == 0
    assert "has ended already" in capsys.readouterr().out


@pytest.mark.parametrize("job", [None, "4711"])
def test_a_copy_of_a_run_that_goes_on_is_watched_by_nobody(tmp_path: Path, capsys, job: str | None):
    run = made(tmp_path / "a")
    hold(run)  # this process: were it asked to stop, pytest would end
    if job:
        attempts.write_submission(run, job, run.path / "job.sh")
    shutil.copytree(run.path, tmp_path / "copy")
    copy = RunDirectory(tmp_path / "copy")
    assert runs.main(["stop", str(copy.path)]) == 1
    assert f"copy is a copy of {run.path}: `telescope runs stop {run.path}` ends" in capsys.readouterr().err
    holder = read_holder(copy)
    assert holder is not None
    assert (find_state(holder, run), find_state(holder, copy)) == ("alive", "gone")
    (tmp_path / "linked").symlink_to(run.path)
    run.path.rename(tmp_path / "moved")
    assert find_state(holder, RunDirectory(tmp_path / "moved")) == "alive"


def test_stop_ends_a_run_that_ctrl_z_has_stopped(tmp_path: Path):
    run = made(tmp_path / "a")
    with subprocess.Popen([sys.executable, "-c", WATCHING, str(run.path)], stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "held\n"
        os.kill(watcher.pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(watcher.pid, os.WUNTRACED)[1])
        holder = read_holder(run)
        assert holder is not None
        try:
            assert stop(holder, 60) == "ended"
        finally:
            watcher.kill()


def test_a_process_of_the_same_number_that_began_later_is_not_touched(tmp_path: Path):
    other = Holder(socket.gethostname(), os.getpid(), 12345)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert find_state(other, RunDirectory(tmp_path)) == "gone"
        assert stop(other, 60) == "gone"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_of_another_host_is_not_stopped_from_here(tmp_path: Path, capsys):
    run = made(tmp_path / "a")
    run.holder_json.write_bytes(msgspec.json.encode(Holder("elsewhere", 1, 1)))
    assert runs.main(["stop", str(run.path)]) == 1
    assert "is watched by process 1 on elsewhere: stop it there" in capsys.readouterr().err
    assert runs.main(["stop", str(made(tmp_path / "b").path)]) == 1


def test_servers_are_told_with_their_address_and_no_key(tmp_path: Path, capsys):
    run = made(tmp_path / "a")
    assert servers.main([str(run.path)]) == 1
    run.server("server-0").parent.mkdir()
    run.server("server-0").write_text(json.dumps({"url": "http://127.0.0.1:8100/v1", "model": "tiny", "api_key": "secret"}))
    capsys.readouterr()
    assert servers.main([str(run.path)]) == 0
    assert capsys.readouterr().out == "server-0  http://127.0.0.1:8100/v1  tiny\n"
    assert servers.main([]) == 2


def test_servers_say_where_the_key_lies_that_the_run_has_made_and_not_what_it_is(tmp_path: Path, capsys):
    run = made(tmp_path / "a run")
    http_key.make(run)
    key = http_key.read(run)
    assert (run.http_key.stat().st_mode & 0o777, len(key)) == (0o600, 43)
    http_key.make(run)
    assert http_key.read(run) == key  # a later attempt keeps it
    run.server("server-0").parent.mkdir()
    run.server("server-0").write_text(json.dumps({"url": "http://10.0.0.1:8100/v1", "model": "tiny"}))
    assert servers.main([str(run.path)]) == 0
    out = capsys.readouterr().out
    asked = f"curl -H \"Authorization: Bearer $(cat '{tmp_path}/a run/http.key')\" http://10.0.0.1:8100/v1/models"
    assert out.splitlines()[1] == f"requests need the key: {asked}"
    assert key not in out


def slurm_says(folder: Path, monkeypatch: pytest.MonkeyPatch, state: str, reason: str = "None") -> Path:
    """Clients of a Slurm that has job 12 in that state until scancel is called, none where it is empty; the file that
    scancel notes its job in."""
    folder.mkdir(exist_ok=True)
    cancelled = folder / "cancelled"
    for name, does in {
        "squeue": f"[ -e {cancelled} ] || echo '12|{state}|{reason}'" if state else "true",
        "scancel": f"echo $* >> {cancelled}",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return cancelled


def submitted(path: Path, why: str, requeued: bool) -> RunDirectory:
    """A run whose first attempt has ended with code 75 (70 if it failed), or that has none where `why` is empty."""
    run = RunDirectory.create(path)
    write_identity(run, new_identity("x", datetime.now(UTC), "0" * 16))
    attempts.write_submission(run, "12", path / "script")
    if why:
        code = 70 if why == "failed" else 75
        attempts.end(run, attempts.begin(run, "12", "12.0", ("n1",)), why, code, requeued=requeued)
        run.exit_json.write_text(json.dumps({"exit_code": code}))
        hold(run)
    return run


@pytest.mark.parametrize(
    ("why", "requeued", "slurm", "state", "cancels"),
    [
        ("preempted", True, "PENDING", "waiting", True),
        ("preempted", True, "COMPLETING", "waiting", True),
        ("preempted", True, "RUNNING", "running", True),
        ("preempted", True, "CANCELLED", "stopped", False),
        ("preempted", True, "", "stopped", False),
        ("failed", False, "COMPLETING", "failed", False),
        ("failed", False, "PENDING", "waiting", True),  # somebody called scontrol requeue
        ("", False, "PENDING", "waiting", True),
        ("", False, "CANCELLED", "failed", False),
    ],
)
def test_the_exit_of_an_attempt_is_not_the_end_of_a_job_that_comes_again(
    why: str, requeued: bool, slurm: str, state: str, cancels: bool, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    cancelled = slurm_says(tmp_path / "bin", monkeypatch, slurm)
    run = submitted(tmp_path / "runs" / "a", why, requeued)
    assert runs.main(["list", str(tmp_path / "runs"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == state
    assert runs.main(["stop", str(run.path)]) == 0
    assert cancelled.exists() is cancels
    assert ("has ended already" in capsys.readouterr().out) is not cancels
    asked = "--batch --signal=INT 12\n" if slurm == "RUNNING" else "12\n"
    assert not cancels or cancelled.read_text() == asked


def test_a_job_that_the_run_has_gone_on_without_is_its_job_no_more(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    slurm_says(tmp_path / "bin", monkeypatch, "")
    run = submitted(tmp_path / "runs" / "a", "failed", False)
    begin_attempt(run, "0" * 16, "second")
    hold(run)
    assert runs.main(["list", str(tmp_path / "runs"), "--json"]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found["state"], found["job"]) == ("running", "")
    assert look(run).job == ""
    assert (run.earlier_attempt(1) / "slurm.json").exists()
    attempts.write_submission(run, "13", tmp_path / "script")
    assert look(run).job == "13"


def test_a_job_that_waits_says_why_in_slurms_own_word(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    slurm_says(tmp_path / "bin", monkeypatch, "PENDING", "AssocGrpCpuLimit")
    submitted(tmp_path / "runs" / "a", "", False)
    assert runs.main(["list", str(tmp_path / "runs"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == "12 pending: AssocGrpCpuLimit"


def test_a_job_that_does_not_end_in_time_goes_on_ending(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    slurm_says(tmp_path / "bin", monkeypatch, "RUNNING")
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho '12|RUNNING|None'\n")
    run = submitted(tmp_path / "runs" / "a", "", False)
    assert runs.main(["stop", str(run.path), "--timeout", "0"]) == 1
    assert "job 12 has not ended within 0 s; it was asked to, and goes on ending. `scancel 12`" in capsys.readouterr().err


def test_a_run_that_was_submitted_again_is_not_over_by_what_the_job_before_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Between the start of the second job and its first line in attempts.jsonl a third would be queued."""
    run = submitted(tmp_path / "a", "cancelled", False)
    slurm_says(tmp_path / "bin", monkeypatch, "RUNNING")
    attempts.write_submission(run, "13", tmp_path / "script")
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho '13|RUNNING|None'\n")
    with pytest.raises(CannotResume, match="has job 13 in Slurm, which is RUNNING"):
        refuse_queued(run)
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(CannotResume, match="job 13, of which Slurm says nothing"):
        refuse_queued(run)


def test_a_run_that_opens_its_http_makes_a_key_that_stands_nowhere_else(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "telescope.run",
        "model=tiny",
        "cluster=slurm",
        "cluster.dry_run=true",
        "inference.host=0.0.0.0",
    ]
    done = subprocess.run([*command, f"run_dir={tmp_path}/run"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    run = RunDirectory(tmp_path / "run")
    key = http_key.read(run)
    settings = load_run(run.config_json).inference
    assert http_api_key(settings, run) == key
    others = [path for path in run.path.rglob("*") if path.is_file() and path != run.http_key]
    assert run.config_json in others
    assert not any(key.encode() in path.read_bytes() for path in others)
    assert key not in done.stdout + done.stderr
    for given in ({"host": None}, {"http": False}, {"engine": "fake"}, {"host": "127.0.0.2"}):
        assert http_api_key(settings.model_copy(update=given), run) is None
    given = settings.model_copy(update={"api_key": "${oc.env:TELESCOPE_TEST_KEY}"})
    with pytest.raises(SecretMissing, match="TELESCOPE_TEST_KEY"):
        http_api_key(given, run)


def test_a_run_goes_on_in_its_own_directory_alone(tmp_path: Path, capsys):
    made(tmp_path / "a", run_json=IDENTITY, config_json=settings(run_dir="a"))
    assert runs.main(["resume", str(tmp_path / "a"), f"run_dir={tmp_path}/b"]) == 2
    assert f"run_dir={tmp_path}/b can't be given: a run goes on in its own directory, {tmp_path}/a" in capsys.readouterr().err


def test_resume_says_what_it_cannot_change_and_which_setting_was_meant(tmp_path: Path, capsys):
    run = made(
        tmp_path / "a",
        run_json=IDENTITY,
        config_json=settings(number_of_steps=3, algorithm={"name": "grpo"}, trainer={"learning_rate": 0.1}),
    )
    assert runs.main(["resume", str(run.path), "number_of_stps=9"]) == 2
    assert "number_of_stps is not a setting of this run. Did you mean number_of_steps?" in capsys.readouterr().err
    assert runs.main(["resume", str(run.path), "algorithm=rloo"]) == 2
    said = capsys.readouterr().err
    assert "algorithm=rloo is not a single setting" in said
    assert "`telescope export latest" in said
    assert "checkpoint.resume=true" not in said  # which would be refused as well
    assert runs.main(["resume", str(run.path), "trainer.lerning_rate=1"]) == 2
    assert "Did you mean trainer.learning_rate?" in capsys.readouterr().err
