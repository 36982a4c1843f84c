"""A run whose checkpoints lie on a disk that has room for one of them: a real file system that is full, no stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from tests.run.conftest import ROOT
from tests.run.test_bare_metal import summary

SETTINGS = (
    *("experiment=fake", "cluster.device=cpu", "backend=fsdp", "orchestrator.max_async_rollout=0", "seed=5"),
    *("number_of_steps=5", "checkpoint.every=1", "checkpoint.keep_last=1"),
)
DISK_KIB = 4096
"""The embedded model's weights and moments take 2.8 MB, and the next checkpoint is written before the last one goes."""


def disk_of_its_own() -> tuple[str, ...]:
    """A namespace of mounts: as root directly, else by way of a user namespace."""
    return ("unshare", "--mount") if os.getuid() == 0 else ("unshare", "--user", "--map-root-user", "--mount")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_whose_disk_is_full_trains_on_says_so_and_keeps_the_checkpoint_that_it_has(tmp_path: Path):
    run, disk, after = RunDirectory(tmp_path / "run"), tmp_path / "disk", tmp_path / "after"
    disk.mkdir()
    script = f'mount -t tmpfs -o size={DISK_KIB}k tmpfs "$0" && {{ "$@"; code=$?; cp -r "$0" "{after}"; exit $code; }}'
    command = [sys.executable, "-m", "telescope.run", *SETTINGS, f"run_dir={run.path}", f"checkpoint.dir={disk}"]
    ended = subprocess.run(
        [*disk_of_its_own(), "sh", "-c", script, str(disk), *command],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1, said[-4000:]
    assert [row["step"] for row in rows(run, "step_metrics")] == [1, 2, 3, 4, 5]
    saves = [(row["step"], row["state"]) for row in rows(run, "checkpoints")]
    assert saves[0] == (1, "complete")
    assert saves[1:] == [(step, "failed") for step in (2, 3, 4, 5)]
    told = [row["message"] for row in rows(run, "alerts")]
    for step, _ in saves[1:]:
        sentence = f"the checkpoint of step {step}{', the last, failed' if step == 5 else ' failed, and the run goes on'}: "
        assert any(message.startswith(sentence) and "No space left on device" in message for message in told), told
    told = summary(run)
    assert (told["ok"], told["exit_code"], told["lost_checkpoint"]) == (False, 1, 5)
    assert told["exit_reason"].startswith("all 5 steps are trained; no checkpoint of it: ")
    assert f"`telescope runs resume {run.path}` goes on from the checkpoint of step 1, trains" in told["exit_reason"]
    assert ended.stderr.splitlines()[-1] == f"The last checkpoint is lost: {told['exit_reason']}."
    assert sorted(path.name for path in after.iterdir() if path.is_dir()) == ["step_00000001"]
