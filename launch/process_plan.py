"""Which processes a run has, and what each is given: pure arithmetic from settings and hosts to `plan.json`.

Owns counts, names, threads, GPUs and the variables that follow from them. Refuses to look at the machine (this_host.py does)
and to start anything (supervisor.py does). `plan.json` is all that the supervisor reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from telescope._launch.host_placement import Counts, Demand, place_alone, place_apart, place_on_cores, place_sharing
from telescope.config.secrets import find_missing, find_references, has_reference
from telescope.records import Record
from telescope.runlog.files import read_json
from telescope.runlog.layout import write_atomically
from telescope.wire.supervisor_channel import DESCRIPTOR

if TYPE_CHECKING:
    from telescope.config.run import RunConfig
    from telescope.config.sections import ClusterSettings

ProcessRole = Literal["orchestrator", "server", "trainer", "worker"]

MODULES: dict[ProcessRole, str] = {
    "orchestrator": "telescope.orchestrator",
    "server": "telescope.inference",
    "trainer": "telescope.trainer",
    "worker": "telescope.workers",
}

GPU_SHARE = "TELESCOPE_GPU_SHARE"
"""Tells a trainer rank how much of its GPU it may take, where it is not alone there."""
MEETING_FILE = "TELESCOPE_MEETING_FILE"
"""Tells a trainer rank the file by which ranks of one host meet, in place of MASTER_ADDR and MASTER_PORT."""
MOST_OF_A_CARD = 0.9
OWNED_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
        *(GPU_SHARE, MEETING_FILE),
        DESCRIPTOR,
        "TELESCOPE_ADDRESS",
    }
)
"""Variables that the launcher gives each process itself; `cluster.env` may not set them."""

ADDRESS = "TELESCOPE_ADDRESS"
"""Tells a process its host's address on the run's network, where its sockets bind."""


class PlanError(ValueError):
    """The run does not fit the hosts; the text is one whole sentence with the remedy."""


class Host(Record, frozen=True):
    """One machine as the plan sees it, e.g. `Host("node-1", cpus=2, gpus=("0", "1"))`."""

    name: str
    cpus: int
    """Cores that this run may use."""
    gpus: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES takes: indices or UUIDs."""
    address: str = "127.0.0.1"
    """On the run's network, where its sockets bind."""
    interface: str = "lo"
    """The network interface of that address; empty where it is not known."""
    kept_for: Literal["both", "inference", "trainer"] = "both"
    """Whose processes may come here; the head's orchestrator and the workers may always."""


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
    node: int = 0
    """Which of the plan's hosts it is."""
    needs: tuple[str, ...] = ()
    """Variables that must be set where it is started: its own settings refer to them."""
    redacted: tuple[str, ...] = ()
    """Variables whose values its log must not show: all that the run refers to, and those that are set by a reference."""


class LaunchPlan(Record, frozen=True):
    """What one run starts. Where the trainer ranks meet is missing here: the supervisor says it when it starts them."""

    device: Literal["cpu", "gpu"]
    processes: tuple[ProcessPlan, ...]
    progress: bool = True
    log_to_console: bool = False
    max_server_restarts: int = 0
    """Of one server within an hour; one more death of it ends the run."""
    hosts: tuple[Host, ...] = ()
    """By node; the first is the head."""
    verbose: bool = False
    """Whether the terminal has the whole summary at the end."""
    save_s: float = 0.0
    """What the run gets to train and save the step under way when it is told to stop; 0: nothing is saved then."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(process.name for process in self.processes)

    @property
    def head_address(self) -> str:
        return self.hosts[0].address if self.hosts else "127.0.0.1"


def make_plan(config: RunConfig, hosts: tuple[Host, ...]) -> LaunchPlan:
    """Lay the run's processes out over `hosts`, the first of which is the head. Raises `PlanError` where they do not fit."""
    cluster = config.cluster
    _refuse_owned_variables(cluster.env)
    hosts = make_names_unique(hosts)
    fake = config.inference.engine == "fake" and config.backend_name == "fake"
    device = "cpu" if fake and cluster.device == "auto" else choose_device(cluster, *hosts)
    servers, ranks = _count_processes(config, hosts, device)
    cards = [_HostGpus(host.gpus if device == "gpu" else ()) for host in hosts]
    seats = [
        _Seat(node, host, share_threads(cluster, host.cpus, *held))
        for node, (host, *held) in enumerate(zip(hosts, servers, ranks, strict=True))
    ]
    processes = [_make_process("orchestrator", 0, seats[0], cluster.env)]
    for index, seat in enumerate(_take_seats(seats, servers)):
        gpus = cards[seat.node].take(config.inference.tensor_parallel_size)
        processes.append(
            _make_process("server", index, seat, _make_network_variables(seat.host) | cluster.env, seat.threads["server"], gpus)
        )
    places = list(_take_seats(seats, ranks))
    for rank, seat in enumerate(places):
        local_rank = sum(other.node == seat.node for other in places[:rank])
        variables = (
            _make_rank_variables(rank, local_rank, len(places), places[0].host)
            | _make_network_variables(seat.host)
            | cluster.env
        )
        processes.append(_make_process("trainer", rank, seat, variables, seat.threads["trainer"], cards[seat.node].take()))
    if device == "gpu":
        processes = [*_split_cards(processes, config.inference.gpu_memory_utilization)]
    for index in range(cluster.env_num_workers):
        processes.append(
            _make_process(
                "worker",
                index,
                seats[index % len(seats)],
                _make_network_variables(seats[index % len(seats)].host) | cluster.env,
            )
        )
    processes = [_add_variables(process, config) for process in processes]
    logging = config.logging
    restarts, save_s = cluster.max_server_restarts, config.stop_timeout_s
    return LaunchPlan(
        device, tuple(processes), logging.progress, logging.log_to_console, restarts, hosts, logging.verbose, save_s
    )


def _add_variables(process: ProcessPlan, config: RunConfig) -> ProcessPlan:
    """What it needs and what its log must not show, by the references in the settings."""
    transport: Any = config.weight_sync.transport_kwargs
    remote = config.inference.remote
    own: dict[ProcessRole, Any] = {
        "orchestrator": (),
        "worker": [remote and remote.api_key, *(entry.kwargs for entry in config.played.values())],
        "server": [config.inference.api_key, config.inference.vllm, transport],
        "trainer": transport,
    }
    needs = find_missing(own[process.role], {})
    set_here = {name for name, value in config.cluster.env.items() if has_reference(value)}
    return msgspec.structs.replace(
        process, needs=tuple(needs), redacted=tuple(sorted(set_here | find_references(config.model_dump(mode="json"))))
    )


def make_names_unique(hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """Hosts with names that differ: one that several have gets its node's number, e.g. `gpu#1`."""
    names = [host.name for host in hosts]
    return tuple(
        host if names.count(host.name) == 1 else msgspec.structs.replace(host, name=f"{host.name}#{node}")
        for node, host in enumerate(hosts)
    )


def choose_device(cluster: ClusterSettings, *hosts: Host) -> Literal["cpu", "gpu"]:
    """`auto` takes the GPUs where there are any. Servers and ranks share GPUs where there are not enough for one each, but no
    two of a kind do: NCCL refuses two ranks on a card. Raises `PlanError` with the numbers where there are too few."""
    found = sum(len(host.gpus) for host in hosts)
    if cluster.device == "cpu" or (cluster.device == "auto" and not found):
        return "cpu"
    servers, ranks = cluster.inference_num_workers, cluster.trainer_num_workers
    if found < max(servers, ranks):
        who = hosts[0].name if len(hosts) == 1 else f"the {len(hosts)} hosts"
        raise PlanError(
            f"cluster.inference_num_workers={servers} and cluster.trainer_num_workers={ranks} need {servers + ranks} GPUs, "
            f"one each, or {max(servers, ranks)} where a server and a rank share one, but {who} "
            f"{'has' if len(hosts) == 1 else 'have'} {found}: ask for fewer, or set cluster.device=cpu"
        )
    return "gpu"


def _count_processes(config: RunConfig, hosts: tuple[Host, ...], device: str) -> tuple[Counts, Counts]:
    """Servers and trainer ranks of each host. Raises `PlanError` where the strategies can't be kept."""
    cluster, size = config.cluster, config.inference.tensor_parallel_size
    servers = Demand(config.servers, size, cluster.inference_placement)
    ranks = Demand(cluster.trainer_num_workers, 1, cluster.trainer_placement)
    if any(host.kept_for != "both" for host in hosts):
        return _count_on_kept_hosts(servers, hosts, device, config), _count_on_kept_hosts(
            ranks, hosts, device, config, part="trainer"
        )
    if device == "cpu":
        cores = [float(host.cpus) for host in hosts]
        by_cores = (
            place_on_cores(servers, cluster.inference_cpus_per_worker * size, cores),
            place_on_cores(ranks, cluster.trainer_cpus_per_worker, cores),
        )
        return _require_placement(servers, by_cores[0], "inference", hosts), _require_placement(
            ranks, by_cores[1], "trainer", hosts
        )
    room = [len(host.gpus) for host in hosts]
    if sum(room) < servers.count * size + ranks.count:  # then a server and a rank share
        _require_placement(servers, place_alone(servers, room), "inference", hosts)
        _require_placement(ranks, place_alone(ranks, room), "trainer", hosts)
        if sharing := place_sharing(servers, ranks, room):
            return sharing
    together = place_apart(servers, ranks, room)
    if together is None:
        raise PlanError(
            f"{_describe_demand(servers, 'inference')} and {_describe_demand(ranks, 'trainer')} do not fit on "
            f"{_describe_hosts(hosts)}: ask for fewer, or for PACK or SPREAD"
        )
    return together


def _count_on_kept_hosts(
    demand: Demand, hosts: tuple[Host, ...], device: str, config: RunConfig, part: Literal["inference", "trainer"] = "inference"
) -> Counts:
    """One side's counts where hosts are kept for it. Raises `PlanError`."""
    cluster = config.cluster
    own = {node: host for node, host in enumerate(hosts) if host.kept_for in ("both", part)}
    if device == "cpu":
        cpus = cluster.inference_cpus_per_worker * demand.size if part == "inference" else cluster.trainer_cpus_per_worker
        counts = place_on_cores(demand, cpus, [float(host.cpus) for host in own.values()])
    else:
        counts = place_alone(demand, [len(host.gpus) for host in own.values()])
    by_node = dict(zip(own, _require_placement(demand, counts, part, tuple(own.values())), strict=True))
    return tuple(by_node.get(node, 0) for node in range(len(hosts)))


def _require_placement(demand: Demand, counts: Counts | None, part: str, hosts: tuple[Host, ...]) -> Counts:
    if counts is None:
        raise PlanError(
            f"{_describe_demand(demand, part)} do not fit on {_describe_hosts(hosts)}: ask for fewer, or for PACK or SPREAD"
        )
    return counts


def _describe_demand(demand: Demand, part: str) -> str:
    kind = "server" if part == "inference" else "trainer rank"
    return (
        f"{demand.count} {kind}{'s' * (demand.count != 1)} of {demand.size} GPU{'s' * (demand.size != 1)} "
        f"(cluster.{part}_placement={demand.strategy})"
    )


def _describe_hosts(hosts: tuple[Host, ...]) -> str:
    names = ", ".join(f"{host.name} with {len(host.gpus)}" for host in hosts[:8])
    return f"{len(hosts)} host{'s' * (len(hosts) != 1)} ({names}{', …' if len(hosts) > 8 else ''})"


@dataclass(frozen=True)
class _Seat:
    """A host, and the threads of one process on it."""

    node: int
    host: Host
    threads: dict[ProcessRole, int]


def _take_seats(seats: Sequence[_Seat], counts: Counts) -> Iterator[_Seat]:
    """One a process, host by host: neighbours in rank are neighbours in space."""
    for seat, count in zip(seats, counts, strict=True):
        yield from itertools.repeat(seat, count)


class _HostGpus:
    """The GPUs of one host in turn: a rank gets one that nobody has, while there is one."""

    def __init__(self, gpus: tuple[str, ...]) -> None:
        self._turn = itertools.cycle(gpus)

    def take(self, count: int = 1) -> tuple[str, ...]:
        return tuple(itertools.islice(self._turn, count))


def _split_cards(processes: list[ProcessPlan], servers_share: float) -> Iterator[ProcessPlan]:
    """A rank that shares its GPU with a server may take what the server leaves. Raises `PlanError` where that is too little."""
    taken = {(process.node, gpu) for process in processes if process.role == "server" for gpu in process.gpus}
    for process in processes:
        if process.role == "trainer" and taken.intersection((process.node, gpu) for gpu in process.gpus):
            if servers_share > MOST_OF_A_CARD:
                raise PlanError(
                    f"{process.name} shares GPU {process.gpus[0]} with a server, and "
                    f"inference.gpu_memory_utilization={servers_share:g} leaves it too little: lower it, to 0.45 say, as "
                    "cluster=one_gpu does"
                )
            share = {GPU_SHARE: f"{1 - servers_share:.3f}"}
            process = msgspec.structs.replace(process, environment=process.environment | share)
        yield process


def describe_shared_gpus(plan: LaunchPlan) -> str:
    """A sentence for the user where a server and a trainer rank share a GPU, else empty."""
    users: dict[tuple[str, str], list[str]] = {}
    for process in plan.processes:
        for gpu in process.gpus:
            users.setdefault((process.host, gpu), []).append(process.name)
    where = {host.name: f" of {host.name}" if len(plan.hosts) > 1 else "" for host in plan.hosts}
    shared = [
        f"{' and '.join(names)} share GPU {gpu}{where.get(host, '')}" for (host, gpu), names in users.items() if len(names) > 1
    ]
    if not shared:
        return ""
    idle = sum(len(host.gpus) for host in plan.hosts) - len(users)
    unused = f"; {idle} GPU{'s stay' if idle > 1 else ' stays'} idle, for no whole process fits there" if idle else ""
    return f"{'; '.join(shared)}: inference.gpu_memory_utilization must leave the trainer enough memory{unused}"


def share_threads(
    cluster: ClusterSettings, cpus: int, servers: int | None = None, ranks: int | None = None
) -> dict[ProcessRole, int]:
    """Threads of a server and of a rank of a host with `servers` and `ranks` (None: all): the hint, scaled down where all
    hints together exceed `cpus`; at least 1."""
    hints = {"server": cluster.inference_cpus_per_worker, "trainer": cluster.trainer_cpus_per_worker}
    servers = cluster.inference_num_workers if servers is None else servers
    ranks = cluster.trainer_num_workers if ranks is None else ranks
    wanted = servers * hints["server"] + ranks * hints["trainer"]
    scale = min(1.0, cpus / wanted) if wanted else 1.0
    return {"server": max(1, int(hints["server"] * scale)), "trainer": max(1, int(hints["trainer"] * scale))}


def write_plan(plan: LaunchPlan, path: Path) -> None:
    """For its owner alone, like all that a configuration resolves to."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(plan)).decode(), mode=0o600)


def read_plan(path: Path) -> LaunchPlan:
    """Raises FileNotFoundError and `DamagedFile`."""
    return read_json(path, LaunchPlan)


def _refuse_owned_variables(variables: dict[str, str]) -> None:
    if owned := sorted(OWNED_VARIABLES & variables.keys()):
        raise PlanError(f"cluster.env sets {', '.join(owned)}, which the launcher gives each process itself: leave them out")


def _make_network_variables(host: Host) -> dict[str, str]:
    """Where sockets bind, ours and those of torch and NCCL, whatever the host's name resolves to."""
    found = {ADDRESS: host.address}
    if host.interface:
        found |= {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": host.interface}
    return found


def _make_rank_variables(rank: int, local_rank: int, world_size: int, head: Host) -> dict[str, str]:
    # Each rank sees one GPU only; a rank uses the first device it sees, whatever its LOCAL_RANK.
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world_size)}
    return ranks | {"MASTER_ADDR": head.address}


def _make_process(
    role: ProcessRole, index: int, seat: _Seat, variables: dict[str, str], threads: int = 1, gpus: tuple[str, ...] = ()
) -> ProcessPlan:
    own = {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ",".join(gpus), ADDRESS: seat.host.address}
    return ProcessPlan(
        name=role if role == "orchestrator" else f"{role}-{index}",
        role=role,
        index=index,
        host=seat.host.name,
        program=("-m", MODULES[role]),
        environment=own | variables,
        gpus=gpus,
        threads=threads,
        node=seat.node,
    )
