"""A run that trains all its steps and can't write its last checkpoint: how it ends, who says so, and how it is mended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from telescope.runlog import checkpoints
from telescope.runlog.attempts import read_attempts
from tests.run.conftest import ROOT, Start

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
def test_it_ends_with_74_says_how_to_mend_it_and_a_resume_brings_the_checkpoint(start: Start, tmp_path: Path):
    saves = tmp_path / "saves"
    link = in_the_way(saves)
    run = start(*FAKE, f"checkpoint.dir={saves}")
    assert run.wait(LIMIT_S) == 74, run.said()
    told = run.summary()
    assert (told["ok"], told["exit_code"], told["lost_checkpoint"], told["steps"]) == (False, 74, 2, 2)
    assert told["exit_reason"].startswith("all 2 steps are trained; no checkpoint of it: it could not be completed: ")
    assert told["exit_reason"].endswith(
        f"`telescope runs resume {run.directory.path}` goes on from the checkpoint of step 1, trains step 2 again and saves"
    )
    assert run.said().splitlines()[-1] == f"The last checkpoint is lost: {told['exit_reason']}."
    assert "it goes on from its latest checkpoint" not in run.said()  # no restart by itself: it would train, and lose, again
    listed = telescope("telescope.runs", "list", str(run.directory.path))
    assert "failed           2/2" in listed
    assert told["exit_reason"] in listed
    link.unlink()
    again = start(resume=run)
    assert again.wait(LIMIT_S) == 0, again.said()
    assert checkpoints.steps(saves) == [1, 2]
    assert again.summary()["ok"] is True
    assert [(attempt.why, attempt.exit_code) for attempt in read_attempts(run.directory)] == [("failed", 74), ("done", 0)]


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
    assert done.returncode == 74, said[-3000:]
    points = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]
    assert [point["exit_code"] for point in points] == [74, 0]
    table = said[said.index("1 of 2 points failed:") :]
    assert "  0: all 2 steps are trained; no checkpoint of it" in table
    assert "goes on from the checkpoint of step 1, trains step 2 again and saves" in table
    assert checkpoints.steps(tmp_path / "kept") == [1, 2]
