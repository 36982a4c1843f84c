"""Context parallelism after Ulysses (arXiv:2309.14509): one packed row of T tokens spread over C ranks, T / C tokens each.

Owns which part of a row is whose and the exchanges between the C ranks: inside attention each of them has all tokens and a
share of the heads, everywhere else all heads and its own tokens; log-probs are then joined, so that each rank computes the loss
from the whole row. Refuses to know models and losses. Every exchange is a collective: all C ranks run the same row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """This rank's part of a row: its tokens, and which of the row's n sampled places are among them."""

    tokens: slice
    sampled: slice


@dataclass(frozen=True)
class Context:
    """This rank's place among the `size` ranks that share each row, in order of their parts."""

    rank: int
    size: int
    group: Any
    """Of torch.distributed."""

    def piece(self, tokens: int, places: np.ndarray) -> Piece:
        """Of a row of `tokens` tokens with log-probs wanted at `places` [n], in rising order."""
        if tokens % self.size:
            raise ValueError(
                f"a row of {tokens} tokens can't be cut into backend.context_parallel_size={self.size} equal parts: "
                f"set trainer.pad_to_multiple_of to a multiple of {self.size}"
            )
        share = tokens // self.size
        start = self.rank * share
        first, last = np.searchsorted(places, (start, start + share)).tolist()
        return Piece(slice(start, start + share), slice(first, last))

    def joined(self, own: Tensor, piece: Piece, count: int) -> Tensor:
        """[n of this rank] -> [n = count] of the whole row, alike on all ranks; a gradient comes back to its own place.

        The loss is computed from the result on each of the ranks, and is one loss, not C: so what comes back is cut, and not
        added up over the ranks.
        """
        result: Tensor = _Join.apply(own, piece.sampled, count, self.group)  # type: ignore[no-untyped-call]
        return result

    def by_heads(self, tensor: Tensor) -> Tensor:
        """[1, H, T / C, D] -> [1, H / C, T, D]: all tokens of this rank's share of the heads."""
        _, heads, share, width = tensor.shape
        parts = tensor.reshape(self.size, heads // self.size, share, width)
        found = _exchange(parts, self.group)  # [C, H / C, T / C, D], in order of the tokens
        return found.transpose(0, 1).reshape(1, heads // self.size, share * self.size, width)

    def by_tokens(self, tensor: Tensor) -> Tensor:
        """[1, T, H / C, D] -> [1, T / C, H, D]: back to this rank's tokens."""
        _, tokens, heads, width = tensor.shape
        parts = tensor.reshape(self.size, tokens // self.size, heads, width)
        found = _exchange(parts, self.group)  # [C, T / C, H / C, D], in order of the heads
        return found.transpose(0, 1).reshape(1, tokens // self.size, heads * self.size, width)

    def shared_out(self, tensor: Tensor) -> Tensor:
        """Keys or values [1, Hkv, T / C, D] with each head as often as makes their number a multiple of C.

        Query heads share key heads in order, so a rank's key heads are then those of its query heads, whatever divides what:
        where C and Hkv divide the number of query heads, so does their least common multiple.
        """
        heads = tensor.shape[1]
        return tensor.repeat_interleave(math.lcm(heads, self.size) // heads, dim=1) if heads % self.size else tensor


def join_context_group(rank: int, world: int, size: int) -> Context | None:
    """This rank's group of `size`, or None where rows are not shared. A collective of all ranks of the world."""
    if size == 1:
        return None
    if world % size:
        raise ValueError(
            f"backend.context_parallel_size={size} must divide the number of trainer ranks, and "
            f"cluster.trainer_num_workers={world}: set it to a multiple of {size}"
        )
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return Context(rank % size, size, groups[rank // size])


def _exchange(parts: Tensor, group: Any) -> Tensor:
    """[C, ...] -> [C, ...]: part c goes to rank c, and part r of the result has come from rank r."""
    result: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """All to all. Its own transpose: gradients go back the way that values came."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        given = parts.contiguous()
        found = torch.empty_like(given)
        dist.all_to_all_single(found, given, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        given = gradients[0].contiguous()
        found = torch.empty_like(given)
        dist.all_to_all_single(found, given, group=ctx.group)
        return found, None


class _Join(torch.autograd.Function):
    """A sum over ranks of vectors that are 0 wherever another rank's are not: exact in every precision."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, place: slice, count: int, group: Any) -> Tensor:
        ctx.place = place
        whole = own.new_zeros(count)
        whole[place] = own
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0][ctx.place], None, None, None
