"""Where a run's processes go: the section `cluster` of its configuration. Pure data; the launcher acts on it."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from telescope.config.slurm import SlurmSettings
from telescope.settings import Settings

MOST_WORKERS = 1_024
"""Of each kind in a run."""
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_ADDRESS = re.compile(r"^(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/]+)):([0-9]{1,5})$")


def split_address(text: str) -> tuple[str, int]:
    """`10.0.0.1:29400` or `[fd00::1]:29400` as host and port. Raises `ValueError` with a sentence."""
    found = _ADDRESS.match(text)
    port = int(found[3]) if found else 0
    if found is None or not 0 < port <= 65535:
        raise ValueError(
            f"cluster.head={text} is not an address of a host and a port, such as 10.0.0.1:29400 or [fd00::1]:29400"
        )
    return found[1] or found[2], port


class ClusterSettings(Settings):
    launcher: Literal["local", "bare_metal"] = "local"
    """Who starts processes: local, this machine alone; bare_metal, the same command on each of several hosts."""
    nodes: int | None = Field(default=None, ge=1, le=10_000)
    """bare_metal: hosts of the run; null: what torchrun says, else 1."""
    node_rank: int | None = Field(default=None, ge=0, lt=10_000)
    """bare_metal: which of them this one is; 0 is the head, which runs the orchestrator. null: what torchrun says."""
    head: str | None = None
    """bare_metal with a key file: where the head is reached, `host:port`; null: torchrun's MASTER_ADDR and MASTER_PORT + 1."""
    key_file: str | None = None
    """bare_metal: file with the key that all hosts share, from `telescope.run --new-key FILE`; null: they meet in run_dir."""
    interface: str | None = None
    """bare_metal: address, or network interface, of this host for the run's sockets; null: the one on the way to the head."""
    inference_placement: Strategy = "PACK"
    """Servers on hosts. PACK: few hosts; SPREAD: evenly; STRICT_PACK: one host; STRICT_SPREAD: a host for each."""
    trainer_placement: Strategy = "PACK"
    """The same for trainer ranks."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: the GPUs present, else CPU."""
    inference_num_workers: int = Field(default=2, ge=1, le=MOST_WORKERS)
    """GPUs given to inference; servers = this / inference.tensor_parallel_size."""
    trainer_num_workers: int = Field(default=2, ge=0, le=MOST_WORKERS)
    """Trainer ranks; 0: nothing is trained, the evals are played once (`telescope eval` sets it)."""
    env_num_workers: int = Field(default=1, ge=1, le=MOST_WORKERS)
    """Environment worker processes."""
    rollouts_per_env_worker: int = Field(default=1024, ge=1, le=1_000_000)
    """Rollouts one environment worker plays at once."""
    inference_cpus_per_worker: float = Field(default=4.0, gt=0, le=1_024)
    """CPU cores (threads) of a server; a hint where there are fewer."""
    trainer_cpus_per_worker: float = Field(default=4.0, gt=0, le=1_024)
    """CPU cores (threads) of a trainer rank; a hint where there are fewer."""
    placement_timeout_s: int = Field(default=900, ge=1, le=1_000_000)
    """Until all processes have said hello."""
    max_server_restarts: int = Field(default=3, ge=0, le=1_000_000)
    """Restarts of one inference server within an hour once the run is under way; one more death ends the run. 0: none."""
    slurm: SlurmSettings | None = None
    """Submit the run as a Slurm job; `cluster=slurm` sets it. null: start it here."""
    dry_run: bool = False
    """With cluster.slurm: write the run directory and the batch file, and submit nothing."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for every process of the run. A secret is given as a reference: `'${oc.env:HF_TOKEN}'`."""

    @field_validator("head")
    @classmethod
    def _head_is_an_address(cls, head: str | None) -> str | None:
        if head is not None:
            split_address(head)
        return head

    @field_validator("env")
    @classmethod
    def _variables_have_names(cls, env: dict[str, str]) -> dict[str, str]:
        wrong = [name for name in env if not _VARIABLE.match(name)]
        if wrong:
            raise ValueError(f"cluster.env: {', '.join(map(repr, wrong))} can't name an environment variable")
        return env
