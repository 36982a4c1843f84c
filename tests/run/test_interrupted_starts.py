"""A Ctrl-C in the moment in which a run is set up: nothing is left half done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from telescope.cli.runs import run_status
from telescope.runlog.layout import RunDirectory
from telescope.runlog.opening import look
from tests.run.conftest import ROOT

INTERRUPTED = """
import os, signal, sys
from telescope._launch import terminal
terminal.prepare()
from telescope.cli import main, start

write = start._write_settings
def write_and_interrupt(*given):
    write(*given)
    os.kill(os.getpid(), signal.SIGINT)
start._write_settings = write_and_interrupt
sys.exit(main.main(sys.argv[1:]))
"""


def telescope(*arguments: str, interrupted: bool) -> subprocess.CompletedProcess[str]:
    command = ["-c", INTERRUPTED] if interrupted else ["-m", "telescope"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "LD_PRELOAD": ""}
    return subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("there", [False, True])
def test_a_new_run_is_taken_back(tmp_path: Path, there: bool):
    place = tmp_path / "run"
    if there:
        place.mkdir()
    done = telescope("run", "experiment=fake", f"run_dir={place}", interrupted=True)
    assert done.returncode == 130, done.stderr
    assert "Nothing was started." in done.stderr
    assert list(tmp_path.iterdir()) == [place] * there
    assert not there or list(place.iterdir()) == []


@pytest.mark.timeout(200)
def test_a_run_that_goes_on_is_stopped_in_good_order_and_can_go_on_again(tmp_path: Path):
    place = tmp_path / "run"
    begun = telescope(
        "run", "experiment=fake", "number_of_steps=1", "checkpoint.every=1", f"run_dir={place}", interrupted=False
    )
    assert begun.returncode == 0, begun.stderr
    done = telescope("runs", "resume", str(place), "number_of_steps=50", interrupted=True)
    assert done.returncode in (75, 130), done.stderr
    found = look(RunDirectory(place))
    assert run_status(found).state == "stopped"
    assert json.loads(found.run.exit_json.read_text())["exit_code"] == done.returncode
    again = telescope("runs", "resume", str(place), "number_of_steps=2", interrupted=False)
    assert again.returncode == 0, again.stderr
