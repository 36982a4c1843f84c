"""Where each process of a run would be: the placement, in words. Starts nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from telescope._launch.process_plan import Host, LaunchPlan, ProcessPlan
from telescope._launch.slurm.allocation import list_nominal_nodes
from telescope._launch.slurm.allocation import make_hosts as slurm_hosts
from telescope.config.parts import DEFAULT_PORT
from telescope.config.run import RunConfig
from telescope.config.slurm import SlurmSettings

_KIND = re.compile(r"^(?:(\d+)x)?(\d+)(?:x(\d+))?$")
MOST_HOSTS = 10_000


class BadHosts(ValueError):
    """What --hosts says can't be read."""


def hosts_of(text: str, cpus: int) -> tuple[Host, ...]:
    """Hosts to plan for: `4x8` is four of 8 GPUs, `1x0x16,4x8x64` one of 16 cores without and four of 64 cores with 8 GPUs.

    `cpus`: cores of a host where none are given. Raises `BadHosts`.
    """
    hosts: list[Host] = []
    for part in text.split(","):
        found = _KIND.match(part.strip())
        if found is None or not 0 < int(found[1] or 1) + len(hosts) <= MOST_HOSTS:
            raise BadHosts(f"--hosts {text} is no list of hosts: COUNTxGPUS or COUNTxGPUSxCORES, e.g. 4x8 or 1x0x16,4x8x64")
        gpus = tuple(str(gpu) for gpu in range(int(found[2])))
        for _ in range(int(found[1] or 1)):
            hosts.append(Host(f"host-{len(hosts)}", int(found[3] or cpus), gpus, f"host-{len(hosts)}", ""))
    return tuple(hosts)


def nodes_of(settings: SlurmSettings) -> tuple[Host, ...]:
    """Those of a Slurm job as it asks for them. Several have addresses that only Slurm will know."""
    nodes = list_nominal_nodes(settings)
    return slurm_hosts(nodes, {node.name: (node.name, "") for node in nodes} if len(nodes) > 1 else {})


def describe_placement(config: RunConfig, plan: LaunchPlan) -> Iterator[str]:
    """Host by host: processes with their GPUs and threads, then ports and interfaces."""
    hosts = plan.hosts
    cluster = config.cluster
    yield (
        f"{len(hosts)} host{'s' * (len(hosts) != 1)}, on {plan.device}; servers {cluster.inference_placement}, trainer ranks "
        f"{cluster.trainer_placement}:"
    )
    for node, host in enumerate(hosts):
        processes = [process for process in plan.processes if process.node == node]
        yield f"node-{node}: {_host(host)}"
        yield from (f"  {process.name:<14}{_share(process)}" for process in processes)
        taken = {gpu for process in processes for gpu in process.gpus}
        if free := [gpu for gpu in host.gpus if gpu not in taken]:
            yield f"  {'free':<14}GPU {', '.join(free)}"
    yield from _sockets(config, plan)


def _host(host: Host) -> str:
    gpus = f"{len(host.gpus)} GPU{'s' * (len(host.gpus) != 1)}" if host.gpus else "no GPU"
    at = f", {host.address}{f' ({host.interface})' if host.interface else ''}" if host.address != host.name else ""
    side = "" if host.kept_for == "both" else f", for {'servers' if host.kept_for == 'inference' else 'trainer ranks'} alone"
    return f"{host.name}{at}, {host.cpus} core{'s' * (host.cpus != 1)}, {gpus}{side}"


def _share(process: ProcessPlan) -> str:
    threads = f"{process.threads} thread{'s' * (process.threads != 1)}"
    return f"GPU {', '.join(process.gpus)}, {threads}" if process.gpus else threads


def _sockets(config: RunConfig, plan: LaunchPlan) -> Iterator[str]:
    where = "loopback" if len(plan.hosts) == 1 else "each host's own address"
    doors = " and servers for workers" if config.wire.direct else ""
    yield f"Sockets bind to {where}, on free ports: the hub{doors} (CURVE); trainer ranks and weights (not encrypted)."
    if not config.inference.http or config.inference.engine != "vllm":
        return
    base = config.inference.base_port
    wish = {0: "any free port", DEFAULT_PORT: f"ports from {base} on, the next free ones where those are taken"}
    port = wish.get(base, f"port {base} + the server's number")
    host = config.inference.host or "loopback"
    made = "; requests need the key in http.key of the run directory" if config.inference.makes_http_key else ""
    yield f"HTTP of servers: {host}, {port}{'; requests need the API key' if config.inference.api_key else made}."
