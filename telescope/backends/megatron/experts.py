"""A layer's experts: a router, the way of tokens to the ranks that have their experts, and the experts' own products.

Owns these. No token is dropped, and no auxiliary loss is added: it would pull away from the rewards' gradient and depend on how
samples are packed. Formulas are those of Hugging Face's Qwen3-MoE.

megatron-core has such layers, too. Its router chooses by itself, its grouped products need Transformer Engine or a package of
its own, and on a CPU it computes an expert at a time; so of it this layer has the groups, and the buffers that sum an expert's
gradient over the ranks with the same one (the mark `allreduce` on the parameter).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from telescope.backends.common import grouped, routing
from telescope.backends.common.routing import ExpertLoad, RowRouting
from telescope.backends.megatron.parallel import ExpertPlace
from telescope.backends.megatron.rules import ModelDimensions


class Router(nn.Module):
    """The product is in the precision of the layer, and softmax and weights are in float32: so do Hugging Face's model and
    vLLM choose, and a product in float32 would choose other experts than the sampler where two are nearly as probable. (Hugging
    Face's rounds the weights to the layer's precision once more, vLLM does not, and neither does this.)"""

    def __init__(self, config: Any, facts: ModelDimensions) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(facts.experts, config.hidden_size, dtype=config.params_dtype, device=device))
        # each rank sees other tokens, and megatron-core sums the gradient over them, as of a norm
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] -> logits [T, E]."""
        return F.linear(hidden, self.weight)


class ExpertStacks(nn.Module):
    """This rank's experts, one matrix above another."""

    def __init__(self, config: Any, count: int, width: int) -> None:
        super().__init__()
        told: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, config.hidden_size, **told))
        self.down = nn.Parameter(torch.empty(count, config.hidden_size, width, **told))
        for stack in (self.gate_up, self.down):
            stack.allreduce = False  # type: ignore[attr-defined]

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[R, H] -> [R, H]: rows of the first expert, then of the second, and so on; `counts` [E here] says how many."""
        gate, up = grouped.product(rows, self.gate_up, counts).chunk(2, dim=-1)
        return grouped.product(F.silu(gate) * up, self.down, counts)


class ExpertLayer(nn.Module):
    """In place of a layer's MLP. `row` and `load` are set before each pass: what is known of the row's routing, and where the
    experts' load is counted, if it is."""

    row: RowRouting | None = None
    load: ExpertLoad | None = None

    def __init__(self, facts: ModelDimensions, place: ExpertPlace, number: int, *, config: Any) -> None:
        """`number` counts the layers with experts."""
        super().__init__()
        self._place, self._top_k, self._normalised = place, facts.top_k, facts.normalised
        self._number = torch.tensor(number, device=torch.cuda.current_device())
        self.router = Router(config, facts)
        self.experts = ExpertStacks(config, facts.experts // place.size, facts.expert_width)

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[T, 1, H] -> the same, and no bias. Among ranks that share out experts a collective."""
        tokens = hidden.flatten(0, 1)
        recorded = None if self.row is None else self.row.of_layer(self._number)
        probabilities, experts = routing.choose(self.router(tokens), self._top_k, recorded)
        if self.load is not None and self.row is not None:
            self.load.add(self._number, probabilities, experts, self.row)
        weights = routing.weigh(probabilities, experts, normalised=self._normalised)
        flat = experts.reshape(-1)
        order = flat.argsort(stable=True)  # of the T · K choices, by expert
        back = _inverse(order)
        chosen = flat.new_zeros(len(self.router.weight)).scatter_add_(0, flat, torch.ones_like(flat))  # bincount would wait
        found = self._sent(_taken(tokens, order, back, self._top_k), chosen)
        each = _taken(found, back, order).view(*experts.shape, -1)  # [T, K, H], in the order of the choice
        return (each * weights[..., None]).sum(1).to(hidden.dtype).view_as(hidden), None

    def _sent(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Rows [R, H] in order of their experts, `chosen` [E] of each -> what the experts make of them, in the same order."""
        place = self._place
        if place.size == 1:
            found: Tensor = self.experts(rows, chosen)
            return found
        coming = torch.empty_like(chosen)
        dist.all_to_all_single(coming, chosen, group=place.group)
        by_rank = torch.stack([chosen, coming]).view(2, place.size, -1)
        go, come = by_rank.sum(-1).tolist()
        given = _exchanged(rows, go, come, place.group)  # by rank they came from, then by expert
        counts = by_rank[1]  # [rank, expert here]
        numbers = torch.arange(counts.shape[1], device=rows.device).repeat(place.size)
        order = numbers.repeat_interleave(counts.reshape(-1), output_size=len(given)).argsort(stable=True)
        back = _inverse(order)
        made = self.experts(_taken(given, order, back), counts.sum(0))
        return _exchanged(_taken(made, back, order), come, go, place.group)


def _inverse(order: Tensor) -> Tensor:
    """Of a permutation [R]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _taken(rows: Tensor, order: Tensor, back: Tensor, times: int = 1) -> Tensor:
    """Rows [R, H], each `times` times, in another order: [R · times, H]. `back` is the inverse of `order` [R · times]."""
    result: Tensor = _Take.apply(rows, order, back, times)  # type: ignore[no-untyped-call]
    return result


class _Take(torch.autograd.Function):
    """As indexing, whose own backward pass adds up by sorting or in no fixed order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.times = times
        return rows[order // times if times > 1 else order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        found = gradients[0][back]
        return (found.view(-1, ctx.times, found.shape[-1]).sum(1) if ctx.times > 1 else found), None, None, None


def _exchanged(rows: Tensor, go: list[int], come: list[int], group: dist.ProcessGroup) -> Tensor:
    """The first go[0] rows to rank 0, and so on; come[0] from there."""
    result: Tensor = _AllToAll.apply(rows, go, come, group)  # type: ignore[no-untyped-call]
    return result


class _AllToAll(torch.autograd.Function):
    """Its own transpose: gradients go back the way that rows came."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, go: list[int], come: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.go, ctx.come, ctx.group = go, come, group
        found = rows.new_empty(sum(come), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), come, go, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        given = gradients[0].contiguous()
        found = given.new_empty(sum(ctx.go), *given.shape[1:])
        dist.all_to_all_single(found, given, ctx.go, ctx.come, group=ctx.group)
        return found, None, None, None
