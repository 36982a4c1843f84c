"""Floating-point operations of training a batch of samples, and their share of what the cards could have done. Pure arithmetic.

The usual convention: 6 operations a weight and token (2 forward, 4 backward; what checkpointing computes again is not counted),
and for causal attention 6 · layers · heads · head_dim a token and token of context, where the context of a batch is
T = Σ length² / Σ length over its *samples*, not over the rows that they are packed into. So

    operations = (6N + 6 · layers · heads · head_dim · T) · Σ length
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from telescope.maths.memory import ModelShape


class TrainingWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one model takes to be trained."""

    token: float
    """Operations a token, attention's products aside: 6 a weight; 4 a frozen one, which has no gradient of its own."""
    pair: float
    """Operations a token and token of context: 6 · layers · heads · head_dim."""

    @classmethod
    def of(cls, *, trained: float, frozen: float = 0.0, layers: int, heads: int, head_dim: float) -> TrainingWork:
        """From counts of the weights that each token is multiplied with (of experts the active ones)."""
        return cls(token=6.0 * trained + 4.0 * frozen, pair=6.0 * layers * heads * head_dim)

    @property
    def attention_length(self) -> float:
        """The length of a sample whose attention costs as much as all the rest: 10,394 tokens for Qwen3-0.6B."""
        return self.token / self.pair if self.pair else 0.0

    def operations(self, tokens: float, squares: float) -> float:
        """Of samples with Σ length = `tokens` and Σ length² = `squares`."""
        return self.token * tokens + self.pair * squares


def context(lengths: Iterable[int]) -> float:
    """T, the context of the average token: `context([1, 3])` is 2.5."""
    known = list(lengths)
    return sum(length * length for length in known) / sum(known) if known else 0.0


def utilization(operations: float, seconds: float, *, cards: int, peak: float) -> float:
    """MFU: the share of `cards` cards' `peak` operations a second that `operations` in `seconds` are."""
    return operations / (seconds * cards * peak)


PEAKS = (
    ("b200", 2250e12),
    ("h100 pcie", 756e12),
    ("h100 nvl", 835e12),
    ("h100", 989e12),
    ("h200", 989e12),
    ("h800", 989e12),
    ("h20", 148e12),
    ("a100", 312e12),
    ("a800", 312e12),
    ("l40s", 362e12),
    ("l4", 121e12),
    ("a10g", 70e12),
    ("v100", 125e12),
)
"""Dense half-precision operations a second by data sheet (bfloat16; float16 for V100), by a part of the card's name. The first
that is found counts, so longer names stand before shorter ones."""


def peak_of(card: str) -> float | None:
    """By the name that the driver gives, e.g. `NVIDIA H100 80GB HBM3`; None for a card that is not listed."""
    words = f" {card.lower().replace('-', ' ')} "
    return next((peak for name, peak in PEAKS if f" {name} " in words), None)


def forward_flops_per_token(shape: ModelShape, context: float = 0.0) -> float:
    """2 a weight, and attention's products with `context` tokens of keys and values: 4 · layers · query width · context."""
    return 2.0 * shape.computing_parameters + 4.0 * shape.layers * shape.query * context
