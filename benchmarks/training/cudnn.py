"""cuDNN attention by lengths, as torch carries it under private names: tried here before it becomes a `backend.attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STEP = 512
"""The longest length is told rounded up to a multiple, as cuDNN makes a plan for each it is told."""


class _ByLengths(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, at: Tensor, longest: int, scale: float | None) -> Tensor:
        out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, at, at, longest, longest, True, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, seed, offset, at)
        ctx.longest, ctx.scale = longest, scale
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, seed, offset, at = ctx.saved_tensors
        found = torch.ops.aten._cudnn_attention_backward(
            gradients[0].contiguous(), q, k, v, out, lse, seed, offset, None, at, at, ctx.longest, ctx.longest, 0.0, True,
            scale=ctx.scale,
        )  # fmt: skip
        return *found, None, None, None


def by_lengths(q: Tensor, k: Tensor, v: Tensor, at: Tensor, longest: int, scale: float | None, window: int) -> Tensor:
    """As `kernels.Lengths`."""
    assert window == -1
    count = len(at) - 1
    padded = 1 << (count - 1).bit_length()
    at = torch.cat([at, at[-1:].expand(padded - count)])
    result: Tensor = _ByLengths.apply(q, k, v, at, -(-longest // STEP) * STEP, scale)
    return result
