"""`python -m telescope.run` as a user meets it, in an empty working directory; in a process of its own where that matters."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import hydra
import pytest
import yaml

from telescope.cli import run, start
from telescope.config.run import config_hash, load_run
from telescope.runlog.layout import RunDirectory
from tests.config.conftest import compose_one, write

ROOT = Path(__file__).parents[2]


@dataclass
class Shown:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def telescope(tmp_path, monkeypatch, capsys):
    """Calls the command line in this process; `tmp_path` is the working directory."""

    def call(*arguments: str) -> Shown:
        monkeypatch.chdir(tmp_path)
        try:
            code = run.main(arguments)
        except SystemExit as ended:
            code = ended.code
        return Shown(code, *capsys.readouterr())

    return call


def in_a_process(code: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.check_output([sys.executable, "-c", code], cwd=cwd, env=environment, text=True, timeout=60)


def test_help_names_groups_options_and_where_to_read_on(telescope, tmp_path):
    shown = telescope("--help")
    assert shown.returncode == 0
    for word in ("algorithm", "cispo", "grpo*", "env", "countdown*", "--config-dir", "docs/settings/", "Exit codes"):
        assert word in shown.stdout
    assert list(tmp_path.iterdir()) == []


def test_help_costs_less_than_one_and_a_half_seconds_of_processor(tmp_path):
    """Processor seconds, which a busy machine does not stretch as it does the wall clock; the best of five."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'telescope.run', '--help'], stdout=subprocess.DEVNULL, check=True)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\nprint(used.ru_utime + used.ru_stime)"
    )
    assert any(float(in_a_process(code, tmp_path)) < 1.5 for _ in range(5))


def test_neither_help_nor_composing_imports_torch(tmp_path):
    code = (
        "import contextlib, io, sys\nfrom telescope.run import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    assert main(['--help']) == 0\n    assert main(['--cfg', 'job']) == 0\n"
        "print({'torch', 'transformers', 'vllm', 'zmq', 'pyarrow', 'wandb'} & set(sys.modules))"
    )
    assert in_a_process(code, tmp_path) == "set()\n"


def test_the_module_ends_with_the_exit_code_and_writes_to_stderr(tmp_path):
    command = [sys.executable, "-m", "telescope.run", "seed=x"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert "seed='x' must be a whole number" in shown.stderr


def test_cfg_job_prints_the_configuration_and_writes_nothing(telescope, tmp_path):
    shown = telescope("--cfg", "job", "algorithm=cispo", "algorithm.clip_high=0.3")
    assert shown.returncode == 0
    assert yaml.safe_load(shown.stdout)["algorithm"]["clip_high"] == 0.3
    assert list(tmp_path.iterdir()) == []


def test_cfg_job_with_resolve_prints_what_the_processes_would_get(telescope, tmp_path):
    shown = telescope("--cfg", "job", "--resolve")
    config = compose_one().config
    assert shown.stdout.startswith(f"# hash {config_hash(config)}\n")
    assert yaml.safe_load(shown.stdout)["environments"]["countdown"]["kwargs"] == config.environments["countdown"].kwargs


def test_cfg_shows_hydras_own_configuration_or_both(telescope):
    own = yaml.safe_load(telescope("--cfg", "hydra", "seed=3").stdout)
    assert list(own) == ["hydra"]
    assert "++seed=3" in own["hydra"]["overrides"]["task"]
    both = yaml.safe_load(telescope("--cfg", "all", "seed=3").stdout)
    assert (both["seed"], both["hydra"]["job"]["config_name"]) == (3, "run")


def test_package_shows_a_part(telescope):
    shown = telescope("--cfg", "job", "--package", "trainer", "trainer.grad_clip=2")
    assert shown.stdout.startswith("# @package trainer\nlearning_rate: 0.00015\n")
    assert yaml.safe_load(shown.stdout)["grad_clip"] == 2
    assert telescope("--cfg", "job", "-p", "seed").stdout == "# @package seed\n0\n"
    resolved = telescope("--cfg", "job", "--resolve", "--package", "environments.countdown", "env=countdown")
    assert yaml.safe_load(resolved.stdout)["name"] == "countdown"
    assert telescope("--cfg", "hydra", "--package", "hydra.job").stdout.startswith("# @package hydra.job\n")
    assert telescope("--cfg", "job", "--package", "_global_").stdout == telescope("--cfg", "job").stdout


def test_info_tells_how_a_configuration_comes_about(telescope):
    defaults = telescope("--info", "defaults", "algorithm=cispo")
    assert defaults.returncode == 0
    assert "| algorithm/cispo " in defaults.stdout
    assert f"telescope://{ROOT / 'conf'}" in telescope("--info", "searchpath").stdout
    assert "model_backend: tiny_fsdp" in telescope("--info", "defaults-tree").stdout
    whole = telescope("algorithm=sapo", "--info").stdout
    for part in ("Installed Hydra Plugins", "Config search path", "Defaults Tree", "sapo_tau_neg: 1.05"):
        assert part in whole


def test_version_and_what_of_hydra_works(telescope):
    assert f"Hydra {hydra.__version__}" in telescope("--version").stdout
    text = telescope("--hydra-help").stdout
    for word in ("--info", "--package", "hydra.launcher", "cluster=slurm", "--config-name", str(ROOT / "conf")):
        assert word in text


def test_all_mistakes_are_on_stderr_and_nothing_is_started(telescope, tmp_path):
    shown = telescope("trainer.learning_rat=1", "seed=x")
    assert shown.returncode == 1
    assert shown.stdout == ""
    assert shown.stderr == (
        "The configuration has 2 mistakes:\n"
        "  - seed='x' must be a whole number\n"
        "  - trainer.learning_rat=1: there is no such setting. Did you mean trainer.learning_rate?\n"
        "Nothing was started.\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        *(["algorithm=["], ["--nonsense"], ["seed=1,2"], ["--config-dir", "nowhere"], ["--resolve"], ["--seed=3"]),
        *(["--cfg", "hydra", "--resolve"], ["--package", "trainer"], ["--cfg", "job", "--package", "trainr"]),
        *(["--info", "nothing"], ["--info", "defaults", "-m", "seed=1,2"], ["hydra/launcher=submitit_slurm"]),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(telescope, tmp_path, arguments):
    shown = telescope(*arguments)
    assert shown.returncode == 2
    assert shown.stderr.startswith("telescope.run: ")
    assert len(shown.stderr.splitlines()) == 1


def test_a_sweep_with_wrong_points_starts_none(telescope, tmp_path):
    shown = telescope("-m", "algorithm=grpo,gspo,sapo", "algorithm.use_tis=true")
    assert shown.returncode == 1
    assert shown.stderr.startswith("1 of 3 points are invalid; nothing was started.\nalgorithm=gspo algorithm.use_tis=true\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_is_never_reused(telescope, tmp_path):
    write(tmp_path / "old" / "note.txt", "mine")
    shown = telescope("experiment=fake", "run_dir=old")
    assert shown.returncode == 1
    assert "exists and is not empty; a run directory is never reused" in shown.stderr
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["note.txt"]


def test_a_run_directory_that_can_not_be_made_is_a_sentence(telescope, tmp_path):
    write(tmp_path / "file", "x")
    shown = telescope("experiment=fake", "run_dir=file/below")
    assert shown.returncode == 1
    assert "Traceback" not in shown.stderr
    assert "can't be written: Not a directory" in shown.stderr


def test_what_does_not_fit_the_machine_is_refused_before_the_run_directory_is_made(telescope, tmp_path):
    shown = telescope("cluster.device=gpu", "cluster.inference_num_workers=64", "run_dir=new")
    assert shown.returncode == 1
    assert "need 65 GPUs" in shown.stderr
    assert list(tmp_path.iterdir()) == []


def order_for(*overrides: str) -> start.RunOrder:
    from telescope._launch.hosts.node_identity import NodeIdentity
    from telescope._launch.process_plan import Host, make_plan

    point = compose_one(*overrides)
    config = start.with_name(point.config)
    plan = make_plan(config, (Host("here", cpus=2),))
    return start.RunOrder(config, plan, NodeIdentity(), point.warnings, ("seed=3", "name=a b"), datetime.now().astimezone())


def test_the_run_directory_says_everything_about_the_run_to_its_owner_alone(tmp_path):
    order = order_for("trainer.learning_rate=0")
    directory = RunDirectory.create(tmp_path / "run")
    start.write_down(directory, order)
    assert load_run(directory.config_json) == order.config
    as_yaml = yaml.safe_load(directory.config_yaml.read_text())
    as_json = json.loads(directory.config_json.read_text())
    assert as_yaml == {key: value for key, value in as_json.items() if key not in ("format", "config_hash")}
    about = json.loads(directory.run_json.read_text())
    assert about["config_hash"] == as_json["config_hash"] == config_hash(order.config)
    assert about["warnings"] == ["trainer.learning_rate=0: the weights will not change"]
    assert len(about["run_id"]) == 16
    assert directory.cmdline.read_text() == "python -m telescope.run seed=3 'name=a b'\n"
    for file in (directory.config_json, directory.config_yaml, directory.cmdline, directory.run_json):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_run_is_called_after_model_and_algorithm():
    assert start.with_name(compose_one("algorithm=rloo").config).name == "tiny-rloo"
    assert start.with_name(compose_one("name=mine").config).name == "mine"
    assert start.with_name(compose_one("model=qwen2.5-3b").config).name == "Qwen2.5-3B-grpo"


def test_runs_of_the_same_second_get_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, now = start.with_name(compose_one().config), datetime(2030, 1, 2, 3, 4, 5)
    first = start.run_folder(config, now)
    assert first == tmp_path / "runs" / "2030-01-02_03-04-05_tiny-grpo"
    first.mkdir(parents=True)
    assert start.run_folder(config, now).name == "2030-01-02_03-04-05_tiny-grpo_2"


def test_plan_counts_the_updates_of_a_step(capsys):
    from telescope.cli import plan

    assert plan.main(["model=tiny", "trainer.number_of_minibatches=5"]) == 0
    said = capsys.readouterr().out
    assert "A step makes 5 optimiser updates, each on 6 or 7 groups." in said
    assert "A trained group is at most 9 versions old (49 optimiser updates)" in said


def test_closed_streams_do_not_stop_a_command(tmp_path):
    command = f"exec {sys.executable} -m telescope.run --cfg job 2>&- >{tmp_path / 'out'}"
    assert subprocess.run(["/bin/sh", "-c", command], cwd=ROOT, timeout=60, check=False).returncode == 0
    assert "number_of_steps" in (tmp_path / "out").read_text()
