"""Short-lived folders: made for one process, swept when it is no more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from telescope.runlog import temporary

HOLD = "import sys; from telescope.runlog import temporary; print(temporary.make(), flush=True); sys.stdin.read()"


def test_a_folder_lives_as_long_as_the_process_that_made_it(monkeypatch):
    base = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    environ = {**os.environ, "TMPDIR": str(base)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=environ, text=True, **pipes) as other:
        folder = Path(other.stdout.readline().strip())
        (folder / "socket").write_text("")
        temporary.sweep()
        assert folder.parent == base
        assert folder.stat().st_mode & 0o777 == 0o700
        other.kill()
    temporary.sweep()
    assert list(base.iterdir()) == []
    (base / f"{temporary.PREFIX}x").mkdir()  # somebody is just making it
    temporary.sweep()
    assert len(list(base.iterdir())) == 1
    shutil.rmtree(base)


def test_under_a_long_folder_for_temporary_files_the_path_stays_short(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/scratch/" + "x" * 80)
    made = temporary.make()
    assert len(str(made)) < 60
    shutil.rmtree(made)
