"""A run inside a PID namespace of its own, as a container gives it: the supervisor may be its process number 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from telescope.runlog.identity import read_identity
from telescope.runlog.layout import RunDirectory
from telescope.weights.transports.shared_memory import default_folder, run_prefix
from tests.run.conftest import ROOT, kept

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def ways() -> tuple[str, ...]:
    """As root directly, else by way of a user namespace."""
    return UNSHARE if os.getuid() == 0 else (*UNSHARE, "--user", "--map-root-user")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ending", ["all steps", "a killed worker"])
def test_a_run_ends_and_leaves_nothing_where_it_is_process_number_1(tmp_path: Path, ending: str):
    run, temporary = RunDirectory(tmp_path / "run"), tmp_path / "temporary"
    temporary.mkdir()
    steps = 3 if ending == "all steps" else 100_000
    command = [sys.executable, "-m", "telescope.run", "experiment=fake", f"number_of_steps={steps}", f"run_dir={run.path}"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "TMPDIR": str(temporary)}
    when = "until grep -q '\"step\":[1-9]' $0/status.json 2>/dev/null; do sleep 0.2; done"
    kill = "kill -9 $(pgrep -f '[t]elescope.workers --run-dir')"  # whose pattern does not find the shell that says it
    beside = ["sh", "-c", f'({when}; {kill}) & exec "$@"', str(run.path)]
    inside = command if ending == "all steps" else [*beside, *command]
    ended = subprocess.run([*ways(), *inside], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == (0 if ending == "all steps" else 70), ended.stdout[-2000:] + ended.stderr[-2000:]
    assert run.exit_json.exists()
    assert list(default_folder().glob(f"{run_prefix(read_identity(run).run_id)}*")) == []
    assert [path for path in temporary.iterdir() if not kept(path)] == []
