"""The Optuna sweeper as it is installed today, over our launcher: it chooses points from the results of runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.packaging.test_pythons import CHECKOUT

INSTALL_S, RUN_S = 900, 300
SEARCH = (
    *("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweeper.direction=maximize"),
    *("trainer.learning_rate=tag(log, interval(1e-5, 1e-3))", "algorithm=choice(grpo,rloo)", "--objective", "reward_mean_last"),
)


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + RUN_S + 60)
def test_optuna_chooses_points_from_the_results_of_runs(tmp_path: Path) -> None:
    """In an environment of its own that borrows the packages of ours: what the sweeper brings must go with them."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=INSTALL_S)
    python = tmp_path / "venv" / "bin" / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(where, check=True, capture_output=True, text=True, timeout=60).stdout.strip())
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-m", "pip", "install", "-qq", "hydra-optuna-sweeper>=1.3,<1.4"], check=True, timeout=INSTALL_S)
    command = [python, "-m", "telescope.run", *SEARCH, "experiment=fake", "cluster.device=cpu", "number_of_steps=1"]
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT), "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "LD_PRELOAD": ""}
    done = subprocess.run(
        [*command, f"run_dir={tmp_path}/sweep"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Best parameters: {'trainer.learning_rate':" in done.stderr + done.stdout
    points = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]
    assert [point["exit_code"] for point in points] == [0, 0, 0]
    assert len({json.dumps(point["overrides"]) for point in points}) == 3
    best = (tmp_path / "sweep" / "optimization_results.yaml").read_text()
    assert f"best_value: {max(point['value'] for point in points)}" in best
