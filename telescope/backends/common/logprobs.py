"""Log-probs and entropy of taken tokens from hidden states, in float32, without a [T, V] tensor ever existing.

Logits of `chunk` tokens are made at a time, forward and again backward. Owns this one function and its gradient; refuses to
know models, packing and losses. With weights in bfloat16 the products are still summed and kept in float32: a log-softmax in
bfloat16 would carry 0.03 nats of noise. On a GPU, Triton kernels (softmax_rows.py) do in one pass over the logits what
PyTorch's operators do in nine.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
from typing import Any

import torch
from torch import Tensor

from telescope.maths.support import WHOLE, Support, left_out

log = logging.getLogger(__name__)
COMPILERS = ("gcc", "clang")
"""Of which Triton takes the first that it finds."""


def logprobs(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float | Tensor, chunk: int, support: Support = WHOLE
) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets` and entropy of the distribution at each token, both [T] float32, after `temperature` and over the
    tokens that `support` keeps. Which these are carries no gradient.

    hidden: [T, H]; head_weight: [V, H] of the same dtype; targets: [T] int64; temperature: one number, or [T] float32, each
    above 0, which costs a pass more over the logits. Both results carry gradients to hidden and head_weight.
    """
    if not isinstance(temperature, Tensor) and temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0")
    logprob, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight, targets.contiguous(), temperature, chunk, support
    )
    return logprob, entropy


def matmul_float32(left: Tensor, right: Tensor) -> Tensor:
    """left @ right summed and returned in float32, whatever the operands are."""
    if left.dtype == right.dtype == torch.float32:
        return left @ right
    if left.is_cuda and left.dtype == right.dtype:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in float32 as `total` is, without a second tensor of its size where the GPU can."""
    if left.is_cuda and left.dtype == right.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    elif left.dtype == right.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += matmul_float32(left, right)


@functools.cache
def _kernels() -> Any:
    """The Triton kernels; None where there is no Triton, or no C compiler, without which it can't start one."""
    if importlib.util.find_spec("triton") is None:
        return None
    if not os.environ.get("CC") and not any(map(shutil.which, COMPILERS)):
        log.warning("log-probs are computed by PyTorch, which is slower: Triton finds no C compiler (install gcc, or set CC)")
        return None
    from telescope.backends.common import softmax_rows

    return softmax_rows


def fused_kernels(tensor: Tensor) -> Any:
    """What computes in one pass over the logits, or None."""
    return _kernels() if tensor.is_cuda else None


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps only the log of each softmax denominator and the entropies, [T] each; logits are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        chunk: int,
        support: Support,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        logprob = hidden.new_empty(tokens, dtype=torch.float32)
        entropy = torch.empty_like(logprob)
        denominator = torch.empty_like(logprob)
        fused = fused_kernels(hidden)
        for start in range(0, tokens, chunk):
            here = slice(start, start + chunk)
            logits, scale = _logits(hidden[here], head_weight, targets[here], _part(temperature, here), support)
            if fused is not None:
                fused.statistics(logits, targets[here], scale, (logprob[here], entropy[here], denominator[here]))
                continue
            logits *= scale
            denominator[here] = logits.logsumexp(dim=-1)
            logprob[here] = logits.gather(1, targets[here, None]).squeeze(1) - denominator[here]
            logits -= denominator[here, None]
            entropy[here] = -logits.exp().mul_(logits).sum(dim=-1)
        each = temperature if isinstance(temperature, Tensor) else None
        ctx.save_for_backward(hidden, head_weight, targets, denominator, entropy, each)
        ctx.temperature, ctx.chunk, ctx.support = None if each is not None else temperature, chunk, support
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        """d logprob / d logits = (1[target] - p) / temperature; d entropy / d logits = -p (log p + entropy) / temperature."""
        of_logprob, of_entropy = gradients
        hidden, head_weight, targets, denominator, entropy, each = ctx.saved_tensors
        if of_logprob is None and of_entropy is None:
            return None, None, None, None, None, None
        temperature, out_scale = (each, 1.0) if each is not None else (ctx.temperature, 1 / ctx.temperature)
        if each is not None:  # the division by the temperature is done to what comes in, which is a number a token
            of_logprob, of_entropy = (None if one is None else one / each for one in (of_logprob, of_entropy))
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(head_weight, dtype=torch.float32) if need_weight else None
        fused = fused_kernels(hidden)
        for start in range(0, hidden.shape[0], ctx.chunk):
            here = slice(start, start + ctx.chunk)
            logits, scale = _logits(hidden[here], head_weight, targets[here], _part(temperature, here), ctx.support)
            upstream = [None if one is None else one[here] for one in (of_logprob, of_entropy)]
            facts = targets[here], denominator[here], entropy[here], *upstream
            if fused is not None:
                d_logits = fused.gradient(logits, *facts, scale=scale, out_scale=out_scale, dtype=hidden.dtype)
            else:
                d_logits = gradient_of_logits(logits.mul_(scale), *facts)
                d_logits = (d_logits if each is not None else d_logits.div_(temperature)).to(hidden.dtype)
            del logits
            if d_hidden is not None:
                d_hidden[here] = matmul_float32(d_logits, head_weight).to(hidden.dtype)
            if d_weight is not None:
                add_matmul(d_weight, d_logits.t(), hidden[here])
        return d_hidden, None if d_weight is None else d_weight.to(head_weight.dtype), None, None, None, None


NEVER = -1e30
"""Logit of a token that can't be sampled: its probability is 0, and 0 times its log is 0, not NaN."""


def _part(temperature: float | Tensor, here: slice) -> float | Tensor:
    """The chunk's: one number, or [chunk, 1]."""
    return temperature[here, None] if isinstance(temperature, Tensor) else temperature


def _logits(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float | Tensor, support: Support
) -> tuple[Tensor, float]:
    """[chunk, V] float32, and what they are still to be multiplied with: what `support` keeps is known after temperature, and
    each token's own temperature is no one number."""
    logits = matmul_float32(hidden, head_weight.t())
    if support.is_whole and not isinstance(temperature, Tensor):
        return logits, 1 / temperature
    logits.div_(temperature)
    if not support.is_whole:
        _cut(logits, targets, support)
    return logits, 1.0


def _cut(logits: Tensor, targets: Tensor, support: Support) -> None:
    logits.masked_fill_(left_out(logits, targets, support), NEVER)


def gradient_of_logits(
    logits: Tensor,
    targets: Tensor,
    denominator: Tensor,
    entropy: Tensor,
    of_logprob: Tensor | None,
    of_entropy: Tensor | None,
    target_is_here: Tensor | None = None,
) -> Tensor:
    """[chunk, V] gradient with respect to the scaled logits, which are used up: two such tensors exist at most.
    `target_is_here` [chunk] bool: where logits are of a part of the vocabulary, whether the target is in it; None: always."""
    logp = logits.sub_(denominator[:, None])
    of_target = of_logprob if of_logprob is None or target_is_here is None else of_logprob * target_is_here
    if of_entropy is None:
        assert of_logprob is not None  # one of the two is there
        assert of_target is not None
        return logp.exp_().mul_(-of_logprob[:, None]).scatter_add_(1, targets[:, None], of_target[:, None])
    p = logp.exp()
    total = logp.add_(entropy[:, None]).mul_(p).mul_(-of_entropy[:, None])
    if of_logprob is not None and of_target is not None:
        total -= p.mul_(of_logprob[:, None])
        total.scatter_add_(1, targets[:, None], of_target[:, None])
    return total
