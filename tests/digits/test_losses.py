"""Token losses and their gradients, by hand, in float64."""

import math
from typing import ClassVar, Literal

import pytest
import torch

from telescope.algorithms.base import LossOutput, PackedRow, Tis, TokenLosses
from telescope.algorithms.cispo import CISPO
from telescope.algorithms.dr_grpo import DrGRPO
from telescope.algorithms.grpo import GRPO
from telescope.algorithms.gspo import GSPO
from telescope.algorithms.sapo import SAPO
from telescope.records import Denominators

LN2 = math.log(2.0)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def lossof(algorithm, ratios, advantages, *, segments=None, n=None, tokens=None, sequences=1, gaps=None, max_tokens=16):
    """Loss and gradient of a row of trained tokens with these ratios to the reference; `gaps` is old - rollout."""
    count = len(ratios)
    old = f64([-1.0] * count)
    rollout = old - f64(gaps or [0.0] * count)
    reference = rollout if algorithm.ppo_clip_ref_logprobs == "rollout" else old
    current = (reference + f64(ratios).log()).requires_grad_()
    row = PackedRow(
        current=current,
        old=old,
        rollout=rollout,
        mask=torch.ones(count, dtype=torch.bool),
        advantages=f64(advantages),
        segments=torch.tensor(segments or [0] * count),
        sequence_tokens=f64(n or [float(count)]),
        entropy=None,
    )
    denominators = Denominators(tokens=tokens or count, sequences=sequences, groups=1)
    out = algorithm.loss(row, denominators, max_tokens=max_tokens)
    out.loss.backward()
    return out.loss.item(), current.grad.tolist()


def test_the_plain_policy_gradient_is_minus_advantage_whatever_the_ratio():
    loss, gradient = lossof(GRPO(), [1.0, 3.0], [2.0, -1.0])
    assert gradient == pytest.approx([-2.0 / 2, 1.0 / 2])
    assert loss == pytest.approx((1.0 * 2.0 + (-1.0 + math.log(3.0)) * 1.0) / 2)


def test_the_clip_stops_good_tokens_above_and_bad_tokens_below():
    clip = GRPO(use_ppo_clip=True, clip_low=0.2, clip_high=0.3)
    loss, gradient = lossof(clip, [1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0])
    assert loss == pytest.approx((-1.3 + 1.5 - 0.5 + 0.8) / 4)
    assert gradient == pytest.approx([0.0, 1.5 / 4, -0.5 / 4, 0.0])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    plain, dual = (GRPO(use_ppo_clip=True, dual_clip_c=bound) for bound in (None, 3.0))
    loss, gradient = lossof(dual, [5.0, 2.0, 5.0, 0.1], [-2.0, -2.0, 2.0, 2.0])
    assert loss == pytest.approx((3.0 * 2.0 + 2.0 * 2.0 - 1.5 * 2.0 - 0.1 * 2.0) / 4)
    assert gradient == pytest.approx([0.0, 2.0 * 2.0 / 4, 0.0, -0.1 * 2.0 / 4])
    assert lossof(plain, [5.0], [-2.0]) == (pytest.approx(10.0), pytest.approx([10.0]))
    good = [5.0, 1.0, 0.1], [2.0, 1.0, 0.0]
    assert lossof(dual, *good) == lossof(plain, *good)


def test_dual_clip_comes_before_the_weight():
    dual = GRPO(use_ppo_clip=True, dual_clip_c=3.0, ppo_clip_ref_logprobs="batch", use_tis=True)
    loss, _ = lossof(dual, [5.0], [-2.0], gaps=[-LN2])
    assert loss == pytest.approx(3.0 * 2.0 * 0.5)


def test_a_clamped_ratio_has_no_gradient():
    for algorithm in (SAPO(), GSPO(), GRPO(use_ppo_clip=True)):
        loss, gradient = lossof(algorithm, [math.exp(21.0)], [-1.0])
        assert math.isfinite(loss)
        assert gradient == [0.0]
    assert lossof(GRPO(use_ppo_clip=True), [math.exp(21.0)], [-1.0])[0] == pytest.approx(math.exp(20.0))


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    loss, gradient = lossof(CISPO(clip_high=0.5), [4.0, 1.0, 0.01], [1.0, 1.0, -1.0])
    assert gradient == pytest.approx([-1.5 / 3, -1.0 / 3, 0.01 / 3])
    assert CISPO().clip_low == 1.0
    assert loss == pytest.approx((-1.5 * (-1 + math.log(4)) + 1.0 + 0.01 * (-1 + math.log(0.01))) / 3)


def test_cispo_clips_below_only_where_asked():
    assert lossof(CISPO(clip_low=0.2), [0.5], [1.0])[1] == pytest.approx([-0.8])


def test_cispo_knows_no_dual_clip():
    with pytest.raises(ValueError, match="dual_clip_c"):
        CISPO(dual_clip_c=3.0)


def test_gspo_takes_the_geometric_mean_and_is_not_divided_by_length_twice():
    # ratios 2 and 8: geometric mean 4; one sequence, A = -1, no clip above for bad tokens: loss 4, d/dp_t = 4 / 2
    loss, gradient = lossof(GSPO(), [2.0, 8.0], [-1.0, -1.0])
    assert loss == pytest.approx(4.0)
    assert gradient == pytest.approx([2.0, 2.0])


def test_gspo_at_ratio_one_pulls_each_token_with_one_nth_of_the_advantage():
    for count in (1, 5, 50):
        _, gradient = lossof(GSPO(), [1.0] * count, [3.0] * count)
        assert gradient == pytest.approx([-3.0 / count] * count)


def test_gspo_counts_a_sequence_once_whatever_its_length():
    loss, gradient = lossof(
        GSPO(), [1.0] * 6, [1.0, -2.0, -2.0, -2.0, -2.0, -2.0], segments=[0] + [1] * 5, n=[1.0, 5.0], sequences=2
    )
    assert loss == pytest.approx((-1.0 + 2.0) / 2)
    assert gradient == pytest.approx([-1.0 / 2, *[2.0 / 5 / 2] * 5])


def test_gspo_weighs_the_branches_of_a_rollout_by_their_tokens():
    # branches of 1 and 3 tokens: ratios 2 and 1 (geometric mean of 0.5, 1, 2), weights 1/4 and 3/4
    loss, _ = lossof(GSPO(), [2.0, 0.5, 1.0, 2.0], [-1.0] * 4, segments=[0, 1, 1, 1], n=[4.0, 4.0])
    assert loss == pytest.approx(0.25 * 2.0 + 0.75 * 1.0)


def test_sapo_has_slope_one_at_ratio_one_and_closes_faster_for_bad_tokens():
    _, gradient = lossof(SAPO(), [1.0, 1.0, 3.0, 3.0], [1.0, -1.0, 1.0, -1.0])
    assert gradient[:2] == pytest.approx([-1.0 / 4, 1.0 / 4])

    def slope(tau, ratio):
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return 4 * gate * (1 - gate) * ratio

    assert gradient[2:] == pytest.approx([-slope(1.0, 3.0) / 4, slope(1.05, 3.0) / 4])


def test_tis_multiplies_by_old_over_rollout_up_to_its_cap():
    _, gradient = lossof(GRPO(use_tis=True, tis_cap=2.0), [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], gaps=[-LN2, 0.5 * LN2, 3.0])
    assert gradient == pytest.approx([-0.5 / 3, -math.sqrt(2) / 3, -2.0 / 3])


def test_tis_clamps_the_difference_of_log_probs_first():
    _, gradient = lossof(GRPO(use_tis=True, tis_cap=100.0, tis_logprob_clamp=LN2), [1.0, 1.0], [1.0, 1.0], gaps=[5.0, -5.0])
    assert gradient == pytest.approx([-2.0 / 2, -0.5 / 2])


def test_tis_stays_frozen_while_the_weights_move():
    still, moved = (lossof(GRPO(use_tis=True), ratios, [1.0, 1.0], gaps=[0.1, -0.2])[1] for ratios in ([1.0, 1.0], [3.0, 0.2]))
    assert still == moved


def test_icepop_drops_tokens_outside_its_interval_and_keeps_them_in_the_denominator():
    icepop = GRPO(corrections=[{"name": "icepop"}])
    _, gradient = lossof(icepop, [1.0] * 4, [1.0] * 4, gaps=[math.log(0.4), math.log(0.5), math.log(4.9), math.log(5.1)])
    assert gradient == pytest.approx([0.0, -0.5 / 4, -4.9 / 4, 0.0])


def test_at_ratio_one_grpo_clipped_grpo_cispo_and_sapo_have_one_gradient():
    common = {"loss_aggregation": "token_mean"}
    algorithms = [GRPO(**common), GRPO(use_ppo_clip=True, **common), CISPO(**common), SAPO(**common)]
    gradients = [lossof(each, [1.0] * 5, [1.0, 2.0, -1.0, 0.0, -3.0])[1] for each in algorithms]
    assert gradients[0] == pytest.approx([-0.2, -0.4, 0.2, 0.0, 0.6])
    for gradient in gradients[1:]:
        assert gradient == pytest.approx(gradients[0], abs=1e-15)


def test_at_ratio_one_gspo_is_grpo_with_the_mean_over_sequences():
    layout = {"segments": [0, 0, 1, 1, 1], "n": [2.0, 3.0], "sequences": 2}
    values = [1.0] * 5, [1.5, 1.5, -2.0, -2.0, -2.0]
    assert lossof(GSPO(), *values, **layout)[1] == pytest.approx(
        lossof(GRPO(loss_aggregation="seq_mean_token_mean"), *values, **layout)[1], abs=1e-15
    )


def test_token_mean_weighs_tokens_alike_and_seq_mean_rollouts_alike():
    layout = {"segments": [0, 1, 1, 1], "n": [1.0, 3.0], "sequences": 2}
    values = [1.0] * 4, [1.0] * 4
    assert lossof(GRPO(), *values, **layout)[1] == pytest.approx([-1 / 4] * 4)
    assert lossof(GRPO(loss_aggregation="seq_mean_token_mean"), *values, **layout)[1] == pytest.approx([-1 / 2, *[-1 / 6] * 3])


def test_dr_grpo_divides_by_a_constant_and_not_by_any_length():
    norm = DrGRPO(dr_grpo_loss_agg_mode="token_sum_norm")
    for count in (1, 10, 40):
        _, gradient = lossof(norm, [1.0] * count, [1.0] * count, sequences=3, max_tokens=20)
        assert gradient == pytest.approx([-1 / 60] * count)


def test_dr_grpo_divides_by_all_rollouts_where_token_mean_is_its_default():
    assert DrGRPO().dr_grpo_loss_agg_mode == "token_mean"
    assert lossof(DrGRPO(), [1.0] * 4, [1.0] * 4, sequences=3)[1] == pytest.approx([-1 / 4] * 4)


def test_without_old_log_probs_the_current_ones_stand_for_them():
    current = f64([-1.0, -2.0]).requires_grad_()
    row = PackedRow(
        current=current,
        old=None,
        rollout=f64([-1.0 - LN2, -2.0 + LN2]),
        mask=torch.tensor([True, True]),
        advantages=f64([1.0, 1.0]),
        segments=torch.tensor([0, 0]),
        sequence_tokens=f64([2.0]),
        entropy=None,
    )
    tis = GRPO(use_tis=True, tis_cap=10.0)
    tis.loss(row, Denominators(tokens=2, sequences=1, groups=1), max_tokens=4).loss.backward()
    assert current.grad.tolist() == pytest.approx([-2.0 / 2, -0.5 / 2])


def test_with_tis_the_clip_takes_the_log_probs_before_the_step_by_itself():
    chosen = GRPO(use_ppo_clip=True, use_tis=True, tis_cap=10.0)
    given = GRPO(use_ppo_clip=True, use_tis=True, tis_cap=10.0, ppo_clip_ref_logprobs="batch")
    case = {"ratios": [1.2, 3.0], "advantages": [1.0, 1.0], "gaps": [0.5, -0.5]}
    assert lossof(chosen, **case) == lossof(given, **case)
    assert lossof(chosen, **case)[1] != lossof(GRPO(use_ppo_clip=True), **case)[1]


def test_with_reference_batch_and_one_update_the_ratio_is_one():
    row_ratio = GRPO(use_ppo_clip=True, ppo_clip_ref_logprobs="batch", clip_low=0.0, clip_high=0.0)
    assert lossof(row_ratio, [1.0, 1.0], [1.0, -1.0], gaps=[5.0, -5.0])[1] == pytest.approx([-0.5, 0.5])


@pytest.mark.parametrize(("reduce", "shape"), [
    (lambda losses: losses.mean(), r"\[\]"),  # would count once for each token
    (lambda losses: losses[:, None], r"\[3, 1\]"),  # would count each token three times
    (lambda losses: losses[None], r"\[1, 3\]"),
    (lambda losses: losses[:2], r"\[2\]"),
])  # fmt: skip
def test_losses_of_another_shape_than_one_a_token_are_refused_by_name(reduce, shape: str):
    class Own(GRPO):
        def token_losses(self, row: PackedRow, ratio: torch.Tensor) -> TokenLosses:
            return TokenLosses(reduce(super().token_losses(row, ratio).losses))

    with pytest.raises(ValueError, match=rf"^Own\.token_losses gave a tensor of shape {shape}: .* tokens, \[3\]$"):
        lossof(Own(), [1.0, 1.0, 1.0], [1.0, -1.0, 0.5])


def test_an_aggregation_that_does_not_exist_is_refused_with_those_that_do():
    class Own(GRPO):
        @property
        def aggregation(self) -> str:
            return "mean"

    with pytest.raises(ValueError, match=r"^aggregation 'mean' is none of token_mean, seq_mean_token_mean, token_sum_norm$"):
        lossof(Own(), [1.0], [1.0])


def test_a_weight_of_another_shape_than_one_a_token_is_refused_by_name():
    class Half(Tis):
        name: Literal["half"] = "half"

        def weight(self, row: PackedRow) -> torch.Tensor:
            return super().weight(row).mean()

    class Own(GRPO):
        known_corrections: ClassVar = {"half": Half}

    with pytest.raises(ValueError, match=r"^Half\.weight gave a tensor of shape \[\]"):
        lossof(Own(corrections=[{"name": "half"}]), [1.0, 1.0], [1.0, -1.0])


def test_a_rows_share_is_one_number():
    with pytest.raises(ValueError, match=r"^a loss of shape \[2\] is not a row's share: add it up to one number"):
        LossOutput(loss=f64([1.0, 2.0]), sums={}, peaks={})
