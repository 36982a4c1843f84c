"""Operations of a step and their share of a card's, by hand."""

from __future__ import annotations

import pytest

from telescope.maths import flops
from telescope.maths.flops import TrainingWork

QWEN3_06B = TrainingWork.of(trained=596_049_920, layers=28, heads=16, head_dim=128)


def test_six_a_weight_and_six_a_layer_head_and_dimension_by_context():
    """10 weights, 2 layers of 3 heads of 4: 60 a token, 144 a pair. Samples of 1 and 3 tokens: 4 · 60 + 10 · 144."""
    work = TrainingWork.of(trained=10, layers=2, heads=3, head_dim=4)
    assert (work.token, work.pair) == (60.0, 144.0)
    assert work.operations(4, 10) == 1680.0
    assert work.operations(4, 10) == (6 * 10 + 6 * 2 * 3 * 4 * flops.context([1, 3])) * 4


def test_context_is_that_of_the_samples_and_not_of_the_row():
    assert flops.context([1, 3]) == 2.5
    assert flops.context([2, 2]) == 2.0
    assert flops.context([]) == 0.0


def test_a_frozen_weight_costs_four():
    assert TrainingWork.of(trained=2, frozen=10, layers=1, heads=1, head_dim=1).token == 52.0


def test_qwen3_0_6b_spends_as_much_on_attention_at_10394_tokens():
    assert QWEN3_06B.attention_length == pytest.approx(10_394, abs=1)


def test_the_published_utilization_of_a_plain_loop_comes_out():
    """0.6B at 16k: 24,000 tokens/s on one H100 were said to be 22.3 %."""
    operations = QWEN3_06B.operations(24_000, 24_000 * 16_384)
    assert flops.utilization(operations, 1.0, cards=1, peak=989e12) == pytest.approx(0.223, abs=0.001)
    assert flops.utilization(operations, 1.0, cards=2, peak=989e12) == pytest.approx(0.1115, abs=0.0005)


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peak_goes_by_the_name_of_the_card(card, peak):
    assert flops.peak_of(card) == peak
