"""W&B gets every step's metrics from the real client, and nothing that W&B does can stop or slow a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from telescope.config.parts import LoggingSettings
from telescope.runlog.mirror import wanted
from tests.runlog.fake_wandb import FakeWandb

KEY = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import os, sys, time, pathlib
from telescope.config.parts import LoggingSettings
from telescope.runlog.mirror import WandbMirror
run_id, first, last = os.environ.get("RUN"), int(os.environ.get("FIRST", "1")), int(os.environ.get("LAST", "5"))
settings = LoggingSettings(wandb_group="a-sweep")
mirror = WandbMirror(settings, name="a-run", folder=pathlib.Path(sys.argv[1]), config={"seed": 7}, run_id=run_id)
longest = 0.0
for step in range(first, last + 1):
    begun = time.perf_counter()
    mirror.log(step, {"reward/mean": step / 10})
    longest = max(longest, time.perf_counter() - begun)
mirror.close(timeout_s=float(sys.argv[2]))
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
    said = run_mirror(tmp_path, 60, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
    server.shutdown()
    assert said.endswith("dropped=0 failure=")
    assert [(row["_step"], row["reward/mean"]) for row in server.history] == [(s, s / 10) for s in range(1, 6)]
    assert any("upsertBucket" in query for query in server.queries)
    first = next(body for body in server.bodies if "mutation UpsertBucket" in body)
    assert json.loads(first)["variables"]["groupName"] == "a-sweep"
    assert not any(KEY in body for body in server.bodies)  # the key travels as a header, never as data


def test_another_attempt_goes_on_with_the_same_run_and_a_step_trained_anew_stands_there_once(tmp_path: Path):
    server = FakeWandb()
    environ = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "RUN": "0a1b2c3d4e5f6071"}
    for first, last in (("1", "3"), ("3", "5")):  # the checkpoint was that of step 2
        folder = tmp_path / first
        folder.mkdir()
        assert run_mirror(folder, 60, **environ, FIRST=first, LAST=last).endswith("dropped=0 failure=")
    server.shutdown()
    assert list(server.of_run) == ["0a1b2c3d4e5f6071"]
    assert [row["_step"] for row in server.of_run["0a1b2c3d4e5f6071"]] == [1, 2, 3, 4, 5]


def test_offline_leaves_a_file_to_sync(tmp_path: Path):
    said = run_mirror(tmp_path, 60, WANDB_MODE="offline")
    assert said.endswith("dropped=0 failure=")
    (file,) = tmp_path.rglob("*.wandb")
    assert file.stat().st_size > 500


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
