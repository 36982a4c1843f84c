"""Divergences, entropy bonus, masks of sequences, length costs and filters, by hand."""

import math

import numpy as np
import pytest
import torch

from telescope.algorithms.base import PackedRow, SampledRollout
from telescope.algorithms.dr_grpo import DrGRPO
from telescope.algorithms.grpo import GRPO
from telescope.algorithms.gspo import GSPO
from telescope.maths import divergences, filters
from telescope.records import Denominators

LN2 = math.log(2.0)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def lossof(algorithm, *, advantages, gaps=None, to_base=None, entropy=None, segments=None, n=None, sequences=1):
    """Loss, d loss / d current and d loss / d entropy of trained tokens at ratio 1; `gaps`: old - rollout, `to_base`:
    current - reference."""
    count = len(advantages)
    rollout = f64([-1.0] * count)
    current = (rollout + f64(gaps or [0.0] * count)).requires_grad_()
    entropy = f64(entropy or [0.0] * count).requires_grad_()
    row = PackedRow(
        current=current,
        old=current.detach().clone(),
        rollout=rollout,
        mask=torch.ones(count, dtype=torch.bool),
        advantages=f64(advantages),
        segments=torch.tensor(segments or [0] * count),
        sequence_tokens=f64(n or [float(count)]),
        entropy=entropy,
        reference=None if to_base is None else current.detach() - f64(to_base),
    )
    out = algorithm.loss(row, Denominators(tokens=count, sequences=sequences, groups=1), max_tokens=16)
    out.loss.backward()
    return out.loss.item(), current.grad.tolist(), None if entropy.grad is None else entropy.grad.tolist()


# ---- divergences


def test_the_three_estimators_of_a_ratio_of_two_and_of_a_half():
    # d = ln 2: k1 = ln 2, k2 = ln^2 2 / 2, k3 = 1/2 - 1 + ln 2; d = -ln 2: k3 = 2 - 1 - ln 2
    current, other = f64([-1.0, -1.0 - LN2]), f64([-1.0 - LN2, -1.0])
    assert divergences.estimate(current, other, "k1").tolist() == pytest.approx([LN2, -LN2])
    assert divergences.estimate(current, other, "k2").tolist() == pytest.approx([LN2**2 / 2, LN2**2 / 2])
    assert divergences.estimate(current, other, "k3").tolist() == pytest.approx([LN2 - 0.5, 1.0 - LN2])


@pytest.mark.parametrize(("estimator", "slopes"), [("k1", [1.0, 1.0]), ("k2", [LN2, -LN2]), ("k3", [0.5, -1.0])])
def test_the_slopes_of_the_estimators(estimator, slopes):
    current = f64([-1.0, -1.0 - LN2]).requires_grad_()
    divergences.estimate(current, f64([-1.0 - LN2, -1.0]), estimator).sum().backward()
    assert current.grad.tolist() == pytest.approx(slopes)


def test_k1_and_k3_have_the_mean_of_the_true_divergence():
    p, q = f64([0.5, 0.3, 0.2]), f64([0.2, 0.3, 0.5])
    true = (p * (p / q).log()).sum().item()
    for estimator in ("k1", "k3"):
        assert (p * divergences.estimate(p.log(), q.log(), estimator)).sum().item() == pytest.approx(true)


def test_the_gradient_of_k2_is_that_of_the_true_divergence_and_k1s_has_mean_zero():
    logits, q = f64([0.3, -0.2, 0.5]).requires_grad_(), f64([0.2, 0.3, 0.5])
    p = logits.softmax(0)
    (true,) = torch.autograd.grad((p * (p / q).log()).sum(), logits, retain_graph=True)
    for estimator, expected in (("k2", true), ("k1", torch.zeros(3, dtype=torch.float64))):
        expectation = (p.detach() * divergences.estimate(p.log(), q.log(), estimator)).sum()
        (found,) = torch.autograd.grad(expectation, logits, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_penalty_to_the_base_adds_its_coefficient_times_the_slope():
    algorithm = GRPO(kl_ref_coef=0.04)
    loss, gradient, _ = lossof(algorithm, advantages=[1.0, -1.0], to_base=[LN2, -LN2])
    assert gradient == pytest.approx([(-1.0 + 0.04 * 0.5) / 2, (1.0 - 0.04) / 2])
    assert loss == pytest.approx((1.0 - 1.0 + 0.04 * (LN2 - 0.5) + 0.04 * (1.0 - LN2)) / 2)


def test_a_penalty_to_the_sampler_pulls_back_by_half_the_square():
    algorithm = GRPO(kl_rollout_coef=0.5, kl_rollout_estimator="k2")
    _, gradient, _ = lossof(algorithm, advantages=[1.0, 0.0], gaps=[0.2, -0.4])
    assert gradient == pytest.approx([(-1.0 + 0.5 * 0.2) / 2, 0.5 * -0.4 / 2])


def test_penalties_go_through_the_aggregation_of_the_loss():
    constant = DrGRPO(dr_grpo_loss_agg_mode="token_sum_norm", kl_ref_coef=1.0, kl_ref_estimator="k1")
    assert lossof(constant, advantages=[0.0] * 4, to_base=[0.1] * 4, sequences=2)[1] == pytest.approx([1 / 32] * 4)
    layout = {"segments": [0, 1, 1, 1], "n": [1.0, 3.0], "sequences": 2}
    by_sequence = GSPO(kl_ref_coef=1.0, kl_ref_estimator="k1")
    _, gradient, _ = lossof(by_sequence, advantages=[0.0] * 4, to_base=[0.1] * 4, **layout)
    assert gradient == pytest.approx([1 / 2, *[1 / 6] * 3])


def test_penalties_are_neither_weighted_nor_dropped_by_corrections():
    icepop = GRPO(corrections=[{"name": "icepop", "low": 0.9, "high": 1.1}], kl_ref_coef=1.0, kl_ref_estimator="k1")
    _, gradient, _ = lossof(icepop, advantages=[1.0, 1.0], gaps=[1.0, 0.0], to_base=[0.0, 0.0])
    assert gradient == pytest.approx([1 / 2, (-1.0 + 1.0) / 2])


def test_without_the_log_probs_it_needs_a_penalty_is_refused():
    with pytest.raises(ValueError, match=r"kl_ref_coef=0.1 needs log-probs of the base model"):
        lossof(GRPO(kl_ref_coef=0.1), advantages=[1.0])


def test_the_entropy_bonus_lowers_the_loss_by_its_share():
    loss, gradient, of_entropy = lossof(GRPO(entropy_coef=0.1), advantages=[0.0, 0.0], entropy=[2.0, 3.0])
    assert loss == pytest.approx(-0.1 * 5.0 / 2)
    assert of_entropy == pytest.approx([-0.05, -0.05])
    assert gradient == [0.0, 0.0]
    assert lossof(GRPO(), advantages=[0.0, 0.0], entropy=[2.0, 3.0])[2] is None


# ---- masks


def mask(name, low, high):
    return GRPO(corrections=[{"name": name, "low": low, "high": high}])


def test_a_sequence_mask_looks_at_the_product_of_all_ratios():
    # first sequence: 1.5 * 1.5 = 2.25 > 2, dropped; second: 1.5 * 0.5 = 0.75, kept, with weight 1 and not 0.75
    gaps = [math.log(1.5), math.log(1.5), math.log(1.5), math.log(0.5)]
    _, gradient, _ = lossof(
        mask("sequence_mask", 0.5, 2.0), advantages=[1.0] * 4, gaps=gaps, segments=[0, 0, 1, 1], n=[2.0, 2.0]
    )
    assert gradient == pytest.approx([0.0, 0.0, -1 / 4, -1 / 4])


def test_a_geometric_mask_looks_at_the_mean_of_the_log_ratios():
    # mean log ratios: ln 1.5, and (ln 1.5 + ln 0.5) / 2 = -0.144
    gaps = [math.log(1.5), math.log(1.5), math.log(1.5), math.log(0.5)]
    layout = {"segments": [0, 0, 1, 1], "n": [2.0, 2.0]}
    for low, high, expected in ((0.8, 1.4, [0.0, 0.0, -0.25, -0.25]), (0.9, 1.6, [-0.25, -0.25, 0.0, 0.0])):
        _, gradient, _ = lossof(mask("geometric_mask", low, high), advantages=[1.0] * 4, gaps=gaps, **layout)
        assert gradient == pytest.approx(expected)


def test_a_mask_holds_where_the_product_leaves_the_range_of_floats():
    for gap, low, high in ((500.0, 0.0, 1e30), (-500.0, 1e-30, 1.0)):
        assert lossof(mask("sequence_mask", low, high), advantages=[1.0] * 2, gaps=[gap, gap])[1] == [0.0, 0.0]
    assert lossof(mask("sequence_mask", 0.0, 1.0), advantages=[1.0] * 2, gaps=[-500.0] * 2)[1] == pytest.approx([-0.5, -0.5])


def test_gspo_takes_masks_of_whole_sequences():
    gspo = GSPO(corrections=[{"name": "geometric_mask", "low": 0.9, "high": 1.1}], ppo_clip_ref_logprobs="batch")
    layout = {"segments": [0, 0, 1], "n": [2.0, 1.0], "sequences": 2}
    _, gradient, _ = lossof(gspo, advantages=[1.0] * 3, gaps=[0.3, 0.3, 0.0], **layout)
    assert gradient == pytest.approx([0.0, 0.0, -1 / 2])


def test_weights_and_masks_multiply():
    both = GRPO(use_tis=True, tis_cap=10.0, corrections=[{"name": "sequence_mask", "low": 0.5, "high": 3.0}])
    _, gradient, _ = lossof(both, advantages=[1.0, 1.0], gaps=[LN2, 2 * LN2], segments=[0, 1], n=[1.0, 1.0])
    assert gradient == pytest.approx([-2.0 / 2, 0.0])


# ---- lengths and repetitions


def test_dapos_punishment_of_lengths_is_linear_in_its_buffer():
    costs = [filters.soft_overlong(tokens, max_tokens=100, buffer=20) for tokens in (1, 80, 85, 95, 100, 250)]
    assert costs == pytest.approx([0.0, 0.0, -0.25, -0.75, -1.0, -1.0])


def test_the_punishment_is_scaled_and_off_by_default():
    assert GRPO().length_penalty(100, max_tokens=100) == 0.0
    assert GRPO(overlong_buffer_tokens=20).length_penalty(95, max_tokens=100) == pytest.approx(-0.75)
    assert GRPO(overlong_buffer_tokens=20, overlong_penalty=0.5).length_penalty(95, max_tokens=100) == pytest.approx(-0.375)


def test_a_buffer_that_punishes_every_length_is_refused():
    (sentence,) = GRPO(overlong_buffer_tokens=100).length_errors(max_tokens=100)
    assert "overlong_buffer_tokens=100 must be below rollout.max_tokens=100" in sentence
    assert sentence.endswith("here 20")
    assert GRPO(overlong_buffer_tokens=99).length_errors(max_tokens=100) == []


@pytest.mark.parametrize(
    ("probabilities", "longest"),
    [([], 0), ([0.5], 0), ([0.995], 1), ([0.995, 0.999, 0.2, 0.995, 0.995, 0.995], 3), ([0.2, 1.0, 1.0], 2), ([0.98, 0.5], 0)],
)
def test_the_longest_run_of_near_certain_tokens(probabilities, longest):
    assert filters.longest_certain_run(np.log(np.array(probabilities)), 0.99) == longest


def sampled(finish_reason="stop", *probabilities):
    return SampledRollout(finish_reason, np.log(np.array(probabilities, np.float32)))


def test_only_what_the_rules_ask_for_leaves_the_loss():
    stuck = sampled("length", 0.5, 0.999, 0.999, 0.999)
    assert GRPO().filters_out(stuck) == ()
    assert GRPO(overlong_filter=True).filters_out(stuck) == ("overlong",)
    assert GRPO(overlong_filter=True).filters_out(sampled("stop", 0.5)) == ()
    assert GRPO(repetition_filter_tokens=3).filters_out(stuck) == ("repetition",)
    assert GRPO(repetition_filter_tokens=4).filters_out(stuck) == ()
    assert GRPO(repetition_filter_tokens=3, repetition_filter_probability=0.9995).filters_out(stuck) == ()
    assert GRPO(overlong_filter=True, repetition_filter_tokens=2).filters_out(stuck) == ("overlong", "repetition")
