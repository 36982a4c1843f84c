"""Users with odd shells: locales without UTF-8, closed streams, few descriptors, strange folders, a home that is not there."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from telescope.runlog.files import read_object
from telescope.runlog.layout import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
ASCII = {"PYTHONIOENCODING": "ascii:strict"}
RUN = (sys.executable, "-m", "telescope.run", "experiment=fake", "number_of_steps=2", "logging.progress=false")


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", **variables}


def answer(*command: str | bytes, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, env=environment(**variables), capture_output=True, timeout=100, check=False)


def test_a_terminal_that_knows_ascii_alone_gets_the_rest_escaped(tmp_path: Path):
    help_text = answer(sys.executable, "-m", "telescope.run", "--help", **ASCII)
    assert help_text.returncode == 0, help_text.stderr
    assert b"\\u2026" in help_text.stdout
    run = RunDirectory.create(tmp_path / "gr\u00fcn")
    run.run_json.write_text("{}")
    listed = answer(sys.executable, "-m", "telescope", "runs", "list", str(tmp_path), **ASCII)
    assert listed.returncode == 0, listed.stderr
    assert b"gr\\xfcn" in listed.stdout


def test_a_folder_whose_name_is_no_text_is_refused_in_a_sentence(tmp_path: Path):
    folder = os.fsencode(tmp_path) + b"/gr\xfcn"
    os.mkdir(folder)
    done = subprocess.run([*RUN, "run_dir=run"], cwd=folder, env=environment(), capture_output=True, timeout=100, check=False)
    assert done.returncode == 1
    assert b"/gr\\udcfcn/run is not text in this locale (encoding utf-8): set LC_ALL=C.UTF-8" in done.stderr
    assert os.listdir(folder) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_runs_at_once_with_every_odd_habit_there_is_train_and_leave_nothing_open(tmp_path: Path):
    """One seed; folders with spaces and umlauts; no home; a long TMPDIR; 256 descriptors; the C locale; no stdin; any umask."""
    folder = tmp_path / "a b \u00fc"
    folder.mkdir()
    long_folder = tmp_path / ("x" * 100) / ("y" * 100)
    long_folder.mkdir(parents=True)
    variables = environment(TMPDIR=str(long_folder), LC_ALL="C")
    del variables["HOME"]
    habits = {"one": "umask 000", "two": "umask 077"}
    started = []
    for name, umask in habits.items():
        command = shlex.join([*RUN, "seed=5", f'run_dir="{folder}/{name}"'])
        script = f"{umask}; ulimit -n 256; exec {command} 0<&-"
        started.append(subprocess.Popen(["bash", "-c", script], env=variables, stderr=subprocess.PIPE))
    said = [process.communicate(timeout=250)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    runs = [RunDirectory(folder / name) for name in habits]
    assert [(read_object(run.summary_json) or {})["steps"] for run in runs] == [2, 2]
    for run in runs:
        assert run.path.stat().st_mode & 0o077 == 0
        for path in run.path.rglob("*.key_secret"):
            assert path.stat().st_mode & 0o077 == 0
        assert run.config_json.stat().st_mode & 0o077 == 0
