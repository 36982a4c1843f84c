"""Whole runs without `checkpoint.every`, and what is left of them: after the last step, after Ctrl-C, after a second one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from telescope._launch.own_command import name_own_command
from telescope.cli.sweep import Sweep
from telescope.runlog import checkpoints
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from tests.run.conftest import ROOT, Start
from tests.run.test_bare_metal import summary
from tests.run.test_full_disk import disk_of_its_own

REAL_TRAINER = ("experiment=fake", "cluster.device=cpu", "backend=fsdp", "orchestrator.max_async_rollout=0")
OWN = name_own_command()
AUTO = "checkpoint.at_end=auto"
LIMIT_S = 120


def telescope(line: str) -> subprocess.CompletedProcess[str]:
    """A line as a run has told it, with another model folder."""
    _, _, command = line.partition(": ")
    return subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.timeout(300)
def test_after_the_last_step_the_weights_are_there_and_the_last_lines_work(start: Start, tmp_path: Path):
    run = start(*REAL_TRAINER, "number_of_steps=2", AUTO)
    assert run.wait(LIMIT_S) == 0, run.said()
    assert checkpoints.steps(run.directory.checkpoints) == [2]
    assert checkpoints.steps_with_state(run.directory.checkpoints) == []
    assert run.summary()["exit_reason"] == "all 2 steps are trained"
    place = run.directory.path
    show, export = run.said().splitlines()[-2:]
    assert show == f"to see what it has learnt, or why not: {OWN} show {place}"
    assert export == f"to take the model away: {OWN} export latest --run-dir {place} --to my-model"
    made = telescope(export.replace("my-model", str(tmp_path / "model")))
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 900_000
    refused = telescope(f": {OWN} runs resume {place} number_of_steps=4")
    assert refused.returncode == 1
    assert "holds weights alone" in refused.stderr
    assert run.left_after(30) == []


@pytest.mark.timeout(300)
def test_ctrl_c_saves_the_training_state_and_the_run_goes_on_from_there(start: Start):
    run = start(*REAL_TRAINER, "cluster.trainer_num_workers=2", "number_of_steps=1000", AUTO)
    run.until_step(2)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(LIMIT_S) == 75, run.said()
    (saved,) = checkpoints.steps_with_state(run.directory.checkpoints)
    assert saved >= 2
    assert run.summary()["exit_reason"] == f"interrupted by SIGINT; the checkpoint of step {saved} is complete"
    assert run.said().splitlines()[-1] == (
        f"to go on from the checkpoint of step {saved}: {OWN} runs resume {run.directory.path}"
    )
    again = start(f"number_of_steps={saved + 1}", resume=run)
    assert again.wait(LIMIT_S) == 0, again.said()
    assert [row["step"] for row in again.rows("step_metrics")] == list(range(1, saved + 2))
    assert checkpoints.steps(run.directory.checkpoints) == [saved, saved + 1]
    assert checkpoints.steps_with_state(run.directory.checkpoints) == [saved]
    replayed = telescope(f": {OWN} replay {run.directory.path}")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.timeout(300)
def test_a_second_ctrl_c_waits_for_no_step_and_no_save(start: Start):
    run = start("experiment=fake", "cluster.device=cpu", "number_of_steps=9", "backend.step_s=300", "checkpoint.at_end=state")
    run.until(lambda: "training step 1" in str(run.status().get("doing")), "in its first step")
    os.kill(run.process.pid, signal.SIGINT)
    run.until(lambda: "Ctrl-C again kills at once" in run.said(), "told to stop")
    began = time.monotonic()
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(LIMIT_S) == 130, run.said()
    assert time.monotonic() - began < 60, "it waited for its step"
    assert checkpoints.steps(run.directory.checkpoints) == []
    assert run.left_after(30) == []


@pytest.mark.slow
def test_where_nothing_is_to_be_saved_ctrl_c_waits_for_no_step_and_the_last_line_says_so(start: Start):
    run = start(*REAL_TRAINER, "number_of_steps=100000", "checkpoint.at_end=none")
    run.until_step(2)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(LIMIT_S) == 130, run.said()
    assert not run.directory.checkpoints.exists()
    assert run.said().splitlines()[-1] == (
        "nothing of what it trained is saved, and its weights are gone with its processes: checkpoint.at_end=weights saves them"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_disk_without_the_room_is_told_at_the_start_and_the_weights_are_told_as_lost(tmp_path: Path):
    run, disk = RunDirectory(tmp_path / "run"), tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, "-m", "telescope.run", *REAL_TRAINER, "number_of_steps=2", f"run_dir={run.path}"]
    ended = subprocess.run(
        [*disk_of_its_own(), "sh", "-c", 'mount -t tmpfs -o size=512k tmpfs "$0" && "$@"', str(disk), *command,
         f"checkpoint.dir={disk}"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"Warning: {disk} has 0.5 MB free, and the save at the end takes 0.9 MB: free some" in ended.stderr
    assert [(row["step"], row["state"]) for row in rows(run, "checkpoints")] == [(2, "failed")]
    told = summary(run)
    assert (told["ok"], told["lost_checkpoint"]) == (False, 2)
    assert f"no checkpoint of it: {disk}: the weights take 0.9 MB, and 0.5 MB are free" in told["exit_reason"]
    assert ended.stderr.splitlines()[-1] == f"The last checkpoint is lost: {told['exit_reason']}."


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_a_sweep_the_weights_of_the_best_point_are_left_and_its_table_says_where(tmp_path: Path):
    given = (*REAL_TRAINER, "seed=1,2", "number_of_steps=2", f"run_dir={tmp_path}/sweep")
    ended = subprocess.run(
        [sys.executable, "-m", "telescope.run", "-m", *given],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    best = max(Sweep.load(tmp_path / "sweep").results, key=lambda result: result.value or 0.0)
    left = [point for point in tmp_path.glob("sweep/*/") if checkpoints.steps(RunDirectory(point).checkpoints)]
    assert left == [Path(best.run_dir)]
    last = ended.stderr.splitlines()[-2]
    assert last.startswith(f"The weights of the best point, {best.point}, are kept")
    assert "to take the model away" not in ended.stderr  # of a point whose weights may be deleted
