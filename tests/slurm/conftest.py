"""Runs submitted to a real Slurm as a user submits them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from telescope.runlog.attempts import Attempt, read_attempts
from telescope.runlog.files import read_object
from telescope.runlog.identity import read_identity
from telescope.runlog.layout import RunDirectory
from telescope.weights.transports.shared_memory import default_folder, run_prefix
from tests.deadlines import refuse_late
from tests.run.conftest import kept
from tests.slurm.real_slurm import POLL_S, Slurm

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
MODULES = {"orchestrator": "orchestrator", "worker": "workers", "server": "inference", "trainer": "trainer"}


@pytest.fixture(scope="session")
def output_elsewhere() -> Iterator[None]:
    """A job that names no file for its output leaves one where it was submitted: here, if a test did that."""
    before = set(ROOT.glob("slurm-*.out"))
    yield
    assert set(ROOT.glob("slurm-*.out")) == before


@pytest.fixture(scope="session")
def slurm(output_elsewhere: None) -> Iterator[Slurm]:
    """One Slurm for the session; step daemons track processes by cgroups where the machine has them."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # a short path: sockets lie in it
        cluster = Slurm(Path(folder), "cgroup" if os.access("/sys/fs/cgroup/freezer", os.W_OK) else "linuxproc")
        try:
            yield cluster.start()
        finally:
            cluster.stop()


@pytest.fixture(scope="session")
def plain_slurm(output_elsewhere: None) -> Iterator[Slurm]:
    """The same with linuxproc, which follows parents alone."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = Slurm(Path(folder))
        try:
            yield cluster.start()
        finally:
            cluster.stop()


def until(condition: Callable[[], bool], what: str, told: Callable[[], str] = str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        refuse_late(deadline, f"not {what} within {limit_s:g} s\n{told()[-6000:]}")
        time.sleep(POLL_S)


@dataclass
class Job:
    """One submitted run."""

    slurm: Slurm
    directory: RunDirectory
    job_id: str
    temporary: Path
    seen: set[psutil.Process] = field(default_factory=set)

    @property
    def attempts(self) -> list[Attempt]:
        return read_attempts(self.directory)

    def told(self) -> str:
        outputs = sorted(self.directory.path.parent.rglob("slurm/*.out"))
        logs = sorted(self.directory.path.glob("logs/*"))
        texts = [f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in (*logs, *outputs)]
        queue = self.slurm.client("squeue", "--states=all", "--array", check=False)
        return "\n".join([*texts, str(self.attempts), str(self.slurm.job(self.job_id)), queue])

    def until(self, condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        until(condition, what, self.told, limit_s)

    def processes(self) -> dict[str, psutil.Process]:
        """The run's living processes by name, wherever they were carried; all that name its directory are noted."""
        found = {}
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            if str(self.directory.path) in line and line[1:2] == ["-m"]:
                found[line[-1]] = process
            if any(str(self.directory.path) in word for word in line):
                self.seen.add(process)
        return found

    def until_under_way(self, attempt: int = 1) -> None:
        """Until that attempt trains, and every process is noted."""
        self.until(lambda: len(self.attempts) >= attempt, f"attempt {attempt} begun")
        self.until(lambda: read_object(self.directory.status_json).get("state") == "running", f"attempt {attempt} under way")
        self.processes()

    def until_ended(self, number: int = 1) -> Attempt:
        self.until(lambda: len(self.attempts) >= number and bool(self.attempts[number - 1].why), f"attempt {number} ended")
        return self.attempts[number - 1]

    def until_gone(self) -> None:
        """Until Slurm has let go of the job."""
        gone = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.slurm.job(self.job_id).get("JobState", "") in gone, "gone from the queue")

    def left(self) -> list[str]:
        """What is left after processes had time to go: of all that were ever seen, shared memory, files for temporary use."""
        _, alive = psutil.wait_procs(self.seen, timeout=LIMIT_S)
        processes = [str(process) for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        segments = default_folder().glob(f"{run_prefix(read_identity(self.directory).run_id)}*")
        return [*processes, *map(str, segments), *(str(path) for path in self.temporary.iterdir() if not kept(path))]


Submit = Callable[..., list[Job]]


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Submit]:
    """`submit(slurm, "experiment=fake")`: as on the command line; the jobs. `python`, `cwd`: of another installation."""
    jobs: list[Job] = []
    temporary = Path(tempfile.mkdtemp(prefix="telescope-test-"))  # short: vLLM has its sockets there

    def hand_over(slurm: Slurm, *overrides: str, python: str | Path = sys.executable, cwd: Path = ROOT) -> list[Job]:
        environment = {**slurm.environment, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "LD_PRELOAD": ""}
        environment["TMPDIR"] = str(temporary)
        if cwd != ROOT:
            environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            [python, "-m", "telescope.run", f'run_dir="{tmp_path}/a run"', "cluster=slurm", *overrides],
            env=environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = re.findall(r"^job (\S+): run directory (.+)$", done.stdout, re.MULTILINE)
        new = [Job(slurm, RunDirectory(Path(path)), job_id, temporary) for job_id, path in found]
        jobs.extend(new)
        return new

    yield hand_over
    for job in jobs:
        job.slurm.client("scancel", job.job_id, check=False)
    for job in jobs:
        for process in job.seen:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.send_signal(signal.SIGKILL)
    shutil.rmtree(temporary, ignore_errors=True)
