"""Who must be there before a run can go on, and who is. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from telescope.config.parts import ClusterSettings
from telescope.records import EnvironmentCard
from telescope.wire.messages import Hello

NAMED = 3
"""So many of those who are missing are named on the terminal, which has one line."""


@dataclass
class Roster:
    """Peers by name. `ranks` are in rank order."""

    workers: tuple[str, ...]
    servers: tuple[str, ...]
    ranks: tuple[str, ...]
    present: dict[str, Hello] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: ClusterSettings, tensor_parallel_size: int = 1) -> Roster:
        """Everyone whom the plan starts. A server takes `tensor_parallel_size` of the inference workers."""
        servers = cluster.inference_num_workers // tensor_parallel_size
        return cls(
            workers=tuple(f"worker-{index}" for index in range(cluster.env_num_workers)),
            servers=tuple(f"server-{index}" for index in range(servers)),
            ranks=tuple(f"trainer-{index}" for index in range(cluster.trainer_num_workers)),
        )

    @property
    def expected(self) -> tuple[str, ...]:
        return self.workers + self.servers + self.ranks

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.expected if name not in self.present)

    @property
    def all_ranks_present(self) -> bool:
        return all(rank in self.present for rank in self.ranks)

    @property
    def can_generate(self) -> bool:
        """Every worker and server is there: the first wave is then spread over all of them, in any order of arrival."""
        return all(name in self.present for name in self.workers + self.servers)

    def lose(self, peer: str) -> Hello:
        """It is gone, and may come again. Gives its last hello."""
        return self.present.pop(peer)

    def admit(self, peer: str, hello: Hello) -> str:
        """Note the peer. Returns why it can't take part, or an empty string."""
        if peer not in self.expected:
            return f"{peer} is not part of this run's plan, which knows {', '.join(self.expected)}"
        self.present[peer] = hello
        for other in self.present.values():
            different = _differing(other.environments, hello.environments) if other.role == hello.role == "worker" else ""
            if different:
                return (
                    f"{other.name} and {peer} load different prompts for environments.{different}: "
                    "give every environment worker the same files and settings"
                )
        return ""


def few(names: Sequence[str]) -> str:
    """`server-0, server-1, server-2 and 297 more`."""
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _differing(some: tuple[EnvironmentCard, ...], others: tuple[EnvironmentCard, ...]) -> str:
    digests = {card.name: card.digest for card in some}
    return next((card.name for card in others if digests.get(card.name) != card.digest), "")
