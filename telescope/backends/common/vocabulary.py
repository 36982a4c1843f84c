"""Log-probs and entropy of taken tokens where each rank of a group has the head's rows of a part of the vocabulary.

Owns the arithmetic over shards and its gradient; logprobs.py is the same for a head that is whole, and lends its products and
kernels. No rank ever has a [T, V] tensor, nor a [chunk, V] one but where `support` cuts tokens off.

With L the log of a shard's softmax denominator and H the entropy of the shard's own softmax, the whole distribution has
D = log Σ e^L, and entropy Σ e^(L - D) (H + D - L): each shard's share of the probability is e^(L - D). So the ranks exchange
three numbers a token. The largest logit carries no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from telescope.backends.common.logprobs import NEVER, add_matmul, fused_kernels, gradient_of_logits, matmul_float32
from telescope.maths.support import WHOLE, Support, left_out


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens whose rows of the head this rank has, at least one; ranks of `group` have the others, in their order."""

    first: int
    count: int
    whole: int
    """Tokens of all ranks."""
    each: int
    """Rows of a rank that has no fewer than the others."""
    group: Any
    """Of torch.distributed; None: this rank has all."""

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


def cut(vocabulary: int, rank: int, size: int, group: Any) -> VocabularyShard:
    """As `torch.chunk` cuts rows. Raises ValueError where the last rank would have none."""
    each = -(-vocabulary // size)
    first = min(rank * each, vocabulary)
    if each * (size - 1) >= vocabulary:
        raise ValueError(
            f"a vocabulary of {vocabulary} tokens can't be cut into {size} parts of {each}: the last would be empty"
        )
    return VocabularyShard(first, min(each, vocabulary - first), vocabulary, each, group if size > 1 else None)


def logprobs(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float | Tensor, chunk: int, shard: VocabularyShard,
    support: Support = WHOLE,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-prob of `targets` and entropy of the distribution at each token, both [T] float32 and the same on all ranks of the
    shard's group, after `temperature` and over the tokens that `support` keeps. A collective.

    hidden: [T, H], alike on all ranks; head_weight: [V of the shard, H] of the same dtype; targets: [T] int64 of the whole
    vocabulary; temperature: a number, or [T] float32. The gradient to hidden is this shard's share: whoever spreads hidden over
    the ranks has to sum it.
    """
    if not isinstance(temperature, Tensor) and temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0")
    logprob, entropy = _ShardedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight, targets.contiguous(), temperature, chunk, shard, support
    )
    return logprob, entropy


class _ShardedLogprobs(torch.autograd.Function):
    """Keeps the log of the whole softmax's denominator and its entropy, [T] each; logits are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float | Tensor, chunk: int,
        shard: VocabularyShard, support: Support,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        tokens = hidden.shape[0]
        own = torch.empty(3, tokens, dtype=torch.float32, device=hidden.device)  # L, H and the target's logit
        local, mine = _local(targets, shard)
        fused = fused_kernels(hidden)
        for start in range(0, tokens, chunk):
            here = slice(start, start + chunk)
            logits, scale = _logits(hidden[here], head_weight, targets[here], _of(temperature, here), shard, support)
            denominator, entropy, target = own[0, here], own[1, here], own[2, here]
            if fused is not None:
                fused.statistics(logits, local[here], scale, (target, entropy, denominator))
                target += denominator
                continue
            logits *= scale
            target.copy_(logits.gather(1, local[here, None]).squeeze(1))
            denominator.copy_(logits.logsumexp(dim=-1))
            logits -= denominator[:, None]
            entropy.copy_(-logits.exp().mul_(logits).sum(dim=-1))
        own[2].masked_fill_(~mine, 0.0)
        denominator, entropy, logit = _joined(own, shard)
        ctx.save_for_backward(hidden, head_weight, targets, denominator, entropy)
        ctx.temperature, ctx.chunk, ctx.shard, ctx.support = temperature, chunk, shard, support
        ctx.set_materialize_grads(False)
        return logit - denominator, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """As logprobs.py's, by the probabilities of the whole distribution; a target elsewhere has no entry here."""
        of_logprob, of_entropy = gradients
        nothing = (None,) * 5
        hidden, head_weight, targets, denominator, entropy = ctx.saved_tensors
        if of_logprob is None and of_entropy is None:
            return None, None, *nothing
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(head_weight, dtype=torch.float32) if need_weight else None
        local, mine = _local(targets, ctx.shard)
        fused = fused_kernels(hidden)
        for start in range(0, hidden.shape[0], ctx.chunk):
            here = slice(start, start + ctx.chunk)
            temperature = _of(ctx.temperature, here)
            logits, scale = _logits(hidden[here], head_weight, targets[here], temperature, ctx.shard, ctx.support)
            of_p, of_h = (None if one is None else one[here] for one in (of_logprob, of_entropy))
            facts = denominator[here], entropy[here], of_p, of_h
            alone = not isinstance(temperature, Tensor)
            if fused is not None:
                d_logits = fused.gradient(
                    logits, local[here].masked_fill(~mine[here], -1), *facts, scale=scale,
                    out_scale=1 / temperature if alone else 1.0, dtype=hidden.dtype if alone else torch.float32,
                )  # fmt: skip
            else:
                d_logits = gradient_of_logits(logits.mul_(scale), local[here], *facts, mine[here])
                if alone:
                    d_logits.div_(temperature)
            if not alone:
                d_logits.div_(temperature[:, None])
            d_logits = d_logits.to(hidden.dtype)
            del logits
            if d_hidden is not None:
                d_hidden[here] = matmul_float32(d_logits, head_weight).to(hidden.dtype)
            if d_weight is not None:
                add_matmul(d_weight, d_logits.t(), hidden[here])
        return d_hidden, None if d_weight is None else d_weight.to(head_weight.dtype), *nothing


def _of(temperature: float | Tensor, here: slice) -> Any:
    return temperature[here] if isinstance(temperature, Tensor) else temperature


def _local(targets: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """[T] int64: the targets' rows here, any row for those elsewhere; [T] bool: which are here."""
    places = targets - shard.first
    mine = (places >= 0) & (places < shard.count)
    return places.clamp(0, shard.count - 1), mine


def _joined(own: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor, Tensor]:
    """[3, T] of each shard -> D, the entropy, and the target's logit, [T] each. One exchange for all tokens."""
    if shard.group is None:
        return own[0].clone(), own[1].clone(), own[2].clone()
    every = own.new_empty(shard.size, *own.shape)
    dist.all_gather_into_tensor(every.view(-1), own.view(-1), group=shard.group)
    log_sums, entropies, logits = every.unbind(1)  # [ranks, T] each
    denominator = log_sums.logsumexp(0)
    behind = log_sums - denominator  # the log of each shard's share
    entropy = (behind.exp() * (entropies - behind)).sum(0)
    return denominator, entropy, logits.sum(0)


def _logits(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float | Tensor, shard: VocabularyShard, support: Support
) -> tuple[Tensor, float]:
    """[chunk, V of the shard] float32, and what they are still to be multiplied with. A collective where `support` cuts: what
    it keeps is known from the logits of all shards."""
    logits = matmul_float32(hidden, head_weight.t())
    if support.is_whole and not isinstance(temperature, Tensor):
        return logits, 1 / temperature
    logits.div_(temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    if not support.is_whole:
        out = left_out(_of_all_shards(logits, shard), targets, support)
        logits.masked_fill_(out[:, shard.first : shard.first + shard.count], NEVER)
    return logits, 1.0


def _of_all_shards(logits: Tensor, shard: VocabularyShard) -> Tensor:
    """[chunk, V] from [chunk, V of the shard]; the last shard is filled up on its way."""
    if shard.group is None:
        return logits
    sent = logits.new_zeros(len(logits), shard.each)
    sent[:, : shard.count] = logits
    every = sent.new_empty(shard.size, *sent.shape)
    dist.all_gather_into_tensor(every.view(-1), sent.view(-1), group=shard.group)
    return every.transpose(0, 1).reshape(len(logits), -1)[:, : shard.whole]
