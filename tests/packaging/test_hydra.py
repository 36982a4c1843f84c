"""Hydra beside what it may be installed with: its Optuna sweeper, and its candidates with the omegaconf that they ask for."""

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
    *(
        "trainer.learning_rate=tag(log, interval(1e-5, 1e-3))",
        "algorithm=choice(grpo,rloo)",
        "--objective",
        "reward_policy_last",
    ),
)


NEWER = ("hydra-core==1.4.0rc3", "omegaconf==2.4.1rc1")


def borrowed(folder: Path, *packages: str) -> Path:
    """The Python of an environment of its own that borrows the packages of ours: what these bring must go with them."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_S)
    python = folder / "bin" / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    place = Path(subprocess.run(where, check=True, capture_output=True, text=True, timeout=60).stdout.strip())
    (place / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-m", "pip", "install", "-qq", *packages], check=True, timeout=INSTALL_S)
    return python


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + RUN_S + 60)
@pytest.mark.parametrize("packages", [NEWER, NEWER[1:]], ids=["candidates", "omegaconf alone"])
def test_a_newer_hydra_or_omegaconf_composes_the_same_and_the_terminal_shows_no_warning(
    tmp_path: Path, packages: tuple[str, ...]
) -> None:
    """The second pair is none that pip would choose, but one that hosts have."""
    python = borrowed(tmp_path / "venv", "--no-deps", *packages)
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT), "WANDB_MODE": "disabled"}
    for words in (("--cfg", "job", "--resolve"), ("-m", "--cfg", "job", "algorithm=grpo,cispo", "env=gsm8k")):
        told = [
            subprocess.run(
                [which, "-W", "default", "-m", "telescope.run", *words],
                cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=RUN_S, check=True,
            )
            for which in (sys.executable, python)
        ]  # fmt: skip
        assert told[0].stdout == told[1].stdout
        assert [one.stderr for one in told] == ["", ""]


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + RUN_S + 60)
def test_optuna_chooses_points_from_the_results_of_runs(tmp_path: Path) -> None:
    python = borrowed(tmp_path / "venv", "hydra-optuna-sweeper>=1.3,<1.4")
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
