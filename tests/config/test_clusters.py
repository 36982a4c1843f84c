"""A cluster of the user's own is one YAML file: those that the docs show, as printed there."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from telescope.config.run import RunConfig
from tests.config.conftest import compose_one, sentences, write

DOCS = Path(__file__).resolve().parents[2] / "docs"
GPUS = ("model=qwen3-4b", "rollout.max_tokens=512")


def shown(page: str, opening: str) -> str:
    """The block of a page, indented or fenced, that begins with this line."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(rf"^( *){re.escape(opening)}\n((?:\1.*\n|\n)*)", text, re.MULTILINE)
    assert len(blocks) == 1, f"{page} has {len(blocks)} blocks that begin with {opening}"
    indent, rest = blocks[0]
    return dedent(f"{indent}{opening}\n{rest}".partition("```")[0])


def composed(folder: Path, name: str, *overrides: str) -> RunConfig:
    point = compose_one(*GPUS, f"cluster={name}", *overrides, config_dir=folder)
    assert point.config is not None, sentences(point)
    return point.config


def test_hosts_of_ones_own_are_one_file(tmp_path: Path):
    write(tmp_path / "cluster" / "lab.yaml", shown("launching.md", "defaults:"))
    cluster = composed(tmp_path, "lab", "cluster.node_rank=0").cluster
    assert (cluster.launcher, cluster.nodes, cluster.head, cluster.interface) == ("bare_metal", 4, "10.1.0.1:29400", "ib0")
    assert (cluster.inference_num_workers, cluster.trainer_num_workers) == (16, 16)
    assert (cluster.trainer_placement, cluster.device) == ("STRICT_SPREAD", "gpu")
    assert dict(cluster.env) == {"NCCL_IB_HCA": "mlx5"}


def test_a_slurm_of_ones_own_is_one_file_and_the_command_line_wins(tmp_path: Path):
    write(tmp_path / "cluster" / "hal.yaml", shown("slurm.md", "# my_config/cluster/hal.yaml"))
    cluster = composed(tmp_path, "hal", "cluster.slurm.nodes=3").cluster
    assert cluster.slurm is not None
    assert (cluster.slurm.account, cluster.slurm.partition, cluster.slurm.constraint) == ("ours", "gpu", "h100")
    assert (cluster.slurm.nodes, cluster.slurm.gpus_per_node, cluster.slurm.cpus_per_node) == (3, 8, 96)
    assert cluster.slurm.setup == ("module load cuda/13", "ulimit -n 65536")
    assert cluster.slurm.sbatch == ("--mail-type=END,FAIL",)
    assert cluster.slurm.requeue is True  # the preset's own
    assert dict(cluster.env) == {"NCCL_SOCKET_IFNAME": "ib0"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("nods: 4", "cluster.nods=4: there is no such setting. Did you mean cluster.nodes?"),
        ("slurm: {partition: [7]}", "cluster.slurm.partition=[7] must be text"),
    ],
)
def test_a_typo_in_the_file_is_refused_with_its_place(tmp_path: Path, wrong: str, said: str):
    write(tmp_path / "cluster" / "lab.yaml", f"defaults: [slurm, _self_]\n{wrong}\n")
    assert sentences(compose_one("experiment=fake", "cluster=lab", config_dir=tmp_path)).startswith(said)
