"""Sums over the trajectories of a packed row. Tensor methods only: this file never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def segment_sum(values: Tensor, segments: Tensor, count: int) -> Tensor:
    """Sum `values` [T] over equal `segments` [T] (0..count-1): [count]. Differentiable; an empty segment sums to 0."""
    return values.new_zeros(count).index_add(0, segments, values)


def spread(per_segment: Tensor, segments: Tensor) -> Tensor:
    """Give each token the value of its segment: [S] and [T] to [T]."""
    return per_segment.index_select(0, segments)


def segment_mean(values: Tensor, mask: Tensor, segments: Tensor, count: int) -> Tensor:
    """Mean of `values` [T] where `mask` [T] within each segment: [count]; 0 where a segment has none."""
    numbers = segment_sum(mask.to(values.dtype), segments, count)
    return segment_sum(values.where(mask, 0.0), segments, count) / numbers.clamp(min=1.0)
