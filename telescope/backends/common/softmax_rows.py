"""Triton kernels over a chunk of logits: one pass each way, where PyTorch's operators make about nine.

Owns the arithmetic of a row's log-softmax and of its gradient, on a GPU. Refuses products: logprobs.py makes the logits, and
does all of this with PyTorch where there is no Triton or no C compiler, which Triton needs on the host. Imported by it alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits of a row that are looked at together."""
LOWEST = tl.constexpr(-1e30)
"""Below every logit: its exponential is 0, and 0 times it is 0, not NaN."""


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(
    logits: tl.tensor,
    targets: tl.tensor,
    denominator: tl.tensor,
    logprob: tl.tensor,
    entropy: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row: the running maximum m, Σ e^(x - m) and Σ e^(x - m) (x - m) of x = scale · logit."""
    row = tl.program_id(0).to(tl.int64)
    mine = logits + row * stride
    inside = tl.arange(0, BLOCK)
    highest, total, weighted = LOWEST, 0.0, 0.0
    for start in range(0, vocabulary, BLOCK):
        places = start + inside
        here = tl.load(mine + places, mask=places < vocabulary, other=LOWEST)
        x = tl.where(places < vocabulary, here * scale, LOWEST)
        higher = tl.maximum(highest, tl.max(x, axis=0))
        shrunk = tl.exp(highest - higher)
        weighted = (weighted + total * (highest - higher)) * shrunk
        total = total * shrunk
        power = tl.exp(x - higher)
        total += tl.sum(power, axis=0)
        weighted += tl.sum(power * (x - higher), axis=0)
        highest = higher
    target = tl.load(mine + tl.load(targets + row)) * scale
    log_total = tl.log(total)
    tl.store(denominator + row, highest + log_total)
    tl.store(logprob + row, target - highest - log_total)
    tl.store(entropy + row, log_total - weighted / total)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(
    logits: tl.tensor,
    targets: tl.tensor,
    denominator: tl.tensor,
    entropy: tl.tensor,
    of_logprob: tl.tensor,
    of_entropy: tl.tensor,
    out: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    out_scale: tl.tensor,
    HAS_LOGPROB: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a block of a row: (1[target] - p) of_logprob - p (log p + entropy) of_entropy, times out_scale."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = places < vocabulary
    logp = tl.load(logits + row * stride + places, mask=there, other=0.0) * scale - tl.load(denominator + row)
    p = tl.exp(logp)
    found = tl.zeros_like(p)
    if HAS_LOGPROB:
        upstream = tl.load(of_logprob + row)
        found += tl.where(places == tl.load(targets + row), upstream, 0.0) - p * upstream
    if HAS_ENTROPY:
        found -= p * (logp + tl.load(entropy + row)) * tl.load(of_entropy + row)
    tl.store(out + row * vocabulary + places, (found * out_scale).to(out.dtype.element_ty), mask=there)


def statistics(logits: Tensor, targets: Tensor, scale: float, into: tuple[Tensor, Tensor, Tensor]) -> None:
    """Write log-probs of the targets, entropies and logs of the softmax denominators, [n] float32 each and contiguous, of
    scale · logits, [n, V] float32."""
    logprob, entropy, denominator = into
    count, vocabulary = logits.shape
    if count:
        _statistics[(count,)](
            logits, targets, denominator, logprob, entropy, vocabulary, logits.stride(0), scale, BLOCK=BLOCK, num_warps=8
        )  # fmt: skip


def gradient(
    logits: Tensor, targets: Tensor, denominator: Tensor, entropy: Tensor, of_logprob: Tensor | None,
    of_entropy: Tensor | None, *, scale: float, out_scale: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """[n, V] in `dtype`: out_scale times the gradient with respect to scale · logits."""
    count, vocabulary = logits.shape
    out = torch.empty(count, vocabulary, dtype=dtype, device=logits.device)
    given: list[Any] = [None if one is None else one.contiguous() for one in (of_logprob, of_entropy)]
    if count:
        _gradient[(count, triton.cdiv(vocabulary, BLOCK))](
            logits, targets, denominator, entropy, *given, out, vocabulary, logits.stride(0), scale, out_scale,
            HAS_LOGPROB=of_logprob is not None, HAS_ENTROPY=of_entropy is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return out
