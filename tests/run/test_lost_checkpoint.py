"""A run that trains all its steps and can't write its last checkpoint: how it ends, who says so, and how it is mended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from telescope.runlog import checkpoints
from telescope.runlog.attempts import read_attempts
from tests.run.conftest import ROOT, Start
from tests.run.plugins import hanging

FAKE = ("experiment=fake", "number_of_steps=2", "checkpoint.every=1", "checkpoint.max_restarts=3")
LIMIT_S = 120


def in_the_way(folder: Path) -> Path:
    """A link to nowhere where the last checkpoint is to be: all of it is written, and can't get its name."""
    folder.mkdir()
    link = checkpoints.complete_folder(folder, 2)
    link.symlink_to(folder / "nowhere")
    return link


def telescope(*words: str) -> str:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_fails_says_how_to_mend_it_and_a_resume_brings_the_checkpoint(start: Start, tmp_path: Path):
    saves = tmp_path / "saves"
    link = in_the_way(saves)
    run = start(*FAKE, f"checkpoint.dir={saves}")
    assert run.wait(LIMIT_S) == 1, run.said()
    told = run.summary()
    assert (told["ok"], told["exit_code"], told["lost_checkpoint"], told["steps"]) == (False, 1, 2, 2)
    assert told["exit_reason"].startswith("all 2 steps are trained; no checkpoint of it: it could not be completed: ")
    assert told["exit_reason"].endswith(
        f"`telescope runs resume {run.directory.path}` goes on from the checkpoint of step 1, trains step 2 again and saves"
    )
    assert run.said().splitlines()[-1] == f"The last checkpoint is lost: {told['exit_reason']}."
    assert "it goes on from its latest checkpoint" not in run.said()  # no restart by itself: it would train, and lose, again
    listed = telescope("telescope", "runs", "list", str(run.directory.path))
    assert "failed           2/2" in listed
    assert told["exit_reason"] in listed
    link.unlink()
    again = start(resume=run)
    assert again.wait(LIMIT_S) == 0, again.said()
    assert checkpoints.steps(saves) == [1, 2]
    assert again.summary()["ok"] is True
    assert [(attempt.why, attempt.exit_code) for attempt in read_attempts(run.directory)] == [("failed", 1), ("done", 0)]


@pytest.mark.slow
def test_a_last_save_that_is_not_done_in_time_is_lost(start: Start, tmp_path: Path):
    place = hanging(tmp_path / "mine")
    run = start("--config-dir", str(place), *FAKE, "backend=hangs", "checkpoint.timeout_s=5")
    assert run.wait(LIMIT_S) == 1, run.said()
    cause = "trainer-0 did not write within the time that checkpoint.timeout_s gives"
    assert run.summary()["exit_reason"].startswith(f"all 2 steps are trained; no checkpoint of it: {cause}. ")
    assert run.left_after(30) == []


@pytest.mark.slow
def test_who_stops_a_run_at_its_last_save_is_told_the_same_and_it_counts_as_stopped(start: Start, tmp_path: Path):
    place = hanging(tmp_path / "mine")
    run = start("--config-dir", str(place), *FAKE, "backend=hangs", "checkpoint.stop_timeout_s=2")
    run.until((place / "plugins" / "backends" / "hanging").exists, "at its last save")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(LIMIT_S) == 143, run.said()
    told = run.summary()
    assert (told["ok"], told["exit_code"], told["lost_checkpoint"]) == (False, 143, 2)
    assert "no checkpoint of it: the checkpoint of step 2 was not done within 2 s. " in told["exit_reason"]
    assert f"`telescope runs resume {run.directory.path}` goes on from the checkpoint of step 1" in told["exit_reason"]
    assert run.said().splitlines()[-1] == f"The last checkpoint is lost: {told['exit_reason']}."
    assert told["exit_reason"] in telescope("telescope", "runs", "list", str(run.directory.path))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sweep_has_it_among_its_failures(tmp_path: Path):
    in_the_way(tmp_path / "lost")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "LD_PRELOAD": ""}
    places = (f"checkpoint.dir={tmp_path}/lost,{tmp_path}/kept", f"run_dir={tmp_path}/sweep")
    done = subprocess.run(
        [sys.executable, "-m", "telescope.run", "-m", *FAKE, *places],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 1, said[-3000:]
    points = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]
    assert [point["exit_code"] for point in points] == [1, 0]
    table = said[said.index("1 of 2 points failed:") :]
    assert "  0: orchestrator ended with exit code 1: all 2 steps are trained; no checkpoint of it" in table
    assert "goes on from the checkpoint of step 1, trains step 2 again and saves" in table
    assert checkpoints.steps(tmp_path / "kept") == [1, 2]
