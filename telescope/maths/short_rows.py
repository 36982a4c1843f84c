"""Rows so short that a GPU waits for its host, and how long they should be. Pure arithmetic.

A row is a few thousand calls that start kernels, whatever its length, and each is work for the host. Owns the comparison of
the host's time with the card's. Refuses to know memory: whoever asks says which rows fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

from telescope.maths.flops import TrainingWork
from telescope.maths.memory import Checkpointing, layers_again
from telescope.maths.row_times import COMPILED_LAYER_S, EAGER_AGAIN_S

REACHED, REACHED_AGAIN = 0.4, 0.3
"""MFU of rows that are long enough: 40 to 50 % without full checkpointing, 24 to 32 % with it (the same)."""
WORTH = 1.1
"""Times as many tokens a second: less is not worth a remark."""
MEAN_SHARE, PROMPT_TOKENS = 0.4, 200.0
"""What is assumed of lengths where none are known: a completion's mean, of max_tokens, and a prompt's."""


class ShortRows(msgspec.Struct, frozen=True, kw_only=True):
    """What is, and what would be better."""

    seq_len: int
    longer: int
    host_s: float
    """Of a row."""
    card_s: float
    share: float
    """MFU that `card_s` assumes."""
    enough: int
    """The smallest power of two that keeps the card busy, or `longer`, where that does not."""
    gain: float
    """Times as many tokens a second with the longer rows, at the most."""

    @property
    def sentence(self) -> str:
        busy = f" From {self.enough} on the card is the slower one." if self.enough < self.longer else ""
        return (
            f"trainer.seq_len={self.seq_len} leaves a GPU waiting for its host, by what was measured on one: a row is about "
            f"{self.host_s * 1e3:.0f} ms of work for the host and {self.card_s * 1e3:.0f} ms for the card at {self.share:.0%} "
            f"MFU. trainer.seq_len={self.longer}, the largest power of two that fits by the estimate of memory and that an "
            f"update has tokens for, trains up to {self.gain:.1f} times as many tokens a second.{busy}"
        )


def short_rows(
    work: TrainingWork,
    *,
    layers: int,
    seq_len: int,
    ranks_a_row: int,
    length: float,
    tokens: float,
    peak: float,
    checkpointing: Checkpointing,
    checkpointed_layers: int | None = None,
    fits: Callable[[int], bool],
) -> ShortRows | None:
    """None where rows are long enough, where one has all `tokens` of an update already, or where no longer one fits.

    `length`: of the average token's sample; `tokens`: of one update, on the ranks that share a row; `peak`: operations a second
    of one card; `fits`: whether rows of so many tokens do.
    """
    again = layers_again(layers, checkpointing, checkpointed_layers)
    host_s = again * EAGER_AGAIN_S + (layers - again) * COMPILED_LAYER_S
    slower = 0.0 if checkpointing == "selective" else again / layers
    share = 1 / (slower / REACHED_AGAIN + (1 - slower) / REACHED)

    def card_s(row: int) -> float:
        return work.operations(row, row * length) / ranks_a_row / (peak * share)

    if card_s(seq_len) >= host_s or tokens <= seq_len:
        return None
    useful = 2 * math.ceil(tokens)  # a power of two below it is below an update's tokens, or the first that has them all
    longer = seq_len
    for row in _powers(seq_len, useful - 1):
        if not fits(row):
            break
        longer = row
    gain = longer / seq_len * host_s / max(host_s, card_s(longer))
    if longer == seq_len or gain < WORTH:
        return None
    enough = next((row for row in _powers(seq_len, longer) if card_s(row) >= host_s), longer)
    return ShortRows(
        seq_len=seq_len, longer=longer, host_s=host_s, card_s=card_s(seq_len), share=share, enough=enough, gain=gain
    )  # fmt: skip


def _powers(above: int, last: int) -> Iterator[int]:
    """Of two, from the first above `above` to `last`."""
    row = 1 << above.bit_length()
    while row <= last:
        yield row
        row *= 2
