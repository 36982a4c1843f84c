"""Starts whole runs as a user does, and sees how they end and what they leave behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from telescope.runlog.identity import read_identity
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from telescope.weights.transports.shared_memory import default_folder, run_prefix
from tests.deadlines import refuse_late

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class WholeRun:
    """One `python -m telescope.run …` in a session of its own."""

    directory: RunDirectory
    process: subprocess.Popen[str]
    output: Path
    temporary: Path
    seen: set[psutil.Process] = field(default_factory=set)

    def remember(self) -> None:
        """Note every process that the run has now."""
        try:
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return

    def wait(self, limit_s: float = 110.0) -> int:
        """The exit code; fails with the run's output where the run does not end in time."""
        deadline = time.monotonic() + limit_s
        while True:
            self.remember()
            try:
                return self.process.wait(0.25)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    os.killpg(self.process.pid, signal.SIGKILL)
                    raise TimeoutError(f"the run did not end within {limit_s} s:\n{self.said()[-4000:]}") from None

    def until(self, condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.said()[-4000:]}"
            refuse_late(deadline, f"not {what} within {limit_s} s:\n{self.said()[-4000:]}")
            self.remember()
            time.sleep(0.05)

    def until_step(self, step: int, limit_s: float = 60.0) -> None:
        self.until(lambda: (self.status().get("step") or 0) >= step, f"at step {step}", limit_s)

    def status(self) -> dict[str, Any]:
        try:
            return json.loads(self.directory.status_json.read_text())
        except FileNotFoundError:
            return {}

    def said(self) -> str:
        return self.output.read_text()

    def summary(self) -> dict[str, Any]:
        return json.loads(self.directory.summary_json.read_text())

    def rows(self, stream: str) -> list[dict[str, Any]]:
        return rows(self.directory, stream)

    def find(self, name: str) -> psutil.Process:
        """The process of the run that goes by this name (not its shim)."""
        self.remember()
        module = {"orchestrator": "orchestrator", "worker": "workers", "server": "inference", "trainer": "trainer"}
        wanted = f"telescope.{module[name.partition('-')[0]]}"
        for process in self.seen:
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            if line[1:3] == ["-m", wanted] and name in line:
                return process
        raise AssertionError(f"no process {name} among {[p.cmdline() for p in self.seen if p.is_running()]}")

    def left_after(self, limit_s: float) -> list[str]:
        """What is left of the run after at most `limit_s`: living processes, shared memory, files for temporary use."""
        _, alive = psutil.wait_procs(self.seen, timeout=limit_s)
        processes = [str(process) for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        segments = default_folder().glob(f"{run_prefix(read_identity(self.directory).run_id)}*")
        return [*processes, *map(str, segments), *(str(path) for path in self.temporary.iterdir() if not kept(path))]


def kept(path: Path) -> bool:
    """Whether a library keeps it on purpose, for later runs."""
    return path.name.startswith(("torchinductor_", "triton", "vllm", "torch_extensions"))


Start = Callable[..., WholeRun]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("experiment=fake", "number_of_steps=2")`: a run with a directory of its own. `start(resume=run)`: another attempt
    of one that has ended. `shown_on`: the descriptor that is its standard output and error, in place of a file."""
    runs: list[WholeRun] = []

    def begin(
        *overrides: str,
        environ: dict[str, str] | None = None,
        cwd: Path = ROOT,
        resume: WholeRun | None = None,
        shown_on: int | None = None,
    ) -> WholeRun:
        directory = tmp_path / f"run-{len(runs)}" if resume is None else resume.directory.path
        first = ("telescope.run", f"run_dir={directory}") if resume is None else ("telescope", "runs", "resume", str(directory))
        output = tmp_path / f"output-{len(runs)}.txt"
        temporary = Path(tempfile.mkdtemp(prefix="telescope-test-"))  # short: vLLM has its sockets there
        environment = {
            **os.environ,
            "TMPDIR": str(temporary),
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
            "LD_PRELOAD": "",
            **(environ or {}),
        }
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *first, *overrides],
                stdin=subprocess.DEVNULL,
                stdout=file if shown_on is None else shown_on,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=cwd,
                text=True,
                start_new_session=True,
            )
        runs.append(WholeRun(RunDirectory(directory), process, output, temporary))
        return runs[-1]

    yield begin
    for run in runs:
        shutil.rmtree(run.temporary, ignore_errors=True)
        run.remember()
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait(10)
        for process in run.seen:
            if process.is_running():
                process.kill()
