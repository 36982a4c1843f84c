"""A ragged batch of made-up log-probs, and its loss and gradient for any packing, through the path the trainer takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from telescope.algorithms.base import Algorithm, PackedRow
from telescope.algorithms.cispo import CISPO
from telescope.algorithms.dr_grpo import DrGRPO
from telescope.algorithms.grpo import GRPO
from telescope.algorithms.gspo import GSPO
from telescope.algorithms.reinforce_pp import ReinforcePP
from telescope.algorithms.rloo import RLOO
from telescope.algorithms.sapo import SAPO
from telescope.maths import metrics, minibatches, packing
from telescope.records import Denominators, TrainItem, Trajectory

MAX_TOKENS = 16
CORRECTED = {"ppo_clip_ref_logprobs": "batch", "use_tis": True}
MASKS = ({"name": "sequence_mask", "low": 0.5, "high": 2.0}, {"name": "geometric_mask", "low": 0.9, "high": 1.1})
VARIANTS: dict[str, Algorithm] = {
    "grpo": GRPO(),
    "grpo clipped": GRPO(use_ppo_clip=True, dual_clip_c=1.6),
    "grpo seq mean, clip and TIS": GRPO(use_ppo_clip=True, loss_aggregation="seq_mean_token_mean", **CORRECTED),
    "grpo IcePop": GRPO(corrections=[{"name": "icepop"}], advantage_norm="batch"),
    "rloo TIS": RLOO(use_tis=True),
    "rloo seq mean": RLOO(loss_aggregation="seq_mean_token_mean", advantage_norm="batch"),
    "reinforce_pp": ReinforcePP(loss_aggregation="seq_mean_token_mean"),
    "reinforce_pp token mean, clipped": ReinforcePP(use_ppo_clip=True),
    "dr_grpo token_mean": DrGRPO(),
    "dr_grpo token_sum_norm": DrGRPO(dr_grpo_loss_agg_mode="token_sum_norm"),
    "cispo": CISPO(),
    "cispo TIS": CISPO(loss_aggregation="seq_mean_token_mean", clip_low=0.2, **CORRECTED),
    "gspo": GSPO(clip_low=0.1, clip_high=0.1),
    "sapo": SAPO(),
    "sapo token mean, TIS": SAPO(loss_aggregation="token_mean", **CORRECTED),
    "grpo clipped, masks of sequences": GRPO(use_ppo_clip=True, corrections=MASKS),
    "gspo, masks of sequences": GSPO(clip_low=0.1, clip_high=0.1, corrections=MASKS),
    "rloo IcePop and a mask": RLOO(corrections=[{"name": "icepop", "low": 0.8, "high": 1.2}, MASKS[1]], entropy_coef=0.01),
    "grpo, penalties of all kinds": GRPO(
        loss_aggregation="seq_mean_token_mean",
        kl_ref_coef=0.04,
        kl_rollout_coef=0.3,
        kl_rollout_estimator="k2",
        entropy_coef=0.2,
    ),
    "dr_grpo, k1 and a bonus": DrGRPO(
        dr_grpo_loss_agg_mode="token_sum_norm", kl_ref_coef=0.1, kl_ref_estimator="k1", entropy_coef=0.1
    ),
    "gspo, k3 to the base": GSPO(kl_ref_coef=0.1),
}


@dataclass(frozen=True)
class Batch:
    """Trajectories with their items, and the trainer's log-probs of each token before and under training."""

    trajectories: list[Trajectory]
    items: list[TrainItem]
    current: list[np.ndarray]
    old: list[np.ndarray]
    reference: list[np.ndarray]
    denominators: Denominators

    @property
    def lengths(self) -> list[int]:
        return [item.length for item in self.items]

    def picked(self, indices: Sequence[int]) -> Batch:
        """A rank's part. The denominators stay those of the whole update."""
        return replace(
            self,
            trajectories=[self.trajectories[index] for index in indices],
            items=[self.items[index] for index in indices],
            current=[self.current[index] for index in indices],
            old=[self.old[index] for index in indices],
            reference=[self.reference[index] for index in indices],
        )


def make_batch(algorithm: Algorithm, seed: int, *, branches: bool = True, gap: float = 0.3) -> Batch:
    """Some groups of some rollouts, some of two branches, some without a trained token. Float32."""
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(3), random.integers(2, 5, 3))
    rewards = np.round(random.normal(size=len(groups)), 1)
    rewards[groups == 0] = 0.1
    advantages = algorithm.advantages(rewards, groups, group_size=8)
    trajectories, owners = [], []
    for rollout in range(len(groups)):
        for _ in range(2 if branches and random.random() < 0.3 else 1):
            trajectories.append(_trajectory(random, trained=rollout != 1))
            owners.append(rollout)
    trained = np.bincount(owners, weights=[each.trained_tokens for each in trajectories]).astype(int)
    items = [
        TrainItem(
            rollout_id=owner,
            group_id=int(groups[owner]),
            sequence=owner,
            length=len(trajectory.ids),
            advantage=float(advantages[owner]),
            sequence_tokens=int(trained[owner]),
            temperature=1.0,
        )
        for owner, trajectory in zip(owners, trajectories, strict=True)
    ]
    old = [_near(random, np.nan_to_num(each.logprobs, nan=-1.0), gap) for each in trajectories]
    return Batch(
        trajectories=trajectories,
        items=items,
        current=[_near(random, each, gap) for each in old],
        old=old,
        reference=[_near(random, each, gap) for each in old],
        denominators=minibatches.denominators(trained.tolist(), groups.tolist()),
    )


def _trajectory(random: np.random.Generator, *, trained: bool) -> Trajectory:
    length = int(random.integers(2, 24))
    mask = (random.random(length) < 0.7) & trained
    mask[0] = False
    logprobs = -random.exponential(1.0, length).astype(np.float32)
    return Trajectory(
        ids=random.integers(1, 99, length).astype(np.int32),
        mask=mask.astype(np.uint8),
        logprobs=np.where(mask, logprobs, np.nan).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
    )


def _near(random: np.random.Generator, logprobs: np.ndarray, gap: float) -> np.ndarray:
    return np.minimum(logprobs + random.normal(scale=gap, size=len(logprobs)), 0.0).astype(np.float32)


@dataclass(frozen=True)
class Outcome:
    """`loss` a float, `gradients` by trajectory, `metrics` finished."""

    loss: float
    gradients: list[np.ndarray]
    metrics: dict[str, float]


def outcome(algorithm: Algorithm, batch: Batch, rows: Sequence[packing.Row], *, rubbish: float = np.nan) -> Outcome:
    """Loss, gradient and metrics over `rows`, backward after each row; `rubbish` stands at every masked place."""
    leaves = [torch.from_numpy(each.copy()).requires_grad_() for each in batch.current]
    loss, sums, peaks = 0.0, {}, {}
    for row in rows:
        share = algorithm.loss(packed_row(algorithm, row, batch, leaves, rubbish), batch.denominators, max_tokens=MAX_TOKENS)
        if share.loss.requires_grad:
            share.loss.backward()
        loss += float(share.loss.detach())
        sums, peaks = metrics.merge_sums(sums, share.sums), metrics.merge_peaks(peaks, share.peaks)
    gradients = [np.zeros(leaf.shape, np.float32) if leaf.grad is None else leaf.grad.numpy() for leaf in leaves]
    return Outcome(loss, gradients, metrics.finish(floats(sums), floats(peaks)))


def floats(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in sums.items()}


def packed_row(
    algorithm: Algorithm, row: packing.Row, batch: Batch, leaves: Sequence[torch.Tensor], rubbish: float
) -> PackedRow:
    """As the trainer builds it, with `rubbish` at all masked places of all float arrays. The entropy is -current / 2."""
    arrays = packing.arrange(row, batch.trajectories, batch.items)
    mask = torch.from_numpy(arrays.mask)
    padding = torch.full((row.size - row.used,), rubbish)
    current = torch.cat([*(leaves[index] for index in row.items), padding])

    def spoiled(values: np.ndarray) -> torch.Tensor:
        return torch.where(mask, torch.from_numpy(values), rubbish)

    entropy = torch.where(mask, -0.5 * current, rubbish)
    return PackedRow(
        current=torch.where(mask, current, current * 0 + rubbish),
        old=spoiled(packing.lay_out(row, batch.old)),
        rollout=spoiled(arrays.logprobs),
        mask=mask,
        advantages=spoiled(arrays.advantages),
        segments=torch.from_numpy(arrays.segments),
        sequence_tokens=torch.from_numpy(arrays.sequence_tokens),
        entropy=entropy if algorithm.trains_entropy else entropy.detach(),
        reference=spoiled(packing.lay_out(row, batch.reference)) if algorithm.needs_reference else None,
    )


def single_rows(batch: Batch) -> list[packing.Row]:
    """One trajectory a row, without padding."""
    return [
        packing.Row(items=(index,), starts=(0,), lengths=(length,), size=length) for index, length in enumerate(batch.lengths)
    ]
