"""Which experts a token goes to and with which weights, and what a step tells of it.

Owns the formula of the routers that are known here, recorded choices in place of a router's own (router replay), and the load
of the experts as metrics. Refuses to know how experts compute and where tokens are sent: that is each backend's own.

A recorded choice replaces the choice alone. Weights are still those of this model's router for these experts, so a gradient
flows to the router as ever: with the router's probabilities p and recorded experts S, the weight of e in S is p_e, or
p_e / sum of p over S where the model normalises its weights (R3: Ma et al., Stabilizing MoE Reinforcement Learning by Aligning
Training and Inference Routers, arXiv:2510.11370).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from telescope.backends.common.rows import sent
from telescope.maths.packing import RowArrays
from telescope.maths.routing import unrecorded

UNRECORDED = -1
"""In place of an expert, on the device: the router chooses."""


def choose(logits: Tensor, top_k: int, recorded: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Probabilities [T, E] float32 and experts [T, K] int64 of T tokens, from the router's logits [T, E].

    `recorded` [T, K]: experts that are taken as they are; where a token's first one is `UNRECORDED` the K most probable are.
    """
    probabilities = logits.softmax(-1, dtype=torch.float32)
    experts = probabilities.detach().topk(top_k, dim=-1).indices
    if recorded is not None:
        experts = torch.where(recorded[:, :1] >= 0, recorded.to(experts.dtype), experts)
    return probabilities, experts


def weigh(probabilities: Tensor, experts: Tensor, *, normalised: bool) -> Tensor:
    """Weights [T, K] float32 of the chosen experts; `normalised`: each token's add up to 1 (`norm_topk_prob`)."""
    weights = probabilities.gather(1, experts)
    return weights / weights.sum(-1, keepdim=True) if normalised else weights


@dataclass(frozen=True)
class RowRouting:
    """What routers are told of one row of T tokens, on the device."""

    counted: Tensor
    """[T] bool: a token of a sample; padding goes somewhere too, and no metric counts it."""
    recorded: Tensor | None = None
    """[T, L, K] int64, of the L layers with experts; None: nothing of this row was recorded."""

    def of_layer(self, number: Tensor) -> Tensor | None:
        """[T, K]; `number` [] int64 counts the layers with experts. A tensor: a number would make a graph of its own of each
        compiled layer."""
        return None if self.recorded is None else self.recorded.index_select(1, number[None])[:, 0]

    def padded(self, tokens: int) -> RowRouting:
        """With so many more tokens, which do not count."""
        recorded = None if self.recorded is None else F.pad(self.recorded, (0, 0, 0, 0, 0, tokens), value=UNRECORDED)
        return RowRouting(F.pad(self.counted, (0, tokens)), recorded)

    def part(self, tokens: slice) -> RowRouting:
        """Of the tokens that a rank has, where ranks share a row."""
        return RowRouting(self.counted[tokens], None if self.recorded is None else self.recorded[tokens])


def of_row(arrays: RowArrays, device: str) -> RowRouting:
    """What routers are told of a row; the last segment is its padding."""
    counted = sent(arrays.segments < len(arrays.boundaries) - 2, device)
    if arrays.routed is None:
        return RowRouting(counted)
    recorded = sent(arrays.routed, device).long()
    return RowRouting(counted, recorded.masked_fill(recorded == unrecorded(arrays.routed.dtype), UNRECORDED))


class ExpertLoad:
    """Of one step on one rank: how many tokens each expert got, layer by layer. Sums stay on the device until `finish`."""

    def __init__(self, layers: int, experts: int, top_k: int, device: str) -> None:
        self.layers, self.experts, self.top_k = layers, experts, top_k
        self._tokens = torch.zeros(layers, experts, dtype=torch.float64, device=device)
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        """Choices, entropy, recorded choices, and recorded experts that the router would have left out."""
        self._open = torch.ones((), dtype=torch.float64, device=device)
        """1, or 0 where nothing is to be counted: a number rather than a flag, so that compiled layers need not know."""

    def open(self, counts: bool) -> None:
        """Whether what comes is counted."""
        self._open.fill_(float(counts))

    @torch.no_grad()
    def add(self, layer: Tensor, probabilities: Tensor, experts: Tensor, row: RowRouting) -> None:
        """What a layer's router did with the tokens of a row: probabilities [T, E], experts [T, K]. `layer`: see
        `of_layer`."""
        counted = row.counted
        each = (counted * self._open)[:, None].expand(-1, experts.shape[1])
        self._tokens.view(-1).index_add_(0, (experts + layer * self.experts).reshape(-1), each.reshape(-1))
        entropy = torch.special.entr(probabilities).sum(-1).double()
        sums = [counted.double().sum(), entropy.where(counted, 0.0).sum()]
        recorded = row.of_layer(layer)
        if recorded is None:
            sums += [torch.zeros_like(sums[0])] * 2
        else:
            known = counted & (recorded[:, 0] >= 0)
            own = probabilities.topk(self.top_k, dim=-1).indices
            missed = (experts[:, :, None] != own[:, None, :]).all(-1).sum(-1).double()
            sums += [known.double().sum(), missed.where(known, 0.0).sum()]
        self._sums += torch.where(self._open > 0, torch.stack(sums), 0.0)  # what does not count may be no number

    def finish(self) -> dict[str, float]:
        """Metrics over all ranks, and nothing is counted any more. A collective; every rank must have counted other tokens."""
        flat = torch.cat([self._tokens.reshape(-1), self._sums])
        self._tokens.zero_()
        self._sums.zero_()
        dist.all_reduce(flat)
        found = flat.tolist()
        tokens = np.asarray(found[:-4]).reshape(self.layers, self.experts)
        return load_metrics(tokens, *found[-4:], top_k=self.top_k)


def load_metrics(
    tokens: np.ndarray, choices: float, entropy: float, recorded: float, missed: float, *, top_k: int
) -> dict[str, float]:
    """tokens [L, E]: how many each expert of each layer got. The other four are sums over tokens and layers; nothing comes of
    no token. `load_metrics(np.array([[3.0, 1.0]]), 4.0, 2.0, 0.0, 0.0, top_k=1)` has an `expert_load_max` of 1.5."""
    if not choices:
        return {}
    most = tokens.max(1) / tokens.mean(1)
    metrics = {
        "expert_load_max": float(most.max()),
        "expert_load_mean": float(most.mean()),
        "experts_idle_fraction": float((tokens == 0).mean()),
        "router_entropy": entropy / choices,
    }
    if recorded:
        metrics |= {"router_replayed_fraction": recorded / choices, "router_difference": missed / (recorded * top_k)}
    return metrics
