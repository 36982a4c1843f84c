"""What sbatch would read, to the line; and what a job makes of the nodes that it gets. No Slurm needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from telescope._launch.process_plan import PlanError
from telescope._launch.slurm import hold
from telescope._launch.slurm.allocation import AllocatedNode, expand, list_nominal_nodes, make_hosts, read_allocation
from telescope._launch.slurm.batch_job import make_srun_command
from telescope._launch.slurm.submit import SubmitRefused, render_script, submit
from telescope.cli import runs
from telescope.cli.half_done import HalfDone
from telescope.cli.runs import run_status
from telescope.config.run import dump_run, load_run
from telescope.config.slurm import SlurmGroup, SlurmSettings, minutes_of
from telescope.runlog.attempts import begin, end, read_attempts, read_submission
from telescope.runlog.identity import new_identity, write_identity
from telescope.runlog.layout import RunDirectory
from telescope.runlog.opening import look

ROOT = Path(__file__).resolve().parents[2]
FULL = SlurmSettings(
    nodes=2,
    gpus_per_node=4,
    cpus_per_node=32,
    mem="200G",
    time="1-12:00:00",
    partition="gpu",
    account="ours",
    qos="high",
    constraint="h100",
    exclude="n[3-5]",
    stop_before_s=300,
    array_parallelism=4,
    setup=("module load cuda",),
    sbatch=("--mail-type=END", "--exclusive"),
)


def lines(settings: SlurmSettings, folder: Path, points: int = 1) -> list[str]:
    """The file's lines that sbatch or the shell acts on; our way to the code left out."""
    text = render_script(settings, name="tiny-grpo", folder=folder, points=points)
    kept = (line for line in text.splitlines() if line and not line.startswith(("# ", "export PYTHONPATH")))
    return [line.replace(str(folder), "FOLDER").replace(sys.executable, "PYTHON") for line in kept]


def test_a_job_asks_for_what_its_settings_say(tmp_path: Path):
    assert lines(FULL, tmp_path) == [
        "#!/bin/bash",
        "#SBATCH --account=ours",
        "#SBATCH --constraint=h100",
        "#SBATCH --cpus-per-task=32",
        "#SBATCH --exclude='n[3-5]'",
        "#SBATCH --exclusive",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --job-name=tiny-grpo",
        "#SBATCH --mail-type=END",
        "#SBATCH --mem=200G",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=FOLDER/%j_0_log.out",
        "#SBATCH --partition=gpu",
        "#SBATCH --qos=high",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:USR2@300",
        "#SBATCH --time=2160",
        "trap 'export TELESCOPE_WARNED=1' USR2",
        "module load cuda",
        "trap '' USR2",
        "export SUBMITIT_EXECUTOR=slurm",
        f"exec PYTHON -I -S {hold.__file__} -u -m submitit.core._submit FOLDER",
    ]


STARTED = """
import json, os, signal
blocked = signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
os.kill(os.getpid(), signal.SIGUSR2)
from telescope._launch.slurm.batch_job import _listen_for_warnings
print(json.dumps([blocked, "TELESCOPE_WARNED" in os.environ, _listen_for_warnings()]))
"""


@pytest.mark.parametrize("during_setup", [False, True])
def test_a_warning_before_there_is_anybody_to_hear_it_is_kept(tmp_path: Path, during_setup: bool):
    """It comes while the shell is at its setup lines, and again while the interpreter imports what it needs."""
    stand_in = tmp_path / "modules" / "submitit" / "core"
    stand_in.mkdir(parents=True)
    (stand_in / "_submit.py").write_text(STARTED)
    for folder in (stand_in, stand_in.parent):
        (folder / "__init__.py").touch()
    settings = SlurmSettings(setup=("kill -USR2 $$",) if during_setup else ())
    script = tmp_path / "script"
    script.write_text(render_script(settings, name="x", folder=tmp_path / "a folder"))
    found_first = stand_in.parent.parent
    done = subprocess.run(["bash", script], cwd=found_first, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    number = int(signal.SIGUSR2)
    assert json.loads(done.stdout) == [True, during_setup, [number] * (1 + during_setup)]


def test_a_sweep_is_an_array_with_a_throttle(tmp_path: Path):
    text = lines(FULL, tmp_path, points=12)
    assert "#SBATCH --array=0-11%4" in text
    assert "#SBATCH --output=FOLDER/%A_%a_0_log.out" in text
    assert not any("--array" in line for line in lines(FULL, tmp_path))


def test_a_second_component_opens_with_hetjob_before_any_command(tmp_path: Path):
    group = SlurmGroup(nodes=3, gpus_per_node=8, partition="inference")
    text = lines(FULL.model_copy(update={"inference": group}), tmp_path)
    start = text.index("#SBATCH hetjob")
    assert text[start : start + 12] == [
        "#SBATCH hetjob",
        "#SBATCH --nodes=3",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=32",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --mem=200G",
        "#SBATCH --time=2160",
        "#SBATCH --partition=inference",
        "#SBATCH --account=ours",
        "#SBATCH --qos=high",
        "#SBATCH --constraint=h100",
        "#SBATCH --exclude='n[3-5]'",
    ]
    assert all(line.startswith("#") for line in text[:start])
    assert "#SBATCH --nodes=2" in text[:start]


def test_two_groups_in_one_allocation_are_one_request(tmp_path: Path):
    text = lines(FULL.model_copy(update={"inference": SlurmGroup(nodes=3), "groups": "allocation"}), tmp_path)
    assert "#SBATCH --nodes=5" in text
    assert "#SBATCH hetjob" not in text


def test_without_requeue_slurm_is_told_so(tmp_path: Path):
    text = lines(SlurmSettings(requeue=False), tmp_path)
    assert "#SBATCH --no-requeue" in text
    assert "#SBATCH --requeue" not in text


def test_an_array_of_hetjobs_is_refused_because_slurm_has_none(tmp_path: Path):
    runs = [RunDirectory.create(tmp_path / name) for name in "ab"]
    settings = SlurmSettings(inference=SlurmGroup())
    with pytest.raises(SubmitRefused, match=r"cluster\.slurm\.groups=allocation"):
        submit(runs, settings, name="x", folder=tmp_path / "slurm", dry_run=True)


@pytest.mark.parametrize(
    ("text", "minutes"), [("90", 90), ("0:30", 1), ("1:30:00", 90), ("1-12", 2160), ("2-0:30", 2910), ("1-00:00:01", 1441)]
)
def test_times_are_read_as_slurm_reads_them(text: str, minutes: int):
    assert minutes_of(text) == minutes


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"time": "tomorrow"}, "must be minutes"),
        ({"time": "0"}, "is not a time"),
        ({"time": "2", "stop_before_s": 120}, "told to stop as it starts"),
        ({"mem": "much"}, "end in K, M, G or T"),
        ({"sbatch": ("--array=1-3",)}, "the launcher writes itself"),
        ({"sbatch": ("mail",)}, "must begin with a dash"),
        ({"sbatch": ("-o here.txt",)}, "write it in its long form"),
        ({"sbatch": ("--output=here.txt",)}, "the launcher writes itself"),
        ({"groups": "allocation", "inference": SlurmGroup(partition="other")}, "asks for equal nodes"),
    ],
)
def test_settings_that_slurm_would_refuse_are_refused_here(wrong: dict[str, object], said: str):
    with pytest.raises(ValidationError, match=said):
        SlurmSettings(**wrong)


def test_node_lists_are_spelled_out():
    assert expand("n[1-3,7],login") == ["n1", "n2", "n3", "n7", "login"]
    assert expand("r[0-1]c[08-10]") == ["r0c08", "r0c09", "r0c10", "r1c08", "r1c09", "r1c10"]


def test_a_hetjobs_groups_are_its_components():
    settings = SlurmSettings(nodes=1, gpus_per_node=2, cpus_per_node=4, inference=SlurmGroup(nodes=2, gpus_per_node=8))
    variables = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "g[1-2]"}
    found = read_allocation(settings, {**variables, "SLURM_RESTART_COUNT": "3"})
    assert found.attempt == "12.3"
    assert found.nodes == (
        *(AllocatedNode("n1", "trainer", 0, 4, 2), AllocatedNode("g1", "inference", 1, 4, 8)),
        AllocatedNode("g2", "inference", 1, 4, 8),
    )


def test_in_one_allocation_inference_has_the_last_nodes():
    settings = SlurmSettings(nodes=2, inference=SlurmGroup(nodes=1), groups="allocation")
    variables = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NODELIST": "n[1-3]"}
    found = read_allocation(settings, variables)
    assert (found.job_id, found.attempt) == ("7_2", "7_2.0")
    assert [(node.name, node.group) for node in found.nodes] == [("n1", "trainer"), ("n2", "trainer"), ("n3", "inference")]


def test_fewer_nodes_than_asked_for_are_refused_with_the_numbers():
    with pytest.raises(PlanError, match=r"gave 1 nodes \(n1\) and the run asks for 2"):
        read_allocation(SlurmSettings(nodes=2), {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1"})
    with pytest.raises(PlanError, match="SLURM_JOB_ID is not set"):
        read_allocation(SlurmSettings(), {})


def test_hosts_keep_their_side():
    settings = SlurmSettings(nodes=1, gpus_per_node=2, inference=SlurmGroup(nodes=1, gpus_per_node=4))
    hosts = make_hosts(list_nominal_nodes(settings), {"node-0": ("10.0.0.1", "eth0")})
    assert [(host.kept_for, host.gpus, host.address, host.interface) for host in hosts] == [
        ("trainer", ("0", "1"), "10.0.0.1", "eth0"),
        ("inference", ("0", "1", "2", "3"), "127.0.0.1", "lo"),
    ]


def test_a_step_names_its_component_and_its_node_and_shares_it():
    settings = SlurmSettings(srun=("--container-image=ours",))
    command = make_srun_command(settings, AllocatedNode("g1", "inference", 1, 16, 8), "server-0")
    assert command[:6] == ("srun", "--het-group=1", "--nodes=1", "--ntasks=1", "--nodelist=g1", "--overlap")
    assert "--cpus-per-task=16" in command
    assert command[-1] == "--container-image=ours"
    assert "--het-group=1" not in make_srun_command(settings, AllocatedNode("n1", None, None, 16, 8), "server-0")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "telescope.run", *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=100, check=False)


def test_a_dry_run_writes_the_batch_file_and_submits_nothing(tmp_path: Path):
    done = run("-m", "experiment=fake", "cluster=slurm", "cluster.dry_run=true", "seed=0,1", f"run_dir={tmp_path}/sweep")
    assert done.returncode == 0, done.stderr
    script = tmp_path / "sweep" / "slurm" / "submission.sh"
    assert "#SBATCH --array=0-1%2" in script.read_text().splitlines()
    assert script.parent.stat().st_mode & 0o777 == 0o700
    for point in ("000_seed-0", "001_seed-1"):
        directory = RunDirectory(tmp_path / "sweep" / point)
        assert (read_submission(directory).job_id, read_submission(directory).script) == ("", str(script))
        assert directory.plan_json.exists()
        assert load_run(directory.config_json).logging.wandb_group == "sweep"  # of all its points


def test_a_run_that_does_not_fit_its_nodes_is_refused_before_it_is_submitted(tmp_path: Path):
    done = run(
        *("experiment=fake", "cluster=slurm", "cluster.slurm.gpus_per_node=1", "cluster.slurm.inference={nodes: 1}"),
        "cluster.device=gpu",
        *("cluster.inference_num_workers=2", "cluster.trainer_num_workers=1", f"run_dir={tmp_path}/run"),
    )
    assert done.returncode == 1
    assert "2 servers of 1 GPU (cluster.inference_placement=PACK) do not fit on 1 host (inference-node-0 with 1)" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_sweep_of_hetjobs_is_refused_before_any_directory_is_made(tmp_path: Path):
    done = run(
        *("-m", "experiment=fake", "cluster=slurm", "cluster.slurm.inference={nodes: 1}", "seed=0,1", "cluster.dry_run=true"),
        f"run_dir={tmp_path}/sweep",
    )
    assert done.returncode == 1
    assert "Slurm has no arrays of heterogeneous jobs" in done.stderr
    assert not (tmp_path / "sweep").exists()


def slurm_that_accepts_once(folder: Path) -> str:
    """PATH with an sbatch that accepts one submission as job 12 and refuses all others."""
    folder.mkdir()
    sbatch = f"mkdir {folder}/accepted 2>/dev/null && echo Submitted batch job 12 || {{ echo no such partition >&2; exit 1; }}"
    for name, does in {"sbatch": sbatch, "srun": "true"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o700)
    return f"{folder}:{os.environ['PATH']}"


SWEEP = ("-m", "experiment=fake", "cluster=slurm", "seed=0,1", "cluster.slurm.partition=a,b")


def told_of(sweep: Path) -> list[tuple[str, int | None, str]]:
    points = json.loads((sweep / "sweep.json").read_text())["points"]
    return [(point["job"], point["exit_code"], point["reason"][:13]) for point in points]


def test_jobs_that_were_accepted_before_a_refusal_are_told(tmp_path: Path):
    done = run(*SWEEP, f"run_dir={tmp_path}/sweep", PATH=slurm_that_accepts_once(tmp_path / "bin"))
    assert done.returncode == 1, done.stderr
    assert "no such partition" in done.stderr
    assert "2 jobs were submitted before: 12_0, 12_1 (" in done.stderr
    assert "Nothing was submitted" not in done.stderr
    told = told_of(tmp_path / "sweep")
    assert [told[0], told[2]] == [("12_0", None, "submitted"), ("12_1", None, "submitted")]
    assert [told[1], told[3]] == [("", 1, "not submitted"), ("", 1, "not submitted")]


def test_a_point_whose_directory_could_not_be_made_is_not_called_submitted(tmp_path: Path):
    in_the_way = tmp_path / "sweep" / "001_seed-0_partition-b" / "something"
    in_the_way.mkdir(parents=True)
    done = run(*SWEEP, f"run_dir={tmp_path}/sweep", PATH=slurm_that_accepts_once(tmp_path / "bin"))
    assert done.returncode == 1, done.stderr
    told = told_of(tmp_path / "sweep")
    assert [told[0], told[2]] == [("12_0", None, "submitted"), ("12_1", None, "submitted")]
    assert [told[1], told[3]] == [("", 1, "not submitted"), ("", 1, "not submitted")]


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_job_whose_files_could_not_be_written_after_it_was_accepted_is_taken_back_by_its_number(
    tmp_path: Path, cancelled: bool
):
    """sbatch has given a number, and submitit can then not put the job's pickle in its place."""
    folder = tmp_path / "run" / "slurm"
    path = slurm_that_accepts_once(tmp_path / "bin")
    sbatch, scancel = tmp_path / "bin" / "sbatch", tmp_path / "bin" / "scancel"
    sbatch.write_text(f"#!/bin/sh\nmkdir -p {folder}/12_submission.sh/in-the-way\necho Submitted batch job 12\n")
    scancel.write_text(f"#!/bin/sh\necho $* > {tmp_path}/cancelled\nexit {int(not cancelled)}\n")
    scancel.chmod(0o700)
    done = run("experiment=fake", "cluster=slurm", f"run_dir={tmp_path}/run", PATH=path)
    assert done.returncode == 1
    assert "Slurm accepted job 12, " in done.stderr
    assert ("it was cancelled" if cancelled else "could not be taken back") in done.stderr
    assert cancelled or ": scancel 12\n" in done.stderr
    assert (tmp_path / "cancelled").read_text() == "12\n"


def test_a_job_that_can_not_be_noted_stays_queued_and_is_told(tmp_path: Path):
    path = slurm_that_accepts_once(tmp_path / "bin")
    with (tmp_path / "bin" / "sbatch").open("a") as sbatch:
        sbatch.write(f"mkdir {tmp_path}/run/slurm.json\n")
    done = run("experiment=fake", "cluster=slurm", f"run_dir={tmp_path}/run", PATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"job 12: run directory {tmp_path}/run\n"
    assert f"Warning: job 12 is queued, but {tmp_path}/run/slurm.json can't be written" in done.stderr
    assert "`scancel 12` takes it back" in done.stderr


BATCH = "import sys; from telescope._launch.slurm.batch_job import run; run(sys.argv[1])"


def attempted(directory: RunDirectory, **variables: str) -> subprocess.CompletedProcess[str]:
    """What the job 12 does on node n1, or on those that `variables` say."""
    environment = {**os.environ, "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n1", **variables}
    command = [sys.executable, "-c", BATCH, str(directory.path)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_an_attempt_that_is_refused_before_its_start_is_listed_as_failed_with_the_reason(tmp_path: Path):
    done = run("experiment=fake", "cluster=slurm", "cluster.dry_run=true", f"run_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    directory = RunDirectory(tmp_path / "run")
    assert attempted(directory, SLURM_JOB_NODELIST="n[1-2]").returncode == 1
    found = run_status(look(directory))
    assert (found.state, found.reason) == ("failed", "Slurm gave 2 nodes (n1, n2) and the run asks for 1: submit it again")
    directory.config_json.write_text("{}")
    assert attempted(directory, SLURM_RESTART_COUNT="1").returncode == 1
    found = run_status(look(directory))
    assert (found.state, found.reason.partition(" is not ")[2]) == ("failed", "the configuration of a run in format 1")
    assert [(one.attempt, one.why, one.exit_code) for one in read_attempts(directory)] == [
        ("12.0", "failed", 1),
        ("12.1", "failed", 1),
    ]
    assert "Slurm gave 2 nodes" in RunDirectory(directory.earlier_attempt(1)).run_failure.read_text()


def test_what_the_nodes_that_are_asked_for_can_not_do_is_refused_here_and_in_the_job(tmp_path: Path):
    """One node without a GPU: on the login node before anything is submitted, in the job where its settings were changed."""
    settings = ("experiment=fake", "cluster=slurm", "cluster.dry_run=true", f"run_dir={tmp_path}/run")
    sentence = "weight_sync.transport=nccl needs GPUs, and this run is on CPUs: set weight_sync.transport=auto"
    done = run(*settings, "weight_sync.transport=nccl")
    assert (done.returncode, f"{sentence}\nNothing was started." in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "run").exists()
    assert run(*settings).returncode == 0
    directory = RunDirectory(tmp_path / "run")
    config = load_run(directory.config_json)
    nccl = config.weight_sync.model_copy(update={"transport": "nccl"})
    directory.config_json.write_text(dump_run(config.model_copy(update={"weight_sync": nccl})))
    assert attempted(directory).returncode == 1
    assert run_status(look(directory)).reason == sentence


def test_a_job_that_was_not_noted_when_it_was_submitted_notes_itself(tmp_path: Path):
    done = run("experiment=fake", "cluster=slurm", "cluster.dry_run=true", f"run_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    directory = RunDirectory(tmp_path / "run")
    directory.slurm_json.unlink()
    assert attempted(directory, SLURM_JOB_NODELIST="n[1-2]", SUBMITIT_FOLDER=str(tmp_path)).returncode == 1
    noted = read_submission(directory)
    assert (noted.job_id, noted.script) == ("12", str(tmp_path / "12_submission.sh"))


def test_the_job_of_a_run_that_is_done_does_not_begin_it_again(tmp_path: Path):
    directory = RunDirectory.create(tmp_path / "run")
    write_identity(directory, new_identity("x", datetime.now(UTC), "0" * 16))
    end(directory, begin(directory, "12", "12.0", ("n1",)), "done", 0, requeued=False)
    directory.exit_json.write_text('{"exit_code": 0}')
    done = attempted(directory, SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    assert len(read_attempts(directory)) == 1
    assert run_status(look(directory)).state == "done"


def test_the_preset_has_every_setting_with_its_default():
    written = yaml.safe_load((ROOT / "conf" / "cluster" / "slurm.yaml").read_text())["slurm"]
    assert SlurmSettings.model_validate_json(json.dumps(written), strict=True) == SlurmSettings()
    assert set(written) == set(SlurmSettings.model_fields)


@pytest.mark.parametrize("there", [False, True])
def test_a_submission_that_sbatch_refuses_leaves_the_place_as_it_was(tmp_path: Path, there: bool):
    path = slurm_that_accepts_once(tmp_path / "bin")
    (tmp_path / "bin" / "accepted").mkdir()
    if there:
        (tmp_path / "run").mkdir()
    done = run("experiment=fake", "cluster=slurm", f"run_dir={tmp_path}/run", PATH=path)
    assert done.returncode == 1
    assert "sbatch refused the job" in done.stderr
    assert (tmp_path / "run").exists() is there
    assert not there or list((tmp_path / "run").iterdir()) == []
    (tmp_path / "bin" / "accepted").rmdir()
    assert run("experiment=fake", "cluster=slurm", f"run_dir={tmp_path}/run", PATH=path).returncode == 0


def test_a_further_attempt_that_sbatch_refuses_leaves_the_settings_of_the_one_before(tmp_path: Path):
    directory = RunDirectory(tmp_path / "run")
    made = run("experiment=fake", "cluster=slurm", "cluster.dry_run=true", "checkpoint.every=2", f"run_dir={directory.path}")
    assert made.returncode == 0, made.stderr
    half = HalfDone(directory.path)
    before = {path: path.read_bytes() for path in (directory.config_json, directory.run_json, directory.cmdline)}
    for path in before:
        path.write_text("of the attempt that was refused")
    half.take_back()
    assert {path: path.read_bytes() for path in before} == before


def test_numbers_are_taken_as_slurms_users_mean_them_or_refused_with_what_to_type():
    taken = SlurmSettings.model_validate_json('{"time": 10, "mem": 2000, "account": 12345}')
    assert (taken.time, taken.minutes, taken.mem, taken.account) == ("10", 10, "2000", "12345")
    for yaml_text, as_minutes, as_yaml in (
        ("24:00:00", '"60-00:00:00" for 86400 minutes', '"24:00:00"'),
        ("1440", '"1-00:00:00" for 1440 minutes', '"24:00"'),
        ("90", '"01:30:00" for 90 minutes', '"1:30"'),
    ):
        with pytest.raises(ValidationError) as refused:
            SlurmSettings.model_validate_json(json.dumps({"time": yaml.safe_load(yaml_text)}))
        assert f"write {as_minutes}, or {as_yaml}" in str(refused.value)


def test_an_option_in_a_list_works_as_the_refusal_prints_it(tmp_path: Path):
    dry = ("experiment=fake", "cluster=slurm", "cluster.dry_run=true", f"run_dir={tmp_path}/run")
    refused = run(*dry, "cluster.slurm.sbatch=[--export=NONE]")
    assert refused.returncode == 2
    printed = """'cluster.slurm.sbatch=["--export=NONE"]'"""
    assert printed in refused.stderr
    assert printed in (ROOT / "docs" / "slurm.md").read_text()
    done = run(*dry, printed.strip("'"))
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --export=NONE" in (tmp_path / "run/slurm/submission.sh").read_text().splitlines()


def test_a_sweep_in_slurm_gets_its_table_from_its_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    done = run(
        "-m",
        "experiment=fake",
        "cluster=slurm",
        "seed=0,1",
        f"run_dir={tmp_path}/s",
        PATH=slurm_that_accepts_once(tmp_path / "bin"),
    )
    assert done.returncode == 0, done.stderr
    ended = RunDirectory(tmp_path / "s" / "000_seed-0")
    ended.exit_json.write_text('{"exit_code": 0}')
    ended.summary_json.write_text('{"reward_policy_last": 0.75, "policy_last": {"rollouts": 8}, "exit_reason": "done"}')
    assert runs.main(["list", str(tmp_path / "s")]) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [line.split()[:3] for line in table[1:3]] == [["0", "0", "0.75"], ["1", "-", "-"]]
    assert [line.split()[3:] for line in table[1:3]] == [["8", "seed=0"], ["-", "seed=1"]]


def interrupting(folder: Path, then: str) -> str:
    """PATH with an sbatch during which a Ctrl-C comes; it is called once at most."""
    path = slurm_that_accepts_once(folder)
    (folder / "sbatch").write_text(f"#!/bin/sh\nkill -INT $PPID\nmkdir {folder}/called || exit 9\n{then}\n")
    return path


def test_a_ctrl_c_while_sbatch_is_called_tells_the_job_that_it_has_queued(tmp_path: Path):
    path = interrupting(tmp_path / "bin", "sleep 0.3; echo Submitted batch job 12")
    done = run(*SWEEP, f"run_dir={tmp_path}/sweep", PATH=path)
    assert done.returncode == 130, done.stderr
    assert "2 jobs were submitted before: 12_0, 12_1 (`scancel 12_0 12_1` takes back what is not wanted)." in done.stderr
    names = sorted(one.name for one in (tmp_path / "sweep").iterdir() if one.is_dir())
    assert names == ["000_seed-0_partition-a", "002_seed-1_partition-a", "slurm"]
    told = told_of(tmp_path / "sweep")
    assert [told[0], told[2]] == [("12_0", None, "submitted"), ("12_1", None, "submitted")]
    assert [told[1], told[3]] == [("", 1, "not submitted"), ("", 1, "not submitted")]


def test_a_ctrl_c_that_ends_sbatch_too_leaves_nothing(tmp_path: Path):
    done = run(
        "experiment=fake", "cluster=slurm", f"run_dir={tmp_path}/run", PATH=interrupting(tmp_path / "bin", "kill -INT $$")
    )
    assert done.returncode == 130, done.stderr
    assert "Nothing was submitted." in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_points_of_an_array_are_named_by_what_was_swept_and_a_job_alone_too(tmp_path: Path):
    """One array has one name until its points begin; where Slurm does not take theirs they keep it."""
    path = slurm_that_accepts_once(tmp_path / "bin")
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/asked\n")
    scontrol.chmod(0o700)
    done = run("-m", "experiment=fake", "cluster=slurm", "seed=0,1", f"run_dir={tmp_path}/s", PATH=path)
    assert done.returncode == 0, done.stderr
    point = RunDirectory(tmp_path / "s" / "001_seed-1")
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
    attempted(point, PATH=path, **array)
    assert (tmp_path / "asked").read_text().splitlines()[0] == "update JobId=12_1 JobName=001_seed-1"
    lonely = ("cluster.slurm.partition=a,b", "cluster.dry_run=true", f"run_dir={tmp_path}/t")
    assert run("-m", "experiment=fake", "cluster=slurm", *lonely).returncode == 0
    assert "#SBATCH --job-name=001_partition-b" in (tmp_path / "t/slurm/submission.sh").read_text().splitlines()
