"""What a step that is run again is asked: where its loss or its gradient is no finite number. Plain numbers, no torch.

Owns the findings. A backend that gets a `Probe` in its job fills it; one without pays nothing for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SampleFinding:
    """A trajectory that alone gives something that is no finite number. `item` is its place in the shard of rank `rank`."""

    rank: int
    item: int
    loss: float
    """Its own share of the update's loss."""
    logprobs: int
    """Log-probs of its sampled tokens under the weights in training that are no finite numbers."""
    first: int | None
    """The first such token, counted from the trajectory's own first; None where there is none."""
    gradient: bool
    """Whether its gradient is finite."""


@dataclass(frozen=True)
class RowFinding:
    """A packed row (and those of the same place on the other ranks) that gives something that is no finite number."""

    place: int
    trajectories: int
    loss: float
    gradient: bool


@dataclass(frozen=True)
class UpdateFinding:
    """One update whose gradient is not finite."""

    minibatch: int
    norm: float
    parameters: tuple[tuple[str, int], ...]
    """Each parameter with entries that are no finite numbers, and how many."""
    of: int
    """Parameters that are trained."""
    rows: tuple[RowFinding, ...]
    samples: tuple[SampleFinding, ...]


@dataclass
class Probe:
    """`loss_scale`: what the recorded step multiplied its loss by (float16), where that is known."""

    loss_scale: float | None = None
    found: list[UpdateFinding] = field(default_factory=list)
