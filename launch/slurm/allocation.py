"""The nodes that Slurm gave a job, read from its environment: two groups where inference has nodes of its own.

Pure: from a mapping of variables to nodes, and from nodes to the plan's hosts; whoever asks looks up their addresses. Refuses
an allocation that it cannot read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Literal

from telescope._launch.process_plan import Host, PlanError
from telescope.config.slurm import SlurmSettings
from telescope.records import Record

NodeGroup = Literal["trainer", "inference"]
_PIECE = re.compile(r"\[([^\]]*)\]")


class AllocatedNode(Record, frozen=True):
    """One node of the job, e.g. `Node("gpu-07", group="inference", het_group=1, cpus=8, gpus=4)`."""

    name: str
    group: NodeGroup | None
    """Whose it is alone; None: both sides share it."""
    het_group: int | None
    """Its component of a heterogeneous job."""
    cpus: int
    gpus: int


class SlurmAllocation(Record, frozen=True):
    """A job as it runs. `attempt` names this start of it."""

    job_id: str
    """What scontrol and scancel take: `12`, or `12_3` of an array."""
    restarts: int
    nodes: tuple[AllocatedNode, ...]
    """The batch node first."""

    @property
    def attempt(self) -> str:
        return f"{self.job_id}.{self.restarts}"


def list_nominal_nodes(settings: SlurmSettings) -> tuple[AllocatedNode, ...]:
    """The nodes as they are asked for, under names that stand for those to come: what a plan can be checked against."""
    shared = settings.inference is None
    first = [
        AllocatedNode(f"node-{index}", None if shared else "trainer", 0 if settings.hetjob else None, *_node_size(settings))
        for index in range(settings.nodes)
    ]
    group = settings.inference
    if group is None:
        return tuple(first)
    gpus = settings.gpus_per_node if group.gpus_per_node is None else group.gpus_per_node
    cpus = group.cpus_per_node or settings.cpus_per_node
    het = 1 if settings.hetjob else None
    return (*first, *(AllocatedNode(f"inference-node-{index}", "inference", het, cpus, gpus) for index in range(group.nodes)))


def read_allocation(settings: SlurmSettings, environment: Mapping[str, str]) -> SlurmAllocation:
    """What Slurm gave. Raises `PlanError` where its variables say something else than what was asked for."""
    job_id, restarts = read_job(environment)
    if settings.hetjob:
        names = [expand(_need(environment, f"SLURM_JOB_NODELIST_HET_GROUP_{index}")) for index in (0, 1)]
        given = [*names[0], *names[1]]
    else:
        given = expand(_need(environment, "SLURM_JOB_NODELIST"))
    wanted = list_nominal_nodes(settings)
    if len(given) != len(wanted):
        raise PlanError(
            f"Slurm gave {len(given)} nodes ({', '.join(given)}) and the run asks for {len(wanted)}: submit it again"
        )
    nodes = tuple(
        AllocatedNode(name, node.group, node.het_group, node.cpus, node.gpus) for name, node in zip(given, wanted, strict=True)
    )
    return SlurmAllocation(job_id, restarts, nodes)


def read_job(environment: Mapping[str, str]) -> tuple[str, int]:
    """The job's id, `12` or `12_3` of an array, and its restarts so far. Raises `PlanError` where this is not a job."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job_id = f"{array}_{task}" if array and task else _need(environment, "SLURM_JOB_ID")
    return job_id, int(environment.get("SLURM_RESTART_COUNT") or 0)


def expand(names: str) -> list[str]:
    """Slurm's short form: `n[1-3,7],login` is n1, n2, n3, n7, login; `n[08-10]` keeps its zeros."""
    return [name for word in _split_words(names) for name in _expand_word(word)]


def _split_words(names: str) -> list[str]:
    """Split at commas outside of brackets."""
    return [word for word in re.split(r",(?![^\[]*\])", names) if word]


def _expand_word(word: str) -> Iterator[str]:
    pieces = _PIECE.split(word)  # text, ranges, text, ranges, …, text
    choices = [[piece] if index % 2 == 0 else list(_expand_ranges(piece)) for index, piece in enumerate(pieces)]
    yield from ("".join(parts) for parts in product(*choices))


def _expand_ranges(text: str) -> Iterator[str]:
    for part in text.split(","):
        low, _, high = part.partition("-")
        for number in range(int(low), int(high or low) + 1):
            yield f"{number:0{len(low)}d}"


def _node_size(settings: SlurmSettings) -> tuple[int, int]:
    return settings.cpus_per_node, settings.gpus_per_node


def _need(environment: Mapping[str, str], name: str) -> str:
    try:
        return environment[name]
    except KeyError:
        raise PlanError(f"{name} is not set: this is not a process of a Slurm job; start the run with cluster=slurm") from None


LOOPBACK = ("127.0.0.1", "lo")


def make_hosts(nodes: Sequence[AllocatedNode], networks: Mapping[str, tuple[str, str]] = {}) -> tuple[Host, ...]:
    """`networks`: address and interface of each node, e.g. `{"n1": ("10.0.0.1", "eth0")}`; loopback for one that has none.

    A GPU goes by its number within the node's allocation: what it is called there is only known there."""
    return tuple(
        Host(
            node.name,
            node.cpus,
            tuple(map(str, range(node.gpus))),
            *networks.get(node.name, LOOPBACK),
            kept_for=node.group or "both",
        )
        for node in nodes
    )
