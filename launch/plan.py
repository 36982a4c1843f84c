"""Which processes a run has, and what each is given: pure arithmetic from settings and hosts to `plan.json`.

Owns counts, names, threads, GPUs and the variables that follow from them. Refuses to look at the machine (`local.py` does)
and to start anything (`node.py` does). `plan.json` is all that the supervisor reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from telescope.records import Record
from telescope.runlog.layout import write_atomically

if TYPE_CHECKING:
    from telescope.config.parts import ClusterSettings
    from telescope.config.run import RunConfig

ProcessRole = Literal["orchestrator", "server", "trainer", "worker"]

MODULES: dict[ProcessRole, str] = {
    "orchestrator": "telescope.orchestrator",
    "server": "telescope.inference",
    "trainer": "telescope.trainer",
    "worker": "telescope.workers",
}

GPU_SHARE = "TELESCOPE_GPU_SHARE"
"""Tells a trainer rank how much of its GPU it may take, where it is not alone there."""
MOST_OF_A_CARD = 0.9
OWNED_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
        GPU_SHARE,
    }
)
"""Variables that the launcher gives each process itself; `cluster.env` may not set them."""

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""On one host loopback reaches every rank and server, whatever the host's name resolves to."""


class PlanError(ValueError):
    """The run does not fit the hosts; the text is one whole sentence with the remedy."""


class Host(Record, frozen=True):
    """One machine as the plan sees it, e.g. `Host("node-1", cpus=2, gpus=("0", "1"))`."""

    name: str
    cpus: int
    """Cores that this run may use."""
    gpus: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES takes: indices or UUIDs."""


class ProcessPlan(Record, frozen=True):
    """One process: started as `python *program --run-dir DIR --name NAME`."""

    name: str
    role: ProcessRole
    index: int
    host: str
    program: tuple[str, ...]
    """Arguments of the interpreter, e.g. `("-m", "telescope.workers")`."""
    environment: dict[str, str]
    gpus: tuple[str, ...]
    threads: int


class Plan(Record, frozen=True):
    """What one run starts. A trainer's MASTER_PORT is missing here: the supervisor finds a free one when it starts them."""

    device: Literal["cpu", "gpu"]
    processes: tuple[ProcessPlan, ...]
    progress: bool = True
    log_to_console: bool = False
    max_server_restarts: int = 0
    """Of one server within an hour; one more death of it ends the run."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(process.name for process in self.processes)


def make_plan(config: RunConfig, hosts: tuple[Host, ...]) -> Plan:
    """Lay the run's processes out over `hosts`. Raises `PlanError` where they do not fit."""
    cluster = config.cluster
    host = _only_host(hosts)
    _refuse_owned_variables(cluster.env)
    device = choose_device(cluster, host)
    threads = share_threads(cluster, host.cpus)
    gpus = itertools.cycle(host.gpus if device == "gpu" else ())
    processes = [_process("orchestrator", 0, host, cluster.env)]
    for index in range(config.servers):
        cards = _take(gpus, config.inference.tensor_parallel_size)
        processes.append(_process("server", index, host, LOOPBACK | cluster.env, threads["server"], cards))
    for rank in range(cluster.trainer_num_workers):
        variables = _rank_variables(rank, cluster.trainer_num_workers) | cluster.env
        processes.append(_process("trainer", rank, host, variables, threads["trainer"], _take(gpus)))
    if device == "gpu":
        processes = [*_split_cards(processes, config.inference.gpu_memory_utilization)]
    for index in range(cluster.env_num_workers):
        processes.append(_process("worker", index, host, cluster.env))
    return Plan(device, tuple(processes), config.logging.progress, config.logging.log_to_console, cluster.max_server_restarts)


def choose_device(cluster: ClusterSettings, host: Host) -> Literal["cpu", "gpu"]:
    """`auto` takes the GPUs where there are any. Servers and ranks share GPUs where there are not enough for one each, but no
    two of a kind do: NCCL refuses two ranks on a card. Raises `PlanError` with the numbers where there are too few."""
    if cluster.device == "cpu" or (cluster.device == "auto" and not host.gpus):
        return "cpu"
    servers, ranks = cluster.inference_num_workers, cluster.trainer_num_workers
    if len(host.gpus) < max(servers, ranks):
        raise PlanError(
            f"cluster.inference_num_workers={servers} and cluster.trainer_num_workers={ranks} need {servers + ranks} GPUs, "
            f"one each, or {max(servers, ranks)} where a server and a rank share one, but {host.name} has {len(host.gpus)}: "
            "ask for fewer, or set cluster.device=cpu"
        )
    return "gpu"


def _split_cards(processes: list[ProcessPlan], servers_share: float) -> Iterator[ProcessPlan]:
    """A rank that shares its GPU with a server may take what the server leaves. Raises `PlanError` where that is too little."""
    taken = {gpu for process in processes if process.role == "server" for gpu in process.gpus}
    for process in processes:
        if process.role == "trainer" and taken.intersection(process.gpus):
            if servers_share > MOST_OF_A_CARD:
                raise PlanError(
                    f"{process.name} shares GPU {process.gpus[0]} with a server, and "
                    f"inference.gpu_memory_utilization={servers_share:g} leaves it too little: lower it, to 0.45 say, as "
                    "cluster=one_gpu does"
                )
            share = {GPU_SHARE: f"{1 - servers_share:.3f}"}
            process = msgspec.structs.replace(process, environment=process.environment | share)
        yield process


def shared_gpus(plan: Plan) -> str:
    """A sentence for the user where a server and a trainer rank share a GPU, else empty."""
    users: dict[str, list[str]] = {}
    for process in plan.processes:
        for gpu in process.gpus:
            users.setdefault(gpu, []).append(process.name)
    shared = [f"{' and '.join(names)} share GPU {gpu}" for gpu, names in users.items() if len(names) > 1]
    if not shared:
        return ""
    return f"{'; '.join(shared)}: inference.gpu_memory_utilization must leave the trainer enough memory"


def share_threads(cluster: ClusterSettings, cpus: int) -> dict[ProcessRole, int]:
    """Threads a server and a trainer rank: the hint, scaled down where all hints together exceed `cpus`; at least 1."""
    hints = {"server": cluster.inference_cpus_per_worker, "trainer": cluster.trainer_cpus_per_worker}
    wanted = cluster.inference_num_workers * hints["server"] + cluster.trainer_num_workers * hints["trainer"]
    scale = min(1.0, cpus / wanted)
    return {"server": max(1, int(hints["server"] * scale)), "trainer": max(1, int(hints["trainer"] * scale))}


def write_plan(plan: Plan, path: Path) -> None:
    """For its owner alone, like all that a configuration resolves to."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(plan)).decode(), mode=0o600)


def read_plan(path: Path) -> Plan:
    return msgspec.json.decode(path.read_bytes(), type=Plan)


def _only_host(hosts: tuple[Host, ...]) -> Host:
    if len(hosts) != 1:
        raise PlanError(f"cluster=local places every process on one host, and {len(hosts)} were given")
    return hosts[0]


def _refuse_owned_variables(variables: dict[str, str]) -> None:
    if owned := sorted(OWNED_VARIABLES & variables.keys()):
        raise PlanError(f"cluster.env sets {', '.join(owned)}, which the launcher gives each process itself: leave them out")


def _take(gpus: Iterator[str], count: int = 1) -> tuple[str, ...]:
    return tuple(itertools.islice(gpus, count))


def _rank_variables(rank: int, world_size: int) -> dict[str, str]:
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    return ranks | LOOPBACK


def _process(
    role: ProcessRole, index: int, host: Host, variables: dict[str, str], threads: int = 1, gpus: tuple[str, ...] = ()
) -> ProcessPlan:
    # LOCAL_RANK stays the rank although each rank sees one GPU only; a rank uses the first device it sees.
    return ProcessPlan(
        name=role if role == "orchestrator" else f"{role}-{index}",
        role=role,
        index=index,
        host=host.name,
        program=("-m", MODULES[role]),
        environment={"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ",".join(gpus)} | variables,
        gpus=gpus,
        threads=threads,
    )
