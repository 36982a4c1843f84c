"""The metrics that the loss reports, against a direct computation over all trained tokens."""

import numpy as np
import pytest

from telescope.algorithms.cispo import CISPO
from telescope.algorithms.grpo import GRPO
from telescope.maths import packing
from tests.digits.batches import CORRECTED, MASKS, make_batch, outcome


def tokens_of(batch):
    """current, old, rollout and advantage of all trained tokens, float64."""
    masks = [each.mask == 1 for each in batch.trajectories]
    pick = lambda arrays: np.concatenate([a[m] for a, m in zip(arrays, masks, strict=True)]).astype(np.float64)  # noqa: E731
    advantages = [np.full(item.length, item.advantage) for item in batch.items]
    return pick(batch.current), pick(batch.old), pick([each.logprobs for each in batch.trajectories]), pick(advantages)


def measured(algorithm, batch):
    rows = packing.pack(batch.lengths, seq_len=48, multiple=16)
    return outcome(algorithm, batch, packing.with_filler(rows, len(rows) + 1, multiple=16)).metrics


def close(value):
    return pytest.approx(value, rel=1e-5, abs=1e-7)


def test_the_metrics_of_clipped_grpo_with_tis_and_dual_clip():
    algorithm = GRPO(use_ppo_clip=True, clip_low=0.2, clip_high=0.28, dual_clip_c=1.5, tis_cap=1.2, **CORRECTED)
    batch = make_batch(algorithm, 11, gap=0.5)
    current, old, rollout, advantages = tokens_of(batch)
    ratio, weight = np.exp(current - old), np.exp(old - rollout)
    below, above = (ratio < 0.8) & (advantages < 0), (ratio > 1.28) & (advantages > 0)
    plain = np.maximum(-ratio * advantages, -ratio.clip(0.8, 1.28) * advantages)
    dual = (advantages < 0) & (plain > 1.5 * np.abs(advantages))
    losses = np.where(dual, 1.5 * np.abs(advantages), plain) * weight.clip(max=1.2)
    assert below.any()
    assert above.any()
    assert dual.any()
    assert measured(algorithm, batch) == {
        "loss": close(losses.sum() / len(ratio)),
        "ratio_mean": close(ratio.mean()),
        "ratio_std": close(ratio.std()),
        "ratio_min": close(ratio.min()),
        "ratio_max": close(ratio.max()),
        "kl_divergence_inference": close((rollout - current).mean()),
        "logprob_difference": close(np.abs(rollout - current).mean()),
        "entropy": close((-0.5 * current).mean()),
        "masked_fraction": 0.0,
        "clip_fraction": close((below | above).mean()),
        "clip_fraction_low": close(below.mean()),
        "clip_fraction_high": close(above.mean()),
        "dual_clip_fraction": close(dual.mean()),
        "tis_weight": close(weight.clip(max=1.2).mean()),
        "tis_capped_fraction": close((weight >= 1.2).mean()),
    }


def test_the_ratio_reported_is_to_the_sampler_where_that_is_the_reference():
    algorithm = CISPO(clip_high=0.3)
    batch = make_batch(algorithm, 4, gap=0.5)
    current, _, rollout, _ = tokens_of(batch)
    ratio = np.exp(current - rollout)
    metrics = measured(algorithm, batch)
    assert metrics["ratio_mean"] == close(ratio.mean())
    assert metrics["clip_fraction_high"] == close((ratio > 1.3).mean())
    assert metrics["clip_fraction_low"] == 0.0


def test_icepop_reports_the_share_of_tokens_it_drops():
    algorithm = GRPO(corrections=[{"name": "icepop", "low": 0.8, "high": 1.25}])
    batch = make_batch(algorithm, 4, gap=0.5)
    _, old, rollout, _ = tokens_of(batch)
    weight = np.exp(old - rollout)
    dropped = ((weight < 0.8) | (weight > 1.25)).mean()
    assert 0 < dropped < 1
    metrics = measured(algorithm, batch)
    assert (metrics["icepop_masked_fraction"], metrics["masked_fraction"]) == (close(dropped), close(dropped))


def test_masks_of_sequences_report_tokens_and_are_counted_together_once():
    algorithm = GRPO(corrections=MASKS)
    batch = make_batch(algorithm, 4, gap=0.2)
    sums, means = [], []
    for old, trajectory in zip(batch.old, batch.trajectories, strict=True):
        gaps = (old - trajectory.logprobs)[trajectory.mask == 1].astype(np.float64)
        sums += [gaps.sum()] * len(gaps)
        means += [gaps.sum() / max(len(gaps), 1)] * len(gaps)
    by_sum, by_mean = (np.exp(sums) < 0.5) | (np.exp(sums) > 2.0), (np.exp(means) < 0.9) | (np.exp(means) > 1.1)
    assert 0 < by_sum.mean() < (by_sum | by_mean).mean() < 1
    metrics = measured(algorithm, batch)
    assert metrics["sequence_mask_masked_fraction"] == close(by_sum.mean())
    assert metrics["geometric_mask_masked_fraction"] == close(by_mean.mean())
    assert metrics["masked_fraction"] == close((by_sum | by_mean).mean())


def test_the_divergences_reported_are_those_of_the_estimators_asked_for():
    algorithm = GRPO(kl_ref_coef=0.04, kl_rollout_coef=0.1, kl_rollout_estimator="k2")
    batch = make_batch(algorithm, 4)
    current, _, rollout, _ = tokens_of(batch)
    gap = current - np.concatenate([r[t.mask == 1] for r, t in zip(batch.reference, batch.trajectories, strict=True)])
    metrics = measured(algorithm, batch)
    assert metrics["kl_ref"] == close((np.exp(-gap) - 1 + gap).mean())
    assert metrics["kl_rollout"] == close((np.square(current - rollout) / 2).mean())
