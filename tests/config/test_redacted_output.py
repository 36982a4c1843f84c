"""What our commands print, plug-ins that they import included, has no secret in it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from telescope._launch.unblocked_output import unblock_output
from telescope.config.redacted_output import RedactedStream, redact_output

ROOT = Path(__file__).resolve().parents[2]
SHOUTS = """
import os, sys
from telescope.environments.base import Prompt, Reward, SingleTurn

word = os.environ["PLAINWORD"]
print("imported with", word)
print(word, file=sys.stderr)
sys.stdout.write(word[:6]); sys.stdout.flush(); sys.stdout.write(word[6:] + "\\n")
sys.stdout.buffer.write(f"bytes {word}\\n".encode())
print("half a line", word, end="")

class Shouts(SingleTurn):
    word: str = ""
    def prompts(self, split):
        print("prompts with", self.word)
        return [Prompt(({"role": "user", "content": f"rev ab{n}"},), answer="x") for n in range(4)]
    def reward(self, prompt, answer):
        return Reward(1.0)
"""
JOB = """
import os, sys
from telescope._launch.slurm import batch_job

def fails(*_):
    print("a library says", os.environ["PLAINWORD"])
    raise ValueError("Slurm says " + os.environ["PLAINWORD"])

batch_job.read_allocation = fails
batch_job.run(sys.argv[1])
"""
WORD = "correct-horse-battery"
REFERENCE = "environments.shouts.kwargs.word='${oc.env:PLAINWORD}'"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    place = tmp_path / "mine" / "plugins" / "environments"
    place.mkdir(parents=True)
    (place / "shouts.py").write_text(SHOUTS)
    return tmp_path / "mine"


def said(*command: str, **environment: str) -> str:
    environ = {**os.environ, "PLAINWORD": WORD, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", ["run", "check", "env check"])
@pytest.mark.parametrize("preset", [True, False])
def test_what_a_plug_in_prints_while_a_command_imports_it_is_redacted(home: Path, command: str, preset: bool):
    if preset:
        (home / "env").mkdir()
        (home / "env" / "shouts.yaml").write_text(f"name: shouts\nkwargs: {{word: '{REFERENCE.partition('=')[2][1:-1]}'}}\n")
    place = "word='${oc.env:PLAINWORD}'" if command == "env check" else REFERENCE
    given = () if preset else (place,)
    words = {
        "run": ("telescope.run", "experiment=fake", "env=shouts", "--cfg", "job"),
        "check": ("telescope", "check", "experiment=fake", "env=shouts"),
        "env check": ("telescope", "env", "check", "shouts", "--no-second-process"),
    }[command]
    text = said("-m", *words, "--config-dir", str(home), *given)
    assert "imported with <redacted>" in text
    assert "bytes <redacted>" in text
    assert "half a line <redacted>" in text
    assert WORD not in text


def test_a_jobs_own_lines_are_redacted(home: Path, tmp_path: Path):
    text = said(
        *("-m", "telescope.run", "--config-dir", str(home), "experiment=fake", "env=shouts", REFERENCE, "cluster=slurm"),
        *("cluster.dry_run=true", f"run_dir={tmp_path}/run"),
    )
    assert WORD not in text
    text = said("-c", JOB, f"{tmp_path}/run", SLURM_JOB_ID="12", SLURM_JOB_NODELIST="n1")
    assert "Slurm says <redacted>" in text
    assert "a library says <redacted>" in text
    assert WORD not in text
    left = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path for path in left if WORD.encode() in path.read_bytes()] == []


def test_an_output_that_never_waits_is_redacted_too_and_ends_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLAINWORD", WORD)
    path = tmp_path / "out"
    with path.open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with redact_output(["PLAINWORD"]), unblock_output():
            print(f"before {WORD} ümläut")
            sys.stdout.write(f"at the end {WORD}")
    assert path.read_text() == "before <redacted> ümläut\nat the end <redacted>"


def test_a_long_line_without_an_end_is_cut_between_characters():
    out = io.StringIO()
    stream = RedactedStream(out)
    stream.write("ü" * 100_001)
    stream.let_go()
    assert out.getvalue() == "ü" * 100_001


@pytest.mark.parametrize(
    ("terminal", "shown"), [(True, "a[2J]0;pwn b\tü\n\r\x1b[Kc"), (False, "a\x1b[2J\x1b]0;pwn\x07 b\tü\n\r\x1b[Kc")]
)
def test_a_terminal_is_shown_no_codes_of_somebody_elses(terminal: bool, shown: str):
    out = io.StringIO()
    out.isatty = lambda: terminal  # type: ignore[method-assign]
    stream = RedactedStream(out)
    stream.write("a\x1b[2J\x1b]0;pwn\x07 b\tü\n\r\x1b[Kc")
    stream.let_go()
    assert out.getvalue() == shown


def test_an_exception_that_nobody_catches_is_redacted_too():
    program = (
        "from telescope.config.redacted_output import redact_output\n"
        "with redact_output(['PLAINWORD']):\n    raise KeyError('boom correct-horse-battery')\n"
    )
    given = {**os.environ, "PLAINWORD": "correct-horse-battery"}
    ended = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "KeyError: 'boom <redacted>'" in ended.stderr
