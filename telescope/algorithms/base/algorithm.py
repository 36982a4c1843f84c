"""The least an algorithm is: an advantage rule, a loss, and what it asks of those who call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from telescope.algorithms.base.rollouts import RolloutRules
from telescope.algorithms.base.row import LossOutput, PackedRow
from telescope.records import Denominators

if TYPE_CHECKING:
    import numpy as np


class Algorithm(RolloutRules):
    """Base of all algorithms. Subclasses give `advantages` and `loss`."""

    smallest_group: ClassVar[int] = 2
    """Rollouts of one prompt that the advantage rule needs at least."""

    @property
    def needs_old(self) -> bool:
        """Whether the loss reads `PackedRow.old`: with several updates a step, that costs a forward pass before them."""
        return True

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads `PackedRow.reference`: that costs a frozen copy of the base model, and its forward pass."""
        return False

    @property
    def trains_entropy(self) -> bool:
        """Whether the gradient flows through `PackedRow.entropy`."""
        return False

    def turn_returns(self, rewards: Sequence[float]) -> Sequence[float] | None:
        """By what each turn of a rollout is compared with the same turn of the others, from the rewards of its turns; None:
        whole rollouts are compared."""
        return None

    def advantages(self, rewards: np.ndarray, groups: np.ndarray, *, group_size: int) -> np.ndarray:
        """One float64 advantage a rollout [N] from rewards [N] and group numbers [N]; `group_size` as configured.

        The batch is the kept groups and those discarded for equal rewards since the batch before. Where `turn_returns` gives
        numbers, N counts turns: `rewards` are these numbers, and the i-th turns of a group have one group number.
        """
        raise NotImplementedError

    def loss(self, row: PackedRow, denominators: Denominators, *, max_tokens: int) -> LossOutput:
        """The row's share of the loss over the whole optimiser update (rule 2 of docs/architecture.md)."""
        raise NotImplementedError

    def group_errors(self, *, group_size: int, min_group_size: int) -> list[str]:
        """Sentences that refuse group sizes with which this algorithm cannot compare rewards; empty if it can."""
        name, least = type(self).__name__, self.smallest_group
        if group_size < least:
            return [f"rollout.group_size={group_size} must be at least {least}: {name} compares rollouts of one prompt"]
        if min_group_size < min(2, group_size):
            return [
                f"rollout.min_group_size={min_group_size} must be at least 2 where rollout.group_size={group_size}: "
                f"{name} cannot compare a lone survivor with anything"
            ]
        return []

    def warnings(self, *, asynchronous: bool, updates: int = 1) -> list[str]:
        """Sentences about settings that run but do not do what they seem to. `updates` is optimiser updates a step."""
        return []
