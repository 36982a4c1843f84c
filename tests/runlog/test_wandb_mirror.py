"""W&B gets every step's metrics from the real client, and nothing that W&B does can stop or slow a run."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from telescope.config.sections import LoggingSettings
from telescope.runlog import attempts
from telescope.runlog.attempts import Lineage, write_lineage
from telescope.runlog.layout import RunDirectory
from telescope.runlog.wandb_mirror import MirrorShare, WandbMirror, share_of, wanted
from telescope.runlog.writer import RunLog
from tests.runlog.fake_wandb import FakeWandb

KEY = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import os, sys, time, pathlib
from telescope.config.sections import LoggingSettings
from telescope.runlog.wandb_mirror import MirrorShare, WandbMirror
number = lambda name, default: int(os.environ.get(name, default))
share = lambda: MirrorShare(os.environ.get("RUN"), number("ATTEMPT", "1"), number("FIRST", "1") - 1, number("BEFORE", "0"))
first, last = number("FIRST", "1"), number("LAST", "5")
settings = LoggingSettings(wandb_group="a-sweep")
mirror = WandbMirror(settings, name="a-run", folder=pathlib.Path(sys.argv[1]), config={"seed": 7}, share=share)
longest = 0.0
for step in range(first, last + 1):
    begun = time.perf_counter()
    mirror.log(step, {"reward/mean": step / 10})
    longest = max(longest, time.perf_counter() - begun)
mirror.close(timeout_s=float(sys.argv[2]), exit_code=number("CODE", "0"))
print(f"longest={longest:.4f} dropped={mirror.dropped} failure={mirror.failure}", flush=True)
if mirror.abandoned:
    os._exit(0)
"""


def run_mirror(folder: Path, timeout_s: float, **environ: str) -> str:
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder)}
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(timeout_s)],
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return finished.stdout.splitlines()[-1]


def test_the_real_client_sends_each_step_once(tmp_path: Path):
    server = FakeWandb()
    said = run_mirror(tmp_path, 60, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY, CODE="1")
    server.shutdown()
    assert said.endswith("dropped=0 failure=")
    assert server.exit_codes == [1]  # which W&B shows as a run that has failed
    assert [(row["_step"], row["reward/mean"]) for row in server.history] == [(s, s / 10) for s in range(1, 6)]
    assert any("upsertBucket" in query for query in server.queries)
    first = next(body for body in server.bodies if "mutation UpsertBucket" in body)
    assert json.loads(first)["variables"]["groupName"] == "a-sweep"
    assert not any(KEY in body for body in server.bodies)  # the key travels as a header, never as data


EVALS = """
import sys, pathlib
from telescope.config.sections import LoggingSettings
from telescope.runlog.wandb_mirror import MirrorShare, WandbMirror
mirror = WandbMirror(LoggingSettings(), name="a-run", folder=pathlib.Path(sys.argv[1]), config={})
mirror.log_eval(0, "own", 0, {"eval/own/reward": 0.1})
mirror.log(1, {"loss": 1.0})
mirror.log(2, {"loss": 2.0})
mirror.log_eval(2, "own", 1, {"eval/own/reward": 0.2})
mirror.log_eval(2, "other", 2, {"eval/other/reward": 0.3})
mirror.log(3, {"loss": 3.0})
mirror.close(timeout_s=60)
print(mirror.failure, flush=True)
"""


def test_an_eval_stands_in_the_row_of_the_latest_step_and_names_its_own(tmp_path: Path):
    server = FakeWandb()
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    known = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
    command = [sys.executable, "-c", EVALS, str(tmp_path)]
    done = subprocess.run(command, env=clean | known, capture_output=True, text=True, timeout=100, check=True)
    server.shutdown()
    assert done.stdout.splitlines()[-1] == ""
    told = [
        (row["_step"], row.get("loss"), row.get("eval/own/reward"), row.get("eval/own/step"), row.get("eval/other/step"))
        for row in server.history
    ]
    assert told == [(0, None, 0.1, 0.0, None), (1, 1.0, None, None, None), (2, 2.0, 0.2, 1.0, 2.0), (3, 3.0, None, None, None)]


def test_another_attempt_goes_on_with_the_same_run_and_the_last_row_of_each_step_is_the_right_one(tmp_path: Path):
    """The checkpoint was that of step 2, and step 3 was trained before the first attempt died. What of it had come to the disk
    counts for nothing: W&B knows what it has."""
    server = FakeWandb()
    environ = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "RUN": "0a1b2c3d4e5f6071"}
    for attempt, first, last, before in (("1", "1", "3", "0"), ("2", "3", "5", "2")):
        folder = tmp_path / attempt
        folder.mkdir()
        said = run_mirror(folder, 60, **environ, ATTEMPT=attempt, FIRST=first, LAST=last, BEFORE=before)
        assert said.endswith("dropped=0 failure=")
    server.shutdown()
    assert list(server.of_run) == ["0a1b2c3d4e5f6071"]
    found = server.of_run["0a1b2c3d4e5f6071"]
    assert [(row["_step"], row["step"], row["attempt"]) for row in found] == [
        (1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 3, 2), (5, 4, 2), (6, 5, 2),
    ]  # fmt: skip
    assert {row["step"]: row["attempt"] for row in found} == {1: 1, 2: 1, 3: 2, 4: 2, 5: 2}
    said = [json.loads(body)["variables"] for body in server.bodies if "mutation UpsertBucket" in body]
    axes = json.loads(next(v["config"] for v in reversed(said) if v.get("config")))["_wandb"]["value"]["m"]
    # in W&B's own numbers: 1 is a metric's name, 2 a pattern of names, 5 the place of the metric that is its axis
    assert [(axis.get("1"), axis.get("2"), axis.get("5")) for axis in axes] == [("step", None, None), (None, "*", 1)]


def log_steps(run: RunDirectory, *steps: int) -> None:
    written = RunLog(run, "orchestrator")
    for step in steps:
        written.append("step_metrics", {"step": step, "metrics": {"loss": 1.0}})
    written.close()


def next_attempt(run: RunDirectory, number: int, step: int) -> MirrorShare:
    """It begins after `step`; 0: at step 1."""
    attempts.put_aside(run, number - 1)
    if step:
        write_lineage(run, Lineage(number, step))
    return share_of(run, Lineage(number, step), "ab12")


def test_attempts_that_go_on_from_each_other_share_a_run_and_know_how_many_rows_it_has(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run")
    assert share_of(run, Lineage(1), "ab12") == MirrorShare("ab12", 1, 0, 0)
    log_steps(run, 1, 2, 3)
    assert next_attempt(run, 2, 2) == MirrorShare("ab12", 2, 2, 3)
    log_steps(run, 3, 4, 5)
    assert next_attempt(run, 3, 2) == MirrorShare("ab12", 3, 2, 6)
    assert next_attempt(run, 4, 0) == MirrorShare("ab12-4", 4, 0, 0)  # another curve
    log_steps(run, 1, 2)
    assert next_attempt(run, 5, 1) == MirrorShare("ab12-4", 5, 1, 2)  # which this one goes on with


def test_offline_leaves_a_file_to_sync(tmp_path: Path):
    said = run_mirror(tmp_path, 60, WANDB_MODE="offline")
    assert said.endswith("dropped=0 failure=")
    (file,) = tmp_path.rglob("*.wandb")
    assert file.stat().st_size > 500


STANDALONE = """
import sys, pathlib
from telescope.config.sections import LoggingSettings
from telescope.runlog.wandb_mirror import MirrorShare, send_evals
metrics = [("own", 20, {"eval/own/reward": 0.5}), ("own", 40, {"eval/own/reward": 0.75})]
folder = pathlib.Path(sys.argv[1])
print(send_evals(LoggingSettings(), MirrorShare("run1"), name="a-run", folder=folder, metrics=metrics) or "sent", flush=True)
"""


def test_evals_of_later_go_to_the_runs_own_curve_at_their_steps(tmp_path: Path):
    server = FakeWandb()
    known = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
    run_mirror(tmp_path, 60, **known, RUN="run1")
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", STANDALONE, str(tmp_path)]
    said = subprocess.run(command, env=clean | known, capture_output=True, text=True, timeout=100, check=True).stdout
    server.shutdown()
    assert said.splitlines()[-1] == "sent"
    assert list(server.of_run) == ["run1"]
    *trained, first, second = server.of_run["run1"]
    assert [row["_step"] for row in trained] == [1, 2, 3, 4, 5]
    assert [(row["eval/own/step"], row["eval/own/reward"], row["standalone"]) for row in (first, second)] == [
        (20, 0.5, 1),
        (40, 0.75, 1),
    ]
    assert first["_step"] > 5


def test_an_outage_costs_the_run_no_more_than_the_closing_deadline(tmp_path: Path):
    server = FakeWandb()
    server.failing = True
    said = run_mirror(tmp_path, 2, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
    server.shutdown()
    assert float(said.split()[0].removeprefix("longest=")) < 10  # the client itself would try for minutes, and so would its end


@pytest.mark.parametrize(
    ("setting", "environ", "expected"),
    [
        (None, {}, False),
        (None, {"WANDB_MODE": "offline"}, True),
        (None, {"WANDB_MODE": "disabled", "WANDB_API_KEY": KEY}, False),
        (None, {"WANDB_API_KEY": KEY}, True),
        (False, {"WANDB_API_KEY": KEY}, False),
        (True, {}, True),
    ],
)
def test_the_mirror_is_wanted_where_a_login_or_a_mode_exists(
    setting: bool | None, environ: dict[str, str], expected: bool, tmp_path: Path
):
    environ = {"NETRC": str(tmp_path / "none"), **environ}
    assert wanted(LoggingSettings(use_wandb=setting), environ) is expected


def test_a_stored_login_counts(tmp_path: Path):
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    assert wanted(LoggingSettings(), {"NETRC": str(tmp_path / "netrc")})


def test_an_earlier_attempt_that_cannot_be_read_ends_the_mirror_and_not_the_run(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run")
    attempts.put_aside(run, 1)
    block = run.earlier_attempt(1) / "blocks" / "step_metrics" / "orchestrator-0.parquet"
    block.parent.mkdir(parents=True, exist_ok=True)
    block.write_bytes(b"no parquet")
    share = partial(share_of, run, Lineage(2, 3), "ab12")
    mirror = WandbMirror(LoggingSettings(), name="a", folder=tmp_path / "wandb", config={}, share=share)
    mirror.log(4, {"loss": 1.0})
    mirror.close(60.0)
    assert "arquet" in mirror.failure
    assert not mirror.abandoned
