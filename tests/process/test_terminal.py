"""The command and its terminal: Ctrl-C before anything runs, and streams that are closed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

BACKGROUND = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
modes = termios.tcgetattr(0)
modes[3] |= termios.TOSTOP
termios.tcsetattr(0, termios.TCSANOW, modes)
pid = os.fork()
if not pid:
    os.setpgid(0, 0)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
_, status = os.waitpid(pid, os.WUNTRACED)
os._exit(99 if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status))
"""
"""A shell with `stty tostop` that starts a job in the background; 99: the job was stopped."""
ROOT = Path(__file__).parents[2]
LIMIT_S = 60


def begin(*command: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ctrl_c_during_the_first_imports_is_one_line_and_130() -> None:
    process = begin(sys.executable, "-X", "importtime", "-m", "telescope.run", "--cfg", "job")
    assert process.stderr is not None
    while not (line := process.stderr.readline()).rstrip().endswith(" argparse"):
        assert line, "it ended before its imports"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    said = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, said) == (130, ["Interrupted."])


def test_ctrl_c_while_the_configuration_is_composed_is_one_line_and_130(tmp_path: Path) -> None:
    plugin = tmp_path / "plugins" / "algorithms" / "slow.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text("import sys, threading\nprint('here', flush=True)\nthreading.Event().wait(60)\n")
    process = begin(sys.executable, "-m", "telescope.run", "--config-dir", str(tmp_path), "--cfg", "job")
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (130, "Interrupted.\n")


def test_closed_streams_do_not_keep_a_run_from_its_end(tmp_path: Path) -> None:
    """Nor does the first file that is opened become stderr."""
    run = tmp_path / "run"
    overrides = f"experiment=fake number_of_steps=1 run_dir={run}"
    command = f"exec {sys.executable} -m telescope.run {overrides} <&- >&- 2>&-"
    process = begin("sh", "-c", command, OMP_NUM_THREADS="1", WANDB_MODE="disabled")
    assert process.communicate(timeout=LIMIT_S) == ("", "")
    assert process.returncode == 0
    assert '"exit_code": 0' in (run / "exit.json").read_text()


def test_a_line_does_not_stop_a_job_in_the_background() -> None:
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-c", BACKGROUND, "-m", "telescope", "--help"]
        shell = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        assert shell.wait(LIMIT_S) == 0
    finally:
        os.close(ours)
        os.close(theirs)
