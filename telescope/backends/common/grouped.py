"""Products of the rows of one matrix with a matrix a group of them: how the experts of a layer compute.

Owns the choice between PyTorch's grouped kernel and a loop. The kernel is torch.nn.functional.grouped_mm, which torch has from
2.10 on; it takes matrices whose rows are a multiple of 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED = 16
"""Bytes of which a row of each matrix must be a multiple for PyTorch's grouped product."""


def takes(stack: Tensor) -> bool:
    """Whether the grouped kernel takes these matrices [E, N, M], as they are and transposed."""
    return all(width * stack.dtype.itemsize % ALIGNED == 0 for width in stack.shape[1:])


def product(rows: Tensor, stack: Tensor, counts: Tensor) -> Tensor:
    """[R, M] and stack [E, N, M] -> [R, N]: of the first counts[0] rows with stack[0] transposed, then counts[1] with stack[1],
    and so on. `counts` [E] int64 adds up to R. Every matrix gets a gradient, if of 0."""
    if not len(rows):  # kernels need not know what to do then, and other ranks wait for this one's backward pass
        return rows.new_zeros(0, stack.shape[1]) + 0.0 * (stack.sum() + rows.sum())
    if takes(stack):
        ends = counts.cumsum(0, dtype=torch.int32)
        found: Tensor = torch.nn.functional.grouped_mm(rows, stack.transpose(1, 2), offs=ends)
        return found
    parts = torch.split(rows, counts.tolist())
    return torch.cat([part @ matrix.t() for part, matrix in zip(parts, stack.unbind(), strict=True)])
