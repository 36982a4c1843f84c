"""Which node of a Slurm job each process runs on. Pure: the launcher's plan for one large machine, dealt out over the nodes.

Servers go to inference's nodes and ranks to the trainer's, a node filled before the next; orchestrator and workers run where the
batch process does. Refuses a server whose GPUs would lie on two nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from telescope._launch.plan import Host, Plan, PlanError, ProcessPlan, make_plan
from telescope._launch.slurm.allocation import Node

if TYPE_CHECKING:
    from telescope.config.run import RunConfig


def place(config: RunConfig, nodes: Sequence[Node]) -> Plan:
    """Raises `PlanError` with the numbers where the run does not fit."""
    servers = [node for node in nodes if node.group != "trainer"]
    ranks = [node for node in nodes if node.group != "inference"]
    if config.cluster.device == "cpu" or not any(node.gpus for node in nodes):
        return _deal_cpus(config, nodes, servers, ranks)
    return _deal_gpus(config, nodes, servers, ranks)


def _deal_gpus(config: RunConfig, nodes: Sequence[Node], servers: Sequence[Node], ranks: Sequence[Node]) -> Plan:
    size, wanted = config.inference.tensor_parallel_size, config.cluster.inference_num_workers
    cards = [card for node in servers for card in _cards(node)[: node.gpus - node.gpus % size]]
    divided = nodes[0].group is not None
    if divided:
        _enough("cluster.inference_num_workers", wanted, len(cards), "inference's nodes")
        _enough("cluster.trainer_num_workers", config.cluster.trainer_num_workers, sum(n.gpus for n in ranks), "the trainer's nodes")
    used = cards[:wanted]
    others = [card for node in ranks for card in _cards(node) if card not in used]
    machine = Host("the Slurm job", cpus=sum(node.cpus for node in nodes), gpus=(*used, *others))
    plan = make_plan(config, (machine,))
    return msgspec.structs.replace(plan, processes=tuple(_with_cards(process, nodes[0]) for process in plan.processes))


def _deal_cpus(config: RunConfig, nodes: Sequence[Node], servers: Sequence[Node], ranks: Sequence[Node]) -> Plan:
    machine = Host("the Slurm job", cpus=sum(node.cpus for node in nodes))
    plan = make_plan(config, (machine,))
    homes = {"server": _shares(servers, config.servers), "trainer": _shares(ranks, config.cluster.trainer_num_workers)}
    dealt = (
        msgspec.structs.replace(process, host=homes[process.role][process.index] if process.role in homes else nodes[0].name)
        for process in plan.processes
    )
    return msgspec.structs.replace(plan, processes=tuple(dealt))


def _shares(nodes: Sequence[Node], count: int) -> list[str]:
    """Neighbours stay together: 4 processes on 2 nodes are a, a, b, b."""
    return [nodes[index * len(nodes) // count if count > len(nodes) else index].name for index in range(count)]


def _cards(node: Node) -> list[str]:
    return [f"{node.name}:{index}" for index in range(node.gpus)]


def _with_cards(process: ProcessPlan, batch: Node) -> ProcessPlan:
    """GPUs as their node counts them, which is what its step sees."""
    homes = {card.rpartition(":")[0] for card in process.gpus}
    if len(homes) > 1:
        raise PlanError(
            f"{process.name} would have GPUs on {' and '.join(sorted(homes))}: inference.tensor_parallel_size must fit into one "
            "node; lower it, or raise cluster.slurm.gpus_per_node"
        )
    gpus = tuple(card.rpartition(":")[2] for card in process.gpus)
    variables = process.environment | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return msgspec.structs.replace(process, host=next(iter(homes), batch.name), gpus=gpus, environment=variables)


def _enough(setting: str, wanted: int, there: int, where: str) -> None:
    if wanted > there:
        raise PlanError(f"{setting}={wanted} needs as many GPUs, and {where} have {there}: ask for fewer, or for more nodes")
