"""What the shipped algorithms share: masks first, then token losses, corrections, penalties, aggregation and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from telescope.algorithms.base.algorithm import Algorithm
from telescope.algorithms.base.corrections import SHIPPED, Correction, Tis, read_list
from telescope.algorithms.base.row import LossOutput, PackedRow, TokenLosses, one_a_token
from telescope.maths import divergences, metrics, ratios, turn_credit
from telescope.maths.advantages import Groups
from telescope.maths.aggregation import Aggregation, aggregate
from telescope.maths.divergences import Estimator
from telescope.records import Denominators

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

AdvantageNorm = Literal["group", "batch", "none"]


class PolicyLoss(Algorithm):
    """A subclass gives `token_losses` and `aggregation`."""

    norms: ClassVar[tuple[AdvantageNorm, ...]] = ("group", "batch", "none")
    """Values of `advantage_norm` that keep the algorithm what it is."""
    weighted: ClassVar[bool] = True
    """Whether there is a loss a token, which a weight a token can multiply."""
    own_ratio: ClassVar[bool] = False
    """Whether the loss itself is made of the ratio, without `use_ppo_clip`."""
    known_corrections: ClassVar[Mapping[str, type[Correction]]] = SHIPPED
    """What `corrections` may name. An algorithm of your own adds its own here."""

    advantage_norm: AdvantageNorm = "group"
    """What rewards minus their group's mean are divided by: the standard deviation of the group, of the batch, or nothing."""
    credit: Literal["rollout", "turn"] = "rollout"
    """Whether all tokens of a rollout share one advantage, or each turn has its own: its return (turn_discount) against that of
    the same turn in the group's other rollouts. Environments may give rewards by turn; what they don't is the last turn's."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """With credit=turn: what a reward counts for the turn before it. 1: all that follows counts in full; 0: a turn's own
    reward alone."""
    use_ppo_clip: bool = False
    """PPO's clipped surrogate. Only where the algorithm brings no ratio of its own."""
    ppo_clip_ref_logprobs: Literal["rollout", "batch"] | None = None
    """Reference of the ratio: the sampler's log-probs, or the trainer's own before the step's first update; null: rollout, or
    batch where a weight (use_tis, tis, icepop) corrects for the sampler already."""
    use_tis: bool = False
    """Weight each token by min(exp(clamp(old - rollout)), tis_cap), frozen over the updates of a step."""
    tis_cap: float = Field(default=2.0, gt=0)
    """Largest weight of a token under use_tis."""
    tis_logprob_clamp: float = Field(default=20.0, gt=0)
    """Largest difference of log-probs that use_tis exponentiates, either way."""
    corrections: tuple[SerializeAsAny[Correction], ...] = ()
    """More weights on token losses, multiplied together: tis, icepop, sequence_mask, geometric_mask, each with its settings."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Entropy bonus: so much times the entropy of each token's distribution is taken off its loss."""
    kl_rollout_coef: float = Field(default=0.0, ge=0)
    """Penalty on the divergence from the policy that sampled."""
    kl_rollout_estimator: Estimator = "k3"
    """How kl_rollout_coef's divergence is estimated from a token."""
    kl_ref_coef: float = Field(default=0.0, ge=0)
    """Penalty on the divergence from the base model, of which the trainer then keeps a frozen copy."""
    kl_ref_estimator: Estimator = "k3"
    """How kl_ref_coef's divergence is estimated from a token."""

    @property
    def aggregation(self) -> Aggregation:
        """How token losses become one loss."""
        raise NotImplementedError

    def token_losses(self, row: PackedRow, ratio: Tensor) -> TokenLosses:
        """Losses [T] of a cleaned row; `ratio` [T] is current over reference, with gradient."""
        raise NotImplementedError

    @property
    def all_corrections(self) -> tuple[Correction, ...]:
        """Those of `use_tis` and of the list."""
        tis = (Tis(cap=self.tis_cap, clamp=self.tis_logprob_clamp),) if self.use_tis else ()
        return (*tis, *self.corrections)

    @property
    def _named_corrections(self) -> tuple[tuple[str, Correction], ...]:
        """Each with the words that ask for it."""
        listed = (correction.name for correction in self.corrections)
        return tuple(zip(("use_tis=true", *listed) if self.use_tis else listed, self.all_corrections, strict=True))

    @property
    def needs_old(self) -> bool:
        return bool(self.all_corrections) or self.ratio_reference == "batch"

    @property
    def has_ratio(self) -> bool:
        """Whether the loss is made of the ratio."""
        return self.own_ratio or self.use_ppo_clip

    @property
    def ratio_reference(self) -> Literal["rollout", "batch"]:
        """`ppo_clip_ref_logprobs`, or what stands for its null."""
        if self.ppo_clip_ref_logprobs is not None:
            return self.ppo_clip_ref_logprobs
        weighted = any(correction.reweights for correction in self.all_corrections)
        return "batch" if weighted and self.has_ratio else "rollout"

    @property
    def needs_reference(self) -> bool:
        return self.kl_ref_coef > 0

    @property
    def trains_entropy(self) -> bool:
        return self.entropy_coef > 0

    def turn_returns(self, rewards: Sequence[float]) -> Sequence[float] | None:
        return turn_credit.compute_returns(rewards, self.turn_discount) if self.credit == "turn" else None

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
        """Token losses, their weights, the penalties, and the share of the whole update."""
        clean = row.cleaned()
        ratio = ratios.log_ratio(clean.current, self.reference(clean)).exp()
        result = self.token_losses(clean, ratio)
        own = one_a_token(result.losses, clean, f"{type(self).__name__}.token_losses")
        losses, weight_sums = self.corrected(own, clean)
        losses, penalty_sums = self.penalised(losses, clean)
        loss = aggregate(
            losses,
            clean.mask,
            clean.segments,
            clean.sequence_tokens,
            how=self.aggregation,
            denominators=denominators,
            max_tokens=max_tokens,
        )
        measured = {**_policy_sums(clean, ratio), **result.sums, **weight_sums, **penalty_sums}
        sums = {"loss": loss.detach().double(), **measured}
        return LossOutput(loss=loss, sums=sums, peaks=metrics.extremes("ratio", ratio, clean.mask))

    def reference(self, row: PackedRow) -> Tensor:
        """[T] log-probs that the ratio divides by, without gradient."""
        return (row.rollout if self.ratio_reference == "rollout" else row.before).detach()

    def corrected(self, losses: Tensor, row: PackedRow) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses [T] times the weights of all corrections, and what is measured of these."""
        total = losses.new_ones(losses.shape)
        sums: dict[str, Tensor] = {}
        for correction in self.all_corrections:
            weight = one_a_token(correction.weight(row).detach(), row, f"{type(correction).__name__}.weight")
            sums |= correction.sums(weight, row)
            total = total * weight
        return losses * total, {**sums, **metrics.mean_sums("masked_fraction", total == 0, row.mask)}

    def penalised(self, losses: Tensor, row: PackedRow) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses [T] with the penalties and the bonus that are asked for, on every trained token, dropped or not."""
        sums: dict[str, Tensor] = {}
        if self.kl_rollout_coef > 0:
            divergence = divergences.estimate(row.current, row.rollout, self.kl_rollout_estimator)
            losses = losses + self.kl_rollout_coef * divergence
            sums |= metrics.mean_sums("kl_rollout", divergence, row.mask)
        if self.kl_ref_coef > 0:
            if row.reference is None:
                raise ValueError(
                    f"kl_ref_coef={self.kl_ref_coef} needs log-probs of the base model, which this backend does not give"
                )
            divergence = divergences.estimate(row.current, row.reference, self.kl_ref_estimator)
            losses = losses + self.kl_ref_coef * divergence
            sums |= metrics.mean_sums("kl_ref", divergence, row.mask)
        if self.entropy_coef > 0:
            if row.entropy is None:
                raise ValueError(f"entropy_coef={self.entropy_coef} needs entropies, which this backend does not give")
            losses = losses - self.entropy_coef * row.entropy
        return losses, sums

    def warnings(self, *, asynchronous: bool, updates: int = 1) -> list[str]:
        """No correction of asynchronous data, one that is always 1, a penalty that pulls nowhere, or a reference that was
        chosen for the user."""
        name, weight = type(self).__name__, bool(self.all_corrections)
        ratio, chosen = self.has_ratio, self.ppo_clip_ref_logprobs is None
        found = [
            f"{name}: {which}_estimator=k1 has a gradient of mean 0, so {which}_coef={getattr(self, which + '_coef')} adds "
            "noise and pulls nowhere: use k2 or k3"
            for which in ("kl_rollout", "kl_ref")
            if getattr(self, which + "_coef") > 0 and getattr(self, which + "_estimator") == "k1"
        ]
        if chosen and self.ratio_reference == "batch":
            weights = " and ".join(named for named, correction in self._named_corrections if correction.reweights)
            idle = "; with one update a step that ratio is always 1, and the clip binds nothing" if updates == 1 else ""
            found.append(
                f"{name}: {weights} corrects for the sampler, so the ratio compares with the trainer's own log-probs before "
                f"the step (algorithm.ppo_clip_ref_logprobs=batch){idle}. For a ratio to the sampler instead, "
                f"{_without(weights)}"
            )
        if ratio and self.ratio_reference == "batch" and updates == 1 and not weight:
            found.append(
                f"{name}: with ppo_clip_ref_logprobs=batch and one update a step the ratio is always 1, so clipping corrects "
                "nothing: set ppo_clip_ref_logprobs=rollout" + (", or use_tis=true" if self.weighted else "")
            )
        elif asynchronous and not ratio and not weight:
            found.append(
                f"{name} trains on samples of older weights without any correction, which is biased: set use_tis=true or "
                "use_ppo_clip=true, or orchestrator.max_async_rollout=0"
            )
        return found

    @field_validator("corrections", mode="before")
    @classmethod
    def _corrections_by_name(cls, entries: Any) -> tuple[Correction, ...]:
        return read_list(entries, cls.known_corrections)

    @model_validator(mode="after")
    def _norm_is_allowed(self) -> Self:
        if self.advantage_norm not in self.norms:
            raise ValueError(
                f"advantage_norm={self.advantage_norm} would make {type(self).__name__} another algorithm: "
                f"use {' or '.join(self.norms)}"
            )
        return self

    @model_validator(mode="after")
    def _credit_is_allowed(self) -> Self:
        if self.credit == "turn" and not self.weighted:
            raise ValueError(
                f"credit=turn is not possible with {type(self).__name__}, whose loss is one a sequence, with one advantage: "
                "leave credit=rollout, or take another algorithm"
            )
        if self.credit == "rollout" and self.turn_discount != 1.0:
            raise ValueError(f"turn_discount={self.turn_discount} does nothing with credit=rollout: set credit=turn")
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
    def _corrections_go_together(self) -> Self:
        listed, named = [correction.name for correction in self.corrections], self._named_corrections
        twice = sorted({name for name in listed if listed.count(name) > 1})
        if twice:
            raise ValueError(f"corrections names {twice[0]} more than once: keep one entry of it")
        weights = [name for name, correction in named if correction.reweights]
        if len(weights) > 1:
            raise ValueError(f"{' and '.join(weights)} both weight tokens by trainer over sampler: keep one of them")
        by_token = [name for name, correction in named if not correction.whole_sequences]
        if by_token and not self.weighted:
            raise ValueError(
                f"{by_token[0]} is not possible with {type(self).__name__}, whose loss is one a sequence, not one a token: "
                "leave it out, its ratio to the sampler (ppo_clip_ref_logprobs=rollout) is the correction"
            )
        if weights and self.has_ratio and self.ratio_reference == "rollout":
            raise ValueError(
                f"{weights[0]} with a ratio to the sampler (ppo_clip_ref_logprobs=rollout) would correct twice: set "
                f"ppo_clip_ref_logprobs=batch, or null, or {_without(weights[0])}"
            )
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


def _without(weight: str) -> str:
    return "set use_tis=false" if weight == "use_tis=true" else f"leave {weight} out"


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
