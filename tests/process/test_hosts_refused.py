"""What no host of a run can do is said when the hosts have met, and nothing is started on any of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from telescope.cli.runs import run_status
from telescope.runlog.layout import RunDirectory
from telescope.runlog.opening import look

LIMIT_S = 90.0


def test_two_hosts_without_gpus_are_told_that_the_kernel_needs_one(tmp_path: Path) -> None:
    """Each command by itself is right: only the plan over both hosts says that there is no GPU."""
    folder = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "telescope.run", "inference=fake", "backend.attention=flash3"),
        *("cluster=bare_metal", "cluster.nodes=2", "cluster.interface=lo", "logging.progress=false", f"run_dir={folder}"),
    ]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
    hosts = [
        subprocess.Popen(
            [*command, f"cluster.node_rank={rank}"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in (0, 1)
    ]
    try:
        said = [host.communicate(timeout=LIMIT_S)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [1, 1], said
    sentence = "backend.attention=flash3 computes in bfloat16 or float16 on a GPU, not float32 on cpu: use sdpa, or auto"
    assert f"{sentence}\nNothing was started." in said[0]
    assert sentence in said[1]
    assert not folder.exists()


def test_a_head_that_is_interrupted_while_it_waits_leaves_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "telescope.run", "experiment=fake", "cluster=bare_metal", "cluster.nodes=2"),
        *("cluster.node_rank=0", "cluster.interface=lo", f"run_dir={folder}"),
    ]
    head = subprocess.Popen(command, env=os.environ | {"WANDB_MODE": "disabled"}, stderr=subprocess.PIPE, text=True)
    assert head.stderr is not None
    said = ""
    try:
        while "Waiting for 1 other node" not in said:
            line = head.stderr.readline()
            assert line, said
            said += line
        assert folder.exists()
        head.send_signal(signal.SIGINT)
        said += head.communicate(timeout=LIMIT_S)[1]
    finally:
        head.kill()
    assert head.returncode == 130, said
    assert "interrupted by SIGINT\nNothing was started." in said
    assert not folder.exists()


@pytest.mark.timeout(300)
def test_a_run_whose_hosts_do_not_come_again_has_failed_and_can_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def telescope(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "telescope", *arguments],
            env=os.environ | {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        return done.stderr

    telescope("run", "experiment=fake", "number_of_steps=1", "checkpoint.every=1", f"run_dir={folder}")
    apart = ("cluster.launcher=bare_metal", "cluster.nodes=2", "cluster.node_rank=0", "cluster.interface=lo")
    said = telescope("runs", "resume", str(folder), "number_of_steps=2", *apart, "cluster.placement_timeout_s=1")
    assert "node-1 did not come within cluster.placement_timeout_s=1 s" in said
    status = run_status(look(RunDirectory(folder)))
    assert (status.state, status.reason.partition(" did")[0]) == ("failed", "node-1")
    here = ("cluster.launcher=local", "cluster.nodes=null", "cluster.node_rank=null", "cluster.interface=null")
    said = telescope("runs", "resume", str(folder), "number_of_steps=2", "cluster.placement_timeout_s=600", *here)
    assert run_status(look(RunDirectory(folder))).state == "done", said
