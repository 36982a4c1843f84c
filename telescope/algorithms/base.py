"""What an algorithm is: settings, one advantage rule and one loss. Pure: numpy and tensor methods, no torch import.

A file of this folder with one `Algorithm` subclass is an algorithm of that file's name. `PolicyLoss` holds what the shipped
seven share: where the masks are applied, the corrections, the aggregation and the metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from telescope.maths import metrics, ratios
from telescope.maths.advantages import Groups
from telescope.maths.aggregation import Aggregation, aggregate
from telescope.records import Denominators
from telescope.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

AdvantageNorm = Literal["group", "batch", "none"]


@dataclass(frozen=True)
class PackedRow:
    """What the loss sees of one packed row of T tokens. Masked places may hold anything, NaN included."""

    current: Tensor  # [T] float32 log-prob of the taken token under the weights in training, carries the gradient
    old: Tensor | None  # [T] the same before the first update of the step; None = current, detached
    rollout: Tensor  # [T] float32 sampling log-prob
    mask: Tensor  # [T] bool, True where the policy sampled the token
    advantages: Tensor  # [T] float32, constant over a rollout
    segments: Tensor  # [T] int64 index of the trajectory within the row, 0..S-1; filler has its own last segment
    sequence_tokens: Tensor  # [S] float32 trained tokens of the whole rollout each segment belongs to (n_i)
    entropy: Tensor | None  # [T] float32, detached unless an entropy bonus asks for it

    def cleaned(self) -> PackedRow:
        """The same with 0 at every masked place, before any arithmetic: NaN there reaches neither loss nor gradient."""
        return replace(
            self,
            current=self.current.where(self.mask, 0.0),
            old=self.before.where(self.mask, 0.0),
            rollout=self.rollout.where(self.mask, 0.0),
            advantages=self.advantages.where(self.mask, 0.0),
            entropy=None if self.entropy is None else self.entropy.where(self.mask, 0.0),
        )

    @property
    def before(self) -> Tensor:
        """[T] log-prob before the first update of the step, without gradient."""
        return (self.current if self.old is None else self.old).detach()


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

    loss: Tensor
    sums: dict[str, Tensor]
    peaks: dict[str, Tensor]


class Algorithm(Settings):
    """Base of all algorithms. Subclasses give `advantages` and `loss`."""

    smallest_group: ClassVar[int] = 2
    """Rollouts of one prompt that the advantage rule needs at least."""

    def advantages(self, rewards: np.ndarray, groups: np.ndarray, *, group_size: int) -> np.ndarray:
        """One float64 advantage a rollout [N] from rewards [N] and group numbers [N]; `group_size` as configured.

        The batch is the kept groups and those discarded for equal rewards since the batch before.
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


class PolicyLoss(Algorithm):
    """What the shipped algorithms share. A subclass gives `token_losses` and `aggregation`."""

    norms: ClassVar[tuple[AdvantageNorm, ...]] = ("group", "batch", "none")
    """Values of `advantage_norm` that keep the algorithm what it is."""
    weighted: ClassVar[bool] = True
    """Whether there is a loss a token, which a weight a token can multiply."""
    own_ratio: ClassVar[bool] = False
    """Whether the loss itself is made of the ratio, without `use_ppo_clip`."""

    advantage_norm: AdvantageNorm = "group"
    """What rewards minus their group's mean are divided by: the standard deviation of the group, of the batch, or nothing."""
    use_ppo_clip: bool = False
    """PPO's clipped surrogate. Only where the algorithm brings no ratio of its own."""
    ppo_clip_ref_logprobs: Literal["rollout", "batch"] = "rollout"
    """Reference of the ratio: the sampler's log-probs, or the trainer's own before the step's first update."""
    use_tis: bool = False
    """Weight each token by min(exp(clamp(old - rollout)), tis_cap), frozen over the updates of a step."""
    tis_cap: float = Field(default=2.0, gt=0)
    """Largest weight of a token under use_tis."""
    tis_logprob_clamp: float = Field(default=20.0, gt=0)
    """Largest difference of log-probs that use_tis exponentiates, either way."""
    use_icepop: bool = False
    """Weight each token by k = exp(old - rollout) where icepop_low <= k <= icepop_high, and by 0 elsewhere."""
    icepop_low: float = Field(default=0.5, ge=0)
    """Smallest k that use_icepop lets count."""
    icepop_high: float = Field(default=5.0, gt=0)
    """Largest k that use_icepop lets count."""

    @property
    def aggregation(self) -> Aggregation:
        """How token losses become one loss."""
        raise NotImplementedError

    def token_losses(self, row: PackedRow, ratio: Tensor) -> TokenLosses:
        """Losses [T] of a cleaned row; `ratio` [T] is current over reference, with gradient."""
        raise NotImplementedError

    def advantages(self, rewards: np.ndarray, groups: np.ndarray, *, group_size: int) -> np.ndarray:
        """By `advantage_norm`; see docs/algorithms.md."""
        batch = Groups(rewards, groups)
        match self.advantage_norm:
            case "group":
                return batch.standardised()
            case "batch":
                return batch.over_batch(batch.centred())
            case "none":
                return batch.centred()

    def loss(self, row: PackedRow, denominators: Denominators, *, max_tokens: int) -> LossOutput:
        """Token losses, their weights, and the share of the whole update."""
        clean = row.cleaned()
        ratio = ratios.log_ratio(clean.current, self.reference(clean)).exp()
        result = self.token_losses(clean, ratio)
        losses, weight_sums = self.corrected(result.losses, clean)
        loss = aggregate(
            losses,
            clean.mask,
            clean.segments,
            clean.sequence_tokens,
            how=self.aggregation,
            denominators=denominators,
            max_tokens=max_tokens,
        )
        sums = {"loss": loss.detach().double(), **_policy_sums(clean, ratio), **result.sums, **weight_sums}
        return LossOutput(loss=loss, sums=sums, peaks=metrics.extremes("ratio", ratio, clean.mask))

    def reference(self, row: PackedRow) -> Tensor:
        """[T] log-probs that the ratio divides by, without gradient."""
        return (row.rollout if self.ppo_clip_ref_logprobs == "rollout" else row.before).detach()

    def corrected(self, losses: Tensor, row: PackedRow) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses [T] times the weight of trainer over sampler, if one is asked for, and its metrics."""
        if self.use_tis:
            weight = ratios.tis_weight(row.before, row.rollout, cap=self.tis_cap, clamp=self.tis_logprob_clamp)
            capped = metrics.mean_sums("tis_capped_fraction", weight >= self.tis_cap, row.mask)
            return losses * weight, {**metrics.mean_sums("tis_weight", weight, row.mask), **capped}
        if self.use_icepop:
            weight = ratios.icepop_weight(row.before, row.rollout, low=self.icepop_low, high=self.icepop_high)
            return losses * weight, metrics.mean_sums("icepop_masked_fraction", weight == 0, row.mask)
        return losses, {}

    def warnings(self, *, asynchronous: bool, updates: int = 1) -> list[str]:
        """No correction of asynchronous data, or one that is always 1."""
        name, weight = type(self).__name__, self.use_tis or self.use_icepop
        ratio = self.own_ratio or self.use_ppo_clip
        if ratio and self.ppo_clip_ref_logprobs == "batch" and updates == 1 and not weight:
            return [
                f"{name}: with ppo_clip_ref_logprobs=batch and one update a step the ratio is always 1, so clipping corrects "
                "nothing: set ppo_clip_ref_logprobs=rollout" + (", or use_tis=true" if self.weighted else "")
            ]
        if asynchronous and not ratio and not weight:
            return [
                f"{name} trains on samples of older weights without any correction, which is biased: set use_tis=true or "
                "use_ppo_clip=true, or orchestrator.max_async_rollout=0"
            ]
        return []

    @model_validator(mode="after")
    def _norm_is_allowed(self) -> Self:
        if self.advantage_norm not in self.norms:
            raise ValueError(
                f"advantage_norm={self.advantage_norm} would make {type(self).__name__} another algorithm: "
                f"use {' or '.join(self.norms)}"
            )
        return self

    @model_validator(mode="after")
    def _clip_is_allowed(self) -> Self:
        if self.own_ratio and self.use_ppo_clip:
            raise ValueError(
                f"use_ppo_clip=true is not possible with {type(self).__name__}, which treats its ratio in its own way: "
                "leave it false"
            )
        return self

    @model_validator(mode="after")
    def _weights_are_allowed(self) -> Self:
        asked = [name for name in ("use_tis", "use_icepop") if getattr(self, name)]
        if len(asked) == 2:
            raise ValueError("use_tis and use_icepop both weight tokens by trainer over sampler: set one of them to false")
        if asked and not self.weighted:
            raise ValueError(
                f"{asked[0]}=true is not possible with {type(self).__name__}, whose loss is one a sequence, not one a token: "
                "leave it false, its ratio to the sampler (ppo_clip_ref_logprobs=rollout) is the correction"
            )
        if asked and (self.own_ratio or self.use_ppo_clip) and self.ppo_clip_ref_logprobs == "rollout":
            raise ValueError(
                f"{asked[0]}=true with a ratio to the sampler would correct twice: set ppo_clip_ref_logprobs=batch, "
                f"or {asked[0]}=false"
            )
        if self.use_icepop and self.icepop_low >= self.icepop_high:
            raise ValueError(f"icepop_low={self.icepop_low} must be below icepop_high={self.icepop_high}")
        return self


class PolicyGradient(PolicyLoss):
    """-log p * A, or PPO's clipped surrogate. What the algorithms that only differ in their advantage share."""

    clip_low: float = Field(default=0.4, ge=0, le=1)
    """How far below 1 the ratio counts, with use_ppo_clip."""
    clip_high: float = Field(default=0.5, ge=0)
    """With use_ppo_clip the ratio counts within [1 - clip_low, 1 + clip_high]."""
    dual_clip_c: float | None = Field(default=None, gt=1)
    """With use_ppo_clip: where A < 0 the loss of a token is at most this times |A| (3 is usual); null: no such bound."""

    def token_losses(self, row: PackedRow, ratio: Tensor) -> TokenLosses:
        """-p A, whose gradient does not depend on the ratio; or the clipped surrogate."""
        if not self.use_ppo_clip:
            return TokenLosses(-row.current * row.advantages)
        losses = ratios.clipped_surrogate(ratio, row.advantages, self.clip_low, self.clip_high)
        below, above = ratios.clip_binds(ratio, row.advantages, self.clip_low, self.clip_high)
        sums = clip_sums(below, above, row.mask)
        if self.dual_clip_c is not None:
            losses, binds = ratios.dual_clip(losses, row.advantages, self.dual_clip_c)
            sums |= metrics.mean_sums("dual_clip_fraction", binds, row.mask)
        return TokenLosses(losses, sums)

    @model_validator(mode="after")
    def _dual_clip_is_allowed(self) -> Self:
        if self.dual_clip_c is None:
            return self
        if not self.use_ppo_clip:
            raise ValueError(
                f"dual_clip_c={self.dual_clip_c} bounds the clipped loss: set use_ppo_clip=true, or dual_clip_c=null"
            )
        if self.dual_clip_c <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip_c={self.dual_clip_c} must be above 1 + clip_high = {1 + self.clip_high}, or it would bind "
                "before the clip does; 3 is usual"
            )
        return self


def clip_sums(below: Tensor, above: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Shares of trained tokens without gradient because the ratio left its interval: in all, below and above."""
    return {
        **metrics.mean_sums("clip_fraction", below | above, mask),
        **metrics.mean_sums("clip_fraction_low", below, mask),
        **metrics.mean_sums("clip_fraction_high", above, mask),
    }


def _policy_sums(row: PackedRow, ratio: Tensor) -> dict[str, Tensor]:
    """How far trainer and sampler are apart, whatever the loss does about it."""
    gap = (row.rollout - row.current).detach()
    entropy = {} if row.entropy is None else metrics.mean_sums("entropy", row.entropy, row.mask)
    return {
        **metrics.mean_sums("ratio", ratio, row.mask, spread=True),
        **metrics.mean_sums("kl_divergence_inference", gap, row.mask),
        **metrics.mean_sums("logprob_difference", gap.abs(), row.mask),
        **entropy,
    }
