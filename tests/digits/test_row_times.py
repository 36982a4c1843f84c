"""What a packed row takes: the rows that were measured on an H200, and which parts of them each setting changes."""

from __future__ import annotations

from typing import Any

import pytest

from telescope.config.model_shapes import shape_of
from telescope.maths.memory import Checkpointing
from telescope.maths.row_times import RowTime, time_row

SMALL, LARGE = shape_of("Qwen/Qwen3-0.6B"), shape_of("Qwen/Qwen3-4B")


def timed(shape: Any = SMALL, **other: Any) -> RowTime:
    """One sample of 16,384 tokens on an H200, compiled, nothing computed again."""
    given: dict[str, Any] = {
        "tokens": 16_384, "length": 16_384, "flops": 989e12, "bandwidth": 4.8e12, "compiled": True, "checkpointing": False,
    }  # fmt: skip
    return time_row(shape, **given | other)


@pytest.mark.parametrize(
    ("shape", "tokens", "length", "compiled", "checkpointing", "layers", "measured"),
    [
        (SMALL, 16_384, 16_384, True, False, None, 47_952),
        (SMALL, 16_128, 1152, True, False, None, 85_614),
        (SMALL, 16_384, 16_384, True, True, None, 35_303),
        (SMALL, 16_384, 16_384, True, "selective", None, 37_069),
        (SMALL, 16_384, 16_384, True, True, 14, 41_950),
        (SMALL, 65_536, 65_536, True, "selective", None, 16_618),
        (SMALL, 16_384, 16_384, False, True, None, 26_055),
        (SMALL, 4096, 4096, True, False, None, 33_762),
        (SMALL, 4096, 4096, False, True, None, 11_479),
        (SMALL, 16_384, 2048, False, True, None, 36_348),
        (SMALL, 16_384, 2048, False, False, None, 45_900),
        (LARGE, 16_384, 16_384, True, False, None, 13_291),
        (LARGE, 16_128, 1152, True, False, None, 19_856),
        (LARGE, 16_384, 16_384, True, "selective", None, 10_887),
        (LARGE, 16_384, 16_384, False, True, None, 8065),
    ],
)  # fmt: skip
def test_rows_that_were_measured_are_met(
    shape: Any, tokens: int, length: int, compiled: bool, checkpointing: Checkpointing, layers: int | None, measured: float
) -> None:
    """Tokens a second of one H200, from benchmarks/results/training.md and megatron.md."""
    found = timed(
        shape, tokens=tokens, length=length, compiled=compiled, checkpointing=checkpointing, checkpointed_layers=layers
    )  # fmt: skip
    assert tokens / found.seconds == pytest.approx(measured, rel=0.17)


def test_a_short_row_is_its_hosts_work() -> None:
    """28 layers · 4.3 ms compiled; eager and computed again 12.5 ms."""
    short = timed(tokens=4096, length=4096)
    assert short.seconds == short.host_s == pytest.approx(0.1204)
    again = timed(tokens=4096, length=4096, compiled=False, checkpointing=True)
    assert again.seconds == again.host_s == pytest.approx(0.350)
    assert timed().seconds == timed().card_s


def test_what_is_computed_again_is_a_third_more_but_for_the_head_and_the_sums() -> None:
    once, half, again = (timed(checkpointing=True, checkpointed_layers=layers) for layers in (0, 14, None))
    assert half.card_s == pytest.approx((once.card_s + again.card_s) / 2)
    assert once.card_s == timed().card_s
    assert 1.25 < again.card_s / once.card_s < 4 / 3
    assert again.host_s == pytest.approx(once.host_s * 4 / 3)


def test_selective_checkpointing_keeps_attention_and_without_whole_graphs_products_too() -> None:
    full, selective = timed(checkpointing="full"), timed(checkpointing="selective")
    parts = timed(checkpointing="selective", whole_graphs=False)
    attention = 16_384 * 6 * 28 * 2048 * 16_384 / 0.56 / 989e12
    products = 16_384 * 6 * 28 * SMALL.layer_matrices / 0.7 / 989e12
    assert full.card_s - selective.card_s == pytest.approx(attention / 3)
    assert selective.card_s - parts.card_s == pytest.approx(products / 3)


def test_frozen_matrices_have_two_products_of_three() -> None:
    products = 16_384 * 6 * (28 * SMALL.layer_matrices + SMALL.embedding_parameters) / 0.7 / 989e12
    sums = 14 * SMALL.parameters / (0.9 * 4.8e12)
    assert timed().card_s - timed(frozen=True).card_s == pytest.approx(products / 3 + sums)
