"""What a run asks of Slurm: `cluster.slurm`. Data and its own rules; `launch/slurm/` acts on it."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from telescope.settings import FreeText, Settings

_TIME = re.compile(r"^(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?$")
BASE = 60
"""Of times, and of YAML 1.1's numbers with colons."""
_MEMORY = re.compile(r"^\d+[KMGT]?$")
OWNED_OPTIONS = frozenset(
    {
        *("array", "output", "error", "open-mode", "signal", "requeue", "no-requeue", "job-name", "nodes", "time", "partition"),
        *("account", "qos", "constraint", "exclude", "nodelist", "mem", "gpus-per-node", "cpus-per-task", "ntasks-per-node"),
    }
)
"""sbatch options that have a setting of their own, or that the launcher needs for itself."""


STOP_MARGIN_S = 20.0
"""Of the time between warning and walltime: for peers to leave, files to close and the job to be queued again."""
CLOSE_MARGIN_S = 10.0
"""Of what is left of it, the orchestrator's own: to say why, and to close its files."""


def _as_text(value: Any) -> Any:
    """A number where Slurm has a name, e.g. account=12345: as it was typed."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_time(value: Any) -> Any:
    """YAML reads an unquoted 24:00:00 as 86400 and 1:30 as 90, which nobody can tell from minutes; below 60 it makes none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return value
    if value < BASE:
        return str(value)
    days, rest = divmod(value, 1440)
    as_minutes = f"{f'{days}-' if days else ''}{rest // BASE:02d}:{rest % BASE:02d}:00"
    head, last = divmod(value, BASE)
    as_yaml = f"{head}:{last:02d}" if head < BASE else f"{head // BASE}:{head % BASE:02d}:{last:02d}"
    raise ValueError(
        f'time={value} may be minutes, or what YAML makes of an unquoted {as_yaml}: write "{as_minutes}" for {value} minutes, '
        f'or "{as_yaml}", with the quotes in a file'
    )


SlurmText = Annotated[str, BeforeValidator(_as_text)]
SlurmTime = Annotated[str, BeforeValidator(_as_time)]


class SlurmGroup(Settings):
    """The nodes of inference where it has nodes of its own. null: as the trainer's."""

    nodes: int = Field(default=1, ge=1, le=4096)
    """Nodes for inference servers alone."""
    gpus_per_node: int | None = Field(default=None, ge=0, le=64)
    """GPUs of each; null: as cluster.slurm.gpus_per_node."""
    cpus_per_node: int | None = Field(default=None, ge=1, le=4096)
    """CPUs of each; null: as cluster.slurm.cpus_per_node."""
    mem: SlurmText | None = None
    """Memory of each; null: as cluster.slurm.mem."""
    partition: SlurmText | None = None
    """null: as cluster.slurm.partition."""
    constraint: SlurmText | None = None
    """null: as cluster.slurm.constraint."""

    @property
    def differs(self) -> bool:
        """Whether its nodes are asked for in other words than the trainer's."""
        return any(getattr(self, name) is not None for name in type(self).model_fields if name != "nodes")


class SlurmSettings(Settings):
    """One job: `nodes` for everything, or for trainer, orchestrator and workers where inference has its own."""

    nodes: int = Field(default=1, ge=1, le=4096)
    """Nodes of the job, less those of cluster.slurm.inference."""
    gpus_per_node: int = Field(default=0, ge=0, le=64)
    """GPUs of each node."""
    cpus_per_node: int = Field(default=8, ge=1, le=4096)
    """CPUs of each node."""
    mem: SlurmText | None = None
    """Memory of each node, e.g. `200G`; null: what the cluster gives."""
    time: SlurmTime = "24:00:00"
    """Walltime as Slurm writes it: minutes, `H:MM:SS` or `D-HH:MM:SS`."""
    partition: SlurmText | None = None
    """null: the cluster's default, as with the next ones."""
    account: SlurmText | None = None
    """Whom the cluster bills."""
    qos: SlurmText | None = None
    """Quality of service."""
    constraint: SlurmText | None = None
    """Features that nodes must have, e.g. `h100`."""
    exclude: SlurmText | None = None
    """Nodes not to be used, e.g. `n[3-5]`."""
    nodelist: SlurmText | None = None
    """Nodes that must be used."""
    inference: SlurmGroup | None = None
    """Nodes for inference alone. null: it shares the job's nodes. `'cluster.slurm.inference={nodes: 2}'`"""
    groups: Literal["hetjob", "allocation"] = "hetjob"
    """With cluster.slurm.inference: two components of a heterogeneous job, or one allocation whose last nodes are
    inference's (equal nodes; the only way for the array of a sweep)."""
    requeue: bool = True
    """Run again, in the same run directory, after a preemption or the loss of a node."""
    restart_after_walltime: bool | None = None
    """With cluster.slurm.requeue, run again after the walltime too. null: where the run makes checkpoints. Without any the next
    attempt begins at step 1 and, with the same walltime, gets no further than the last one."""
    max_requeues: int = Field(default=100, ge=0, le=1_000_000)
    """Requeues that the run itself asks for; Slurm's own (preemption) are not limited by it."""
    stop_before_s: int = Field(default=180, ge=10, le=65535)
    """Seconds before the walltime at which the run begins to stop (`--signal=B:USR2@…`). With checkpoints at least 30 more than
    checkpoint.stop_timeout_s, in which processes leave and files are closed."""
    array_parallelism: int = Field(default=256, ge=1, le=100_000)
    """Points of a sweep that may run at once (`--array=0-11%4`)."""
    setup: Annotated[tuple[str, ...], FreeText] = ()
    """Shell lines before anything starts, e.g. `module load cuda`."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, e.g. `--mail-type=END`."""
    srun: tuple[str, ...] = ()
    """Further options of each srun, e.g. those of a container plug-in."""

    @field_validator("time")
    @classmethod
    def _time_is_slurms(cls, time: str) -> str:
        minutes_of(time)
        return time

    @field_validator("mem")
    @classmethod
    def _memory_is_slurms(cls, mem: str | None) -> str | None:
        if mem is not None and not _MEMORY.match(mem):
            raise ValueError(f"mem={mem!r} must be a number of megabytes or end in K, M, G or T, e.g. 200G")
        return mem

    @field_validator("sbatch", "srun")
    @classmethod
    def _options_are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [option for option in options if not option.startswith("-") or "\n" in option]:
            raise ValueError(f"{wrong[0]!r} is not an option: it must begin with a dash and be one line, e.g. --mail-type=END")
        return options

    @field_validator("sbatch")
    @classmethod
    def _sbatch_leaves_ours_alone(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not option.startswith("--"):
                raise ValueError(f"cluster.slurm.sbatch has {option!r}: write it in its long form, e.g. --mail-type=END")
            name = option.lstrip("-").partition("=")[0].partition(" ")[0]
            if name in OWNED_OPTIONS:
                raise ValueError(f"cluster.slurm.sbatch has {option!r}, which the launcher writes itself: use its setting")
        return options

    @model_validator(mode="after")
    def _the_warning_comes_within_the_walltime(self) -> Self:
        if self.stop_before_s >= self.minutes * 60:
            raise ValueError(
                f"cluster.slurm.stop_before_s={self.stop_before_s} must be below cluster.slurm.time={self.time}: the run would "
                "be told to stop as it starts"
            )
        return self

    @model_validator(mode="after")
    def _one_allocation_has_equal_nodes(self) -> Self:
        if self.groups == "allocation" and self.inference is not None and self.inference.differs:
            raise ValueError(
                "cluster.slurm.groups=allocation asks for equal nodes, and cluster.slurm.inference asks for other ones: leave "
                "out all but cluster.slurm.inference.nodes, or set cluster.slurm.groups=hetjob"
            )
        return self

    @property
    def minutes(self) -> int:
        """The walltime."""
        return minutes_of(self.time)

    @property
    def stop_s(self) -> float:
        """What the orchestrator gets between the warning and being killed, e.g. 160 of 180."""
        return max(self.stop_before_s - STOP_MARGIN_S, self.stop_before_s / 2)

    @property
    def save_s(self) -> float:
        """What a step and its save get of that, e.g. 150 of 180."""
        return self.stop_s - min(CLOSE_MARGIN_S, self.stop_s / 2)

    @staticmethod
    def before_for(save_s: float) -> int:
        """A `stop_before_s` that is enough for this `save_s`."""
        return math.ceil(save_s + CLOSE_MARGIN_S + STOP_MARGIN_S)

    @property
    def hetjob(self) -> bool:
        """Whether the job has two components."""
        return self.inference is not None and self.groups == "hetjob"


def minutes_of(time: str) -> int:
    """Slurm's ways to write a time, in minutes, seconds rounded up: `90`, `1:30:00`, `1-12`, `1-12:30` (days-hours…).

    Raises `ValueError` for anything else, and for no time at all."""
    found = _TIME.match(time)
    if not found:
        raise ValueError(f"time={time!r} must be minutes, MM:SS, H:MM:SS or D-HH:MM:SS, e.g. 24:00:00")
    days, first, second, third = (int(part or 0) for part in found.groups())
    if found["days"] is not None:
        seconds = days * 86400 + first * 3600 + second * 60 + third
    elif found["third"] is not None:
        seconds = first * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second
    if not seconds:
        raise ValueError(f"time={time!r} is not a time")
    return -(-seconds // 60)
