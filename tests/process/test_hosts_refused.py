"""What no host of a run can do is said when the hosts have met, and nothing is started on any of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from telescope.runlog.layout import RunDirectory

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
    assert not RunDirectory(folder).log("orchestrator").exists()
