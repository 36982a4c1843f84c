"""A sweep of whole runs on this machine, one after another."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from telescope.config.run import load_run
from telescope.runlog.layout import RunDirectory
from tests.run.conftest import ROOT

FAILS = """
from telescope.environments.base import Prompt, Reward, SingleTurn
class Odd(SingleTurn):
    fails: bool = False
    def prompts(self, split):
        return [Prompt(turns=({"role": "user", "content": f"rev ab{number}"},)) for number in range(50)]
    def reward(self, prompt, answer):
        if self.fails:
            raise OSError("the scales are broken")
        return Reward(float(sum(map(ord, answer)) % 7))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_point_that_fails_stops_no_other_and_all_are_told(tmp_path: Path):
    place = tmp_path / "mine" / "plugins" / "environments"
    place.mkdir(parents=True)
    (place / "odd.py").write_text(FAILS)
    points = ("-m", "experiment=fake", "env=odd", "environments.odd.kwargs.fails=false,true", "seed=1,2", "number_of_steps=1")
    command = [sys.executable, "-m", "telescope.run", "--config-dir", str(tmp_path / "mine"), *points]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "LD_PRELOAD": ""}
    done = subprocess.run(
        [*command, "rollout.retry_backoff_s=0", f"run_dir={tmp_path}/sweep"],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=350, check=False,
    )  # fmt: skip
    told = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]
    codes = [point["exit_code"] for point in told]
    assert codes[:2] == [0, 0], done.stderr[-3000:]
    assert 0 not in codes[2:]
    assert done.returncode == codes[2]
    assert ["the scales are broken" in point["reason"] for point in told] == [False, False, True, True]
    said = done.stdout + done.stderr
    failures = said[said.index("2 of 4 points failed:") :].splitlines()[1:3]
    assert ["the scales are broken" in line for line in failures] == [True, True]
    lines = [line for line in done.stderr.splitlines() if line.startswith("point ") and "of 4)" in line]
    assert [line.partition(")")[0] for line in lines] == [f"point {number} ({number + 1} of 4" for number in range(4)]
    assert done.stderr.splitlines()[: len(lines)] == lines, "what a point prints is in its own file"
    assert done.stdout == ""
    assert re.fullmatch(
        r"point 0 \(1 of 4\)  environments.odd.kwargs.fails=false seed=1  reward .* \(n=\d+\) in \d:\d\d", lines[0]
    )
    assert "the scales are broken" in lines[2]
    logs = sorted((tmp_path / "sweep").glob("*.log"))
    assert [log.stem for log in logs] == [path.name for path in sorted((tmp_path / "sweep").iterdir()) if path.is_dir()]
    assert all("run directory: " in log.read_text() for log in logs)
    runs = [RunDirectory(path) for path in sorted((tmp_path / "sweep").iterdir()) if path.is_dir()]
    assert [run.path.name for run in runs] == [
        *("000_fails-false_seed-1", "001_fails-false_seed-2", "002_fails-true_seed-1", "003_fails-true_seed-2")
    ]
    assert {load_run(run.config_json).logging.wandb_group for run in runs} == {"sweep"}
    assert [load_run(run.config_json).seed for run in runs] == [1, 2, 1, 2]
