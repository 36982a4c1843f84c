"""What a loss is given, and what it gives back. Tensors of one packed row; no formula stands here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PackedRow:
    """What the loss sees of one packed row of T tokens. Masked places may hold anything, NaN included."""

    current: Tensor  # [T] float32 log-prob of the taken token under the weights in training, carries the gradient
    old: Tensor | None  # [T] the same before the first update of the step; None = current, detached
    rollout: Tensor  # [T] float32 sampling log-prob
    mask: Tensor  # [T] bool, True where the policy sampled the token
    advantages: Tensor  # [T] float32, of the rollout, or of its turns at sampled tokens and 0 at others
    segments: Tensor  # [T] int64 index of the trajectory within the row, 0..S-1; filler has its own last segment
    sequence_tokens: Tensor  # [S] float32 trained tokens of the whole rollout each segment belongs to (n_i)
    entropy: Tensor | None  # [T] float32, detached unless `Algorithm.trains_entropy`
    reference: Tensor | None = None  # [T] float32 log-prob under the frozen base model; only if `needs_reference`

    def cleaned(self) -> PackedRow:
        """The same with 0 at every masked place, before any arithmetic: NaN there reaches neither loss nor gradient."""

        def clean(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.where(self.mask, 0.0)

        return replace(
            self,
            current=self.current.where(self.mask, 0.0),
            old=self.before.where(self.mask, 0.0),
            rollout=self.rollout.where(self.mask, 0.0),
            advantages=self.advantages.where(self.mask, 0.0),
            entropy=clean(self.entropy),
            reference=clean(self.reference),
        )

    @property
    def before(self) -> Tensor:
        """[T] log-prob before the first update of the step, without gradient."""
        return (self.current if self.old is None else self.old).detach()

    @property
    def segment_count(self) -> int:
        return self.sequence_tokens.shape[0]


def one_a_token(values: Tensor, row: PackedRow, whose: str) -> Tensor:
    """`values` if they are [T]; any other shape would be broadcast into a wrong loss. Raises `ValueError` naming `whose`."""
    if values.shape != row.mask.shape:
        raise ValueError(
            f"{whose} gave a tensor of shape {list(values.shape)}: it must give one number for each of the row's tokens, "
            f"{list(row.mask.shape)}"
        )
    return values


@dataclass(frozen=True)
class TokenLosses:
    """Losses token by token, and what is worth measuring about them; see `telescope.maths.metrics` for the names."""

    losses: Tensor  # [T]
    sums: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """`loss` is this row's share of the update's loss: shares of all rows and ranks add up to it.

    `sums` are added over rows and ranks, `peaks` take the largest, and `telescope.maths.metrics.finish` turns both into
    metrics. All are float64 scalars, detached, still on the device; every row of a run has the same names in the same order.
    """

    loss: Tensor  # scalar
    sums: dict[str, Tensor]
    peaks: dict[str, Tensor]

    def __post_init__(self) -> None:
        if self.loss.ndim:
            raise ValueError(f"a loss of shape {list(self.loss.shape)} is not a row's share: add it up to one number")
