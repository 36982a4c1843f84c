"""When rows are so short that a card waits for its host, and what is said then."""

from __future__ import annotations

from typing import Any

import pytest

from telescope.maths.flops import TrainingWork
from telescope.maths.short_rows import ShortRows, short_rows

WORK = TrainingWork.of(trained=596e6, layers=28, heads=16, head_dim=128)
"""Of a 0.6B model: 3.576e9 operations a token, and 344,064 a token and token of context."""


def asked(**other: Any) -> ShortRows | None:
    """Rows of 4,096 with samples that fill them, an H200, no checkpointing; up to 65,536 fit, an update has 200,000 tokens."""
    given: dict[str, Any] = {
        "layers": 28, "seq_len": 4096, "ranks_a_row": 1, "length": 4096.0, "tokens": 200_000.0, "peak": 989e12,
        "checkpointing": False, "fits": lambda row: row <= 65_536,
    }  # fmt: skip
    return short_rows(WORK, **given | other)


def test_rows_of_4096_tokens_of_a_small_model_leave_an_h200_waiting() -> None:
    """Host 28 · 4.3 ms; card (3.576e9 + 344,064 · 4,096) · 4,096 / (0.4 · 989e12) = 51.6 ms."""
    found = asked()
    assert found is not None
    assert (found.longer, found.enough) == (65_536, 16_384)
    assert found.host_s == pytest.approx(0.1204)
    assert found.card_s == pytest.approx(0.05162, rel=1e-3)
    assert found.gain == pytest.approx(0.1204 / 0.05162, rel=1e-3)
    assert found.sentence == (
        "trainer.seq_len=4096 leaves a GPU waiting for its host, by what was measured on one: a row is about 120 ms of work "
        "for the host and 52 ms for the card at 40% MFU. trainer.seq_len=65536, the largest power of two that fits by the "
        "estimate of memory and that an update has tokens for, trains up to 2.3 times as many tokens a second. From 16384 on "
        "the card is the slower one."
    )


def test_a_gain_that_the_host_still_limits_is_that_of_the_rows() -> None:
    found = asked(fits=lambda row: row <= 8192)
    assert found is not None
    assert (found.longer, found.enough, found.gain) == (8192, 8192, 2.0)
    assert "From" not in found.sentence


def test_a_layer_computed_again_is_more_work_for_both() -> None:
    found = asked(checkpointing=True)
    assert found is not None
    assert found.host_s == pytest.approx(0.350)
    assert found.card_s == pytest.approx(0.05162 * 4 / 3, rel=1e-3)
    selective = asked(checkpointing="selective")
    assert selective is not None
    assert (selective.host_s, selective.share) == (found.host_s, 0.4)
    half = asked(checkpointing=True, checkpointed_layers=14)
    assert half is not None
    assert half.host_s == pytest.approx(14 * (12.5e-3 + 4.3e-3))
    assert half.card_s == pytest.approx((0.05162 + found.card_s) / 2, rel=1e-3)


@pytest.mark.parametrize(
    "other",
    [
        {"seq_len": 16_384, "length": 16_384.0},  # the card has 380 ms of work
        {"tokens": 4096.0},  # one row has all of them
        {"fits": lambda row: False},
        {"peak": 200e12},  # a slower card
        {"layers": 7},  # fewer calls for as many operations
    ],
)
def test_nothing_is_said_where_rows_are_long_enough_or_cannot_be_longer(other: dict[str, Any]) -> None:
    assert asked(**other) is None


def test_rows_are_as_long_as_an_update_has_tokens() -> None:
    lengths = [found.longer for tokens in (4097.0, 8192.0, 8193.0, 70_000.0) if (found := asked(tokens=tokens))]
    assert lengths == [8192, 8192, 16_384, 65_536]


def test_ranks_that_share_a_row_have_a_part_of_its_work_each() -> None:
    alone, paired = asked(seq_len=6144), asked(seq_len=6144, ranks_a_row=2)
    assert alone is not None
    assert paired is not None
    assert paired.card_s == alone.card_s / 2
    assert (alone.longer, alone.enough, paired.enough) == (65_536, 16_384, 32_768)
