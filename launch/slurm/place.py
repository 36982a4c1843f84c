"""The nodes of a Slurm job as the plan's hosts. Pure: addresses are looked up by whoever asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from telescope._launch.plan import Host
from telescope._launch.slurm.allocation import Node

LOOPBACK = ("127.0.0.1", "lo")


def hosts_of(nodes: Sequence[Node], networks: Mapping[str, tuple[str, str]] = {}) -> tuple[Host, ...]:
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
