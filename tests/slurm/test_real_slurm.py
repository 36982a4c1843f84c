"""Whole runs in a real Slurm: three nodes on this machine, fake GPUs, real processes. The slow lane.

All but one are those of a user who has installed the wheel and stands in a folder that is not a checkout.
"""

from __future__ import annotations

import functools
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from telescope._launch.slurm.queue import QueuedJob, describe_state
from telescope.runlog.attempts import read_lineage, read_submission
from telescope.runlog.files import read_object
from telescope.runlog.identity import read_identity
from telescope.runlog.layout import RunDirectory
from telescope.runlog.opening import look
from tests.packaging.test_wheel import python, wheel
from tests.slurm.conftest import ROOT, Job, Submit
from tests.slurm.real_slurm import Slurm

__all__ = ["python", "wheel"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ("experiment=fake", "cluster.slurm.cpus_per_node=4", "cluster.inference_num_workers=2", "cluster.trainer_num_workers=1")
LONG = (*SMALL, "number_of_steps=1000000", "inference.fake_token_s=0.05")
"""Goes on until somebody ends it."""


@pytest.fixture
def submit(submit: Submit, python: Path, tmp_path: Path) -> Submit:
    """With the installed wheel, whose interpreter does not see the checkout."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    return functools.partial(submit, python=python, cwd=elsewhere)


def interpreters(job: Job) -> set[str]:
    """Those of the run's processes, wherever they were carried."""
    return {process.cmdline()[0] for process in job.processes().values()}


def step_daemon(process: psutil.Process) -> psutil.Process:
    """The slurmstepd that a carried process runs under: it, its shim, the daemon."""
    daemon = process.parents()[1]
    assert "slurmstepd" in daemon.name(), daemon
    return daemon


def telescope(slurm: Slurm, temporary: Path, *words: str) -> subprocess.Popen[str]:
    """A command as somebody on the login node types it, begun and not waited for."""
    return subprocess.Popen(
        [sys.executable, "-m", "telescope", *words],
        env={**slurm.environment, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "LD_PRELOAD": ""},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def summary(directory: RunDirectory) -> dict[str, object]:
    return json.loads(directory.summary_json.read_text())


def test_a_job_of_two_node_groups_puts_servers_and_ranks_where_they_belong(slurm: Slurm, submit: Submit, python: Path):
    (job,) = submit(
        slurm,
        *LONG,
        *("cluster.device=cpu", "cluster.trainer_num_workers=2"),
        *("cluster.slurm.gpus_per_node=2", "cluster.slurm.inference={nodes: 2}", "cluster.inference_placement=SPREAD"),
    )
    job.until_under_way()
    nodes = job.attempts[0].nodes
    homes = {name: process.environ().get("SLURMD_NODENAME") for name, process in job.processes().items()}
    beside, servers = ("orchestrator", "worker-0", "trainer-0", "trainer-1"), ("server-0", "server-1")
    assert {homes.pop(name) for name in beside} == {nodes[0]}
    assert {homes.pop(name) for name in servers} == set(nodes[1:])
    assert not homes
    assert interpreters(job) == {str(python)}
    assert not any("PYTHONPATH" in process.environ() for process in job.processes().values())
    assert slurm.job(str(int(job.job_id) + 1))["NodeList"]  # the second component
    slurm.client("scancel", job.job_id)
    job.until_gone()
    assert job.left() == []


def test_a_sweep_of_four_points_is_one_array_of_which_two_run_at_once(slurm: Slurm, submit: Submit):
    jobs = submit(slurm, "-m", *SMALL, "seed=0,1,2,3", "cluster.slurm.array_parallelism=2")
    first = jobs[0].job_id.partition("_")[0]
    assert [job.job_id for job in jobs] == [f"{first}_{point}" for point in range(4)]
    at_once: set[int] = set()

    def all_ended() -> bool:
        running = slurm.client("squeue", "--array", "--noheader", "--states=RUNNING", f"--jobs={first}", check=False)
        at_once.add(len(running.splitlines()))
        return all(job.attempts and job.attempts[-1].why for job in jobs)

    jobs[0].until(all_ended, "all points ended")
    assert [job.until_ended().why for job in jobs] == ["done"] * 4
    assert [summary(job.directory)["steps"] for job in jobs] == [3] * 4
    assert max(at_once) <= 2
    assert len({read_identity(job.directory).run_id for job in jobs}) == 4
    names = [job.directory.path.name for job in jobs]
    assert names == [f"00{point}_seed-{point}" for point in range(4)]
    assert [slurm.job(job.job_id)["JobName"] for job in jobs] == names
    code, listed, told = finished(telescope(slurm, jobs[0].temporary, "runs", "list", str(jobs[0].directory.path.parent)))
    assert code == 0, told
    table = [line.split() for line in listed.split("\n\n")[1].splitlines()[1:5]]
    assert sorted((line[0], line[-1]) for line in table) == [(str(point), f"seed={point}") for point in range(4)]
    assert all(math.isfinite(float(line[2])) for line in table), listed


def test_what_sbatch_refuses_leaves_nothing_and_can_be_submitted_again(slurm: Slurm, submit: Submit, tmp_path: Path):
    (tmp_path / "temporary").mkdir()
    words = ("run", f'run_dir="{tmp_path}/a run"', "cluster=slurm", *SMALL, "cluster.slurm.partition=nowhere")
    code, _, told = finished(telescope(slurm, tmp_path / "temporary", *words))
    assert code == 1
    assert "sbatch refused the job" in told
    assert "invalid partition" in told.lower()
    assert not (tmp_path / "a run").exists()
    assert slurm.client("squeue", "--noheader") == ""
    (job,) = submit(slurm, *SMALL)
    assert job.until_ended().why == "done"


@pytest.mark.parametrize("tracking", ["slurm", "plain_slurm"])
def test_nothing_is_left_after_scancel(tracking: str, submit: Submit, request: pytest.FixtureRequest):
    slurm = request.getfixturevalue(tracking)
    (job,) = submit(slurm, *LONG, "cluster.slurm.nodes=2")
    job.until_under_way()
    assert set(job.processes()) == {"orchestrator", "worker-0", "server-0", "server-1", "trainer-0"}
    slurm.client("scancel", job.job_id)
    job.until_gone()
    assert job.left() == []
    assert len(job.attempts) == 1
    assert describe_state(look(job.directory), {job.job_id: QueuedJob("CANCELLED")}) == "cancelled"


def test_before_the_walltime_the_run_saves_its_step_is_queued_again_and_goes_on(slurm: Slurm, submit: Submit):
    (job,) = submit(slurm, *LONG, "checkpoint.every=1000000")
    job.until_under_way()
    job.until(lambda: (read_object(job.directory.status_json).get("step") or 0) >= 1, "a step is trained")
    run_id = read_identity(job.directory).run_id
    slurm.client("scancel", "--batch", "--signal=USR2", job.job_id)  # what B:USR2@180 does
    ended = job.until_ended()
    assert (ended.why, ended.exit_code, ended.requeued) == ("walltime", 75, True)
    job.until_under_way(attempt=2)
    earlier = RunDirectory(job.directory.earlier_attempt(1))
    saved = read_lineage(job.directory).step
    assert saved >= 1
    assert summary(earlier)["exit_reason"] == f"walltime; the checkpoint of step {saved} is complete"
    assert read_object(job.directory.status_json)["step"] >= saved
    assert earlier.log("trainer-0").exists()
    assert job.directory.log("trainer-0").exists()
    identity = read_identity(job.directory)
    assert (identity.run_id, identity.attempt) == (run_id, f"{job.job_id}.1")
    slurm.client("scancel", job.job_id)
    job.until_gone()
    assert job.left() == []


def test_a_preempted_run_comes_back(slurm: Slurm, submit: Submit):
    (job,) = submit(slurm, *LONG)
    job.until_under_way()
    urgent = slurm.sbatch("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=true")
    job.until(lambda: slurm.job(urgent).get("JobState") == "COMPLETED", "the urgent job done")
    job.until_under_way(attempt=2)
    assert (job.attempts[0].why, job.attempts[0].requeued) == ("preempted", True)
    assert job.attempts[1].attempt == f"{job.job_id}.1"
    slurm.client("scancel", job.job_id)
    job.until_gone()
    assert job.left() == []


def test_a_run_whose_step_is_killed_under_its_trainer_is_queued_again(slurm: Slurm, submit: Submit):
    (job,) = submit(slurm, *LONG, "cluster.slurm.nodes=2")
    job.until_under_way()
    step_daemon(job.processes()["trainer-0"]).send_signal(signal.SIGKILL)
    ended = job.until_ended()
    assert (ended.why, ended.requeued) == ("node_failed", True)
    job.until_under_way(attempt=2)
    slurm.client("scancel", job.job_id)
    job.until_gone()
    assert job.left() == []


def test_a_server_whose_step_is_killed_is_started_again_and_the_run_goes_on(slurm: Slurm, submit: Submit):
    (job,) = submit(slurm, *LONG, "cluster.slurm.nodes=2")
    job.until_under_way()
    before = job.processes()["server-0"]
    step_daemon(before).send_signal(signal.SIGKILL)
    job.until(lambda: job.processes().get("server-0", before) != before, "server-0 started again")
    assert len(job.attempts) == 1
    assert not job.attempts[0].why
    slurm.client("scancel", job.job_id)
    job.until_gone()
    assert job.left() == []


def test_a_checkout_sweeps_too(slurm: Slurm, submit: Submit):
    """Batch process, shims and everything below them find the checkout that the command was given in."""
    jobs = submit(slurm, "-m", *LONG, "seed=0,1", "cluster.slurm.nodes=1", python=sys.executable, cwd=ROOT)
    for job in jobs:
        job.until_under_way()
        assert interpreters(job) == {sys.executable}
        slurm.client("scancel", job.job_id)
    for job in jobs:
        job.until_gone()
        assert job.left() == []


def test_the_real_trainer_and_the_real_engine_train_in_a_job(slurm: Slurm, submit: Submit):
    (job,) = submit(
        slurm,
        *("model=tiny", "number_of_steps=2", "orchestrator.prompts_batch_size_for_trainer=4", "rollout.group_size=4"),
        *("rollout.max_tokens=16", "inference.max_model_len=256", "trainer.seq_len=256", "logging.use_wandb=false"),
        *("cluster.slurm.cpus_per_node=4", "cluster.slurm.inference={nodes: 1}", "cluster.slurm.groups=allocation"),
        *("cluster.device=cpu", "cluster.inference_num_workers=1", "cluster.trainer_num_workers=2"),
        *("cluster.inference_cpus_per_worker=0.5", "cluster.trainer_cpus_per_worker=0.5"),
    )
    job.until(lambda: bool(job.attempts and job.attempts[0].why), "ended", limit_s=500.0)
    assert job.attempts[0].why == "done", job.told()
    assert summary(job.directory)["steps"] == 2
    job.until_gone()
    assert read_submission(job.directory).job_id == job.job_id
    assert job.left() == []


def test_stop_saves_the_step_under_way_and_one_of_two_resumes_at_once_is_refused(slurm: Slurm, submit: Submit):
    (job,) = submit(slurm, *LONG, "checkpoint.every=1000000", python=sys.executable, cwd=ROOT)
    job.until_under_way()
    job.until(lambda: (read_object(job.directory.status_json).get("step") or 0) >= 1, "a step is trained")
    runs = functools.partial(telescope, slurm, job.temporary, "runs")
    path, later = str(job.directory.path), 'cluster.slurm.sbatch=["--begin=now+1hour"]'
    code, out, err = finished(runs("stop", path, "--timeout", "150"))
    assert (code, out) == (0, f"{path} has ended.\n"), err
    attempt = job.attempts[0]
    assert (attempt.why, attempt.exit_code, attempt.requeued) == ("cancelled", 75, False)
    assert summary(job.directory)["exit_reason"].endswith("is complete")
    job.until_gone()
    both = [finished(each) for each in [runs("resume", path, later), runs("resume", path, later)]]
    assert sorted(code for code, _, _ in both) == [0, 1], both
    assert len(slurm.client("squeue", "--noheader").splitlines()) == 1
    assert "pending: BeginTime" in finished(runs("list", path))[1]
    code, _, err = finished(runs("resume", path))
    assert code == 1
    assert "in Slurm, which is PENDING" in err
    assert "is cancelled" in finished(runs("stop", path))[1]
