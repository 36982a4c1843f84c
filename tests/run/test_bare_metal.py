"""Whole runs on several hosts, started as a user does: torchrun, and the plain command; links that are cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from telescope.runlog.layout import RunDirectory
from tests.packaging.test_wheel import python, wheel
from tests.run.hosts import ROOT, Hosts

__all__ = ["python", "wheel"]
MAKE = Callable[..., Hosts]
FAKE = ("experiment=fake", "cluster=bare_metal", "logging.progress=false", "cluster.placement_timeout_s=120")
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[MAKE]:
    made: list[Hosts] = []

    def make(count: int, apart: Path | None = None) -> Hosts:
        made.append(Hosts(count, tmp_path, apart))
        return made[-1]

    yield make
    for each in made:
        each.close()


def plain(hosts: Hosts, host: int, *settings: str) -> None:
    hosts.start(host, "-m", "telescope.run", *FAKE, *settings, f"cluster.node_rank={host}", *hosts.settings(host))


def torchrun(hosts: Hosts, host: int, count: int, *settings: str) -> None:
    where = ("--master-addr", hosts.address(0), "--master-port", str(hosts.port))
    ranks = ("--nnodes", str(count), "--node-rank", str(host), "--nproc-per-node", "1")
    command = ("-m", "telescope.run", *FAKE, *settings, *hosts.settings(host))
    hosts.start(host, "-m", "torch.distributed.run", *where, *ranks, *command)


def summary(run: RunDirectory) -> dict[str, Any]:
    return json.loads(run.summary_json.read_text())


def step(run: RunDirectory) -> int:
    try:
        return json.loads(run.status_json.read_text()).get("step") or 0
    except FileNotFoundError:
        return 0


def test_two_hosts_by_the_plain_command_and_a_key_file(hosts: MAKE, tmp_path: Path) -> None:
    """No file is shared: every host has its own folder by that name. Workers go straight to the servers' own ports."""
    disk = tmp_path / "disk"
    disk.mkdir()
    pair = hosts(2, apart=disk)
    key = tmp_path / "key"
    pair.start(0, "-m", "telescope.run", "--new-key", str(key))
    assert pair.wait(0) == 0
    settings = ("cluster.nodes=2", f"cluster.head={pair.address(0)}:{pair.port}", f"cluster.key_file={key}", "wire.direct=true")
    settings += ("cluster.inference_num_workers=2", "cluster.inference_placement=STRICT_SPREAD", "number_of_steps=2")
    run = disk / "run"
    for host in (1, 0):
        folder = run if pair.real or not host else disk / "elsewhere"
        plain(pair, host, *settings, "cluster.env_num_workers=2", f"run_dir={folder}")
    assert (pair.wait(0), pair.wait(1)) == (0, 0), pair.everything()
    assert summary(RunDirectory(run))["steps"] == 2
    assert {path.name for path in (run / "logs").iterdir()} == {
        "orchestrator.log",
        "server-0.log",
        "trainer-0.log",
        "worker-0.log",
    }
    address = json.loads((run / "wire" / "hub.json").read_text())["endpoint"]
    assert address.startswith(f"tcp://{pair.address(0)}:")
    assert key.read_text().split()[1] not in pair.everything()
    assert pair.left() == []


@pytest.mark.slow
def test_three_hosts_by_torchrun_and_a_link_that_is_cut(hosts: MAKE, python: Path, tmp_path: Path) -> None:
    """They have the installed wheel and share the run directory; a server is on every host. The reason names the node, and all
    processes everywhere end."""
    three = hosts(3)
    three.python, three.cwd = str(python), tmp_path
    run = RunDirectory(tmp_path / "run")
    settings = ("cluster.inference_num_workers=3", "cluster.inference_placement=STRICT_SPREAD", "cluster.env_num_workers=3")
    for host in (2, 0, 1):
        torchrun(three, host, 3, *settings, "number_of_steps=100000", f"run_dir={run.path}", "orchestrator.silent_s=10")
    three.until(lambda: step(run) >= 2, "at step 2")
    three.remember()
    three.cut(2)
    assert three.wait(0) == 1  # torchrun's own exit code for any failure
    three.thaw(2)
    assert (three.wait(1), three.wait(2)) == (1, 1)
    found = json.loads(run.exit_json.read_text())
    assert found["exit_code"] == 70
    assert "node-2" in found["cause"]["sentence"], found
    assert "node-2" in summary(run)["exit_reason"]
    assert three.left() == []


@pytest.mark.slow
def test_trainer_ranks_on_two_hosts_and_weights_over_the_network(hosts: MAKE, tmp_path: Path) -> None:
    """Real training of the tiny model by gloo, and a broadcast to a server on either host, whose /dev/shm is its own."""
    pair = hosts(2)
    run = RunDirectory(tmp_path / "run")
    settings = ("backend=fsdp", "cluster.nodes=2", "cluster.trainer_num_workers=2", "cluster.trainer_placement=STRICT_SPREAD")
    settings += ("cluster.inference_num_workers=2", "cluster.inference_placement=STRICT_SPREAD", "number_of_steps=2")
    for host in (0, 1):
        plain(pair, host, *settings, "cluster.device=cpu", f"run_dir={run.path}")
    assert (pair.wait(0), pair.wait(1)) == (0, 0), pair.everything()
    assert summary(run)["steps"] == 2
    for rank in (0, 1):
        assert "weights travel by gloo" in run.log(f"trainer-{rank}").read_text()
    plan = json.loads(run.plan_json.read_text())["processes"]
    assert {process["environment"]["MASTER_ADDR"] for process in plan if process["role"] == "trainer"} == {pair.address(0)}
    assert pair.left() == []


@pytest.mark.slow
def test_a_host_that_is_switched_off_and_a_ctrl_c_on_another(hosts: MAKE, tmp_path: Path) -> None:
    """First the one host's supervisor and all below it are killed; in a second run somebody presses Ctrl-C on a node."""
    pair = hosts(2)
    settings = (
        "cluster.nodes=2",
        "cluster.inference_num_workers=2",
        "cluster.inference_placement=SPREAD",
        "number_of_steps=100000",
    )
    run = RunDirectory(tmp_path / "first")
    for host in (0, 1):
        plain(pair, host, *settings, f"run_dir={run.path}", "orchestrator.silent_s=10")
    pair.until(lambda: step(run) >= 1, "at step 1")
    pair.remember()
    for process in (psutil.Process(pair.commands[1].pid), *pair.seen[1]):
        if process.is_running():
            process.kill()
    assert pair.wait(0) == 70
    assert "node-1" in json.loads(run.exit_json.read_text())["cause"]["sentence"]
    assert pair.left() == []
    run = RunDirectory(tmp_path / "second")
    for host in (0, 1):
        plain(pair, host, *settings, f"run_dir={run.path}")
    pair.until(lambda: step(run) >= 1, "at step 1")
    pair.remember()
    os.kill(pair.commands[1].pid, signal.SIGINT)
    assert (pair.wait(0), pair.wait(1)) == (130, 130), pair.everything()
    assert pair.left() == []


@pytest.mark.slow
def test_the_death_of_torchrun_ends_the_command_below_it(hosts: MAKE, tmp_path: Path) -> None:
    pair = hosts(2)
    run = RunDirectory(tmp_path / "run")
    for host in (0, 1):
        torchrun(pair, host, 2, "number_of_steps=100000", f"run_dir={run.path}")
    pair.until(lambda: step(run) >= 1, "at step 1")
    pair.remember()
    pair.commands[1].kill()
    assert pair.wait(0) == 1
    assert json.loads(run.exit_json.read_text())["exit_code"] == 143
    assert pair.left() == []


@pytest.mark.slow
def test_the_installed_wheel_runs_on_two_hosts_outside_the_checkout(hosts: MAKE, python: Path, tmp_path: Path) -> None:
    pair = hosts(2)
    pair.python, pair.cwd = str(python), tmp_path
    for host in (0, 1):
        plain(pair, host, "cluster.nodes=2", "cluster.env_num_workers=2", "number_of_steps=2", f"run_dir={tmp_path}/run")
    assert (pair.wait(0), pair.wait(1)) == (0, 0), pair.everything()
    assert summary(RunDirectory(tmp_path / "run"))["steps"] == 2
    assert pair.left() == []


@pytest.mark.slow
def test_two_runs_on_one_host_at_once_do_not_meet(tmp_path: Path) -> None:
    """Real trainer ranks and broadcasts of weights, on ports and names of their own."""
    runs = [RunDirectory(tmp_path / name) for name in ("one", "two")]
    command = [sys.executable, "-m", "telescope.run", "experiment=fake", "backend=fsdp", "cluster.trainer_num_workers=2"]
    command += ["weight_sync.transport=gloo", "number_of_steps=2", "logging.progress=false"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "LD_PRELOAD": ""}
    started = [subprocess.Popen([*command, f"run_dir={run.path}"], cwd=ROOT, env=environment) for run in runs]
    assert [process.wait(300) for process in started] == [0, 0]
    assert [summary(run)["steps"] for run in runs] == [2, 2]
