"""kill -9 at instants spread over a save: the latest complete checkpoint loads each time, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def killed(folder: Path, kills: int, seed: int) -> int:
    """How many of the kills came while a save was under way."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.backends.saver", str(folder), str(kills), str(seed)],
        capture_output=True,
        text=True,
        timeout=110 if kills < 50 else 500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return int(ran.stdout.split()[-1])


def test_eight_kills_leave_whole_checkpoints(tmp_path):
    assert killed(tmp_path, 8, seed=0) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_kills_leave_whole_checkpoints(tmp_path):
    assert killed(tmp_path, 50, seed=1) > 25
