"""A Hugging Face model's routers: watched for the load of their experts, and made to take recorded choices.

Owns the table of routers that are known here. A hook behind each of them lets its own result stand wherever nothing was
recorded, so a model without recorded choices computes what transformers computes, to the bit. Routers of other kinds are left
alone: they have no metrics and take no recorded choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from telescope.backends.common import routing
from telescope.backends.common.routing import ExpertLoad, RowRouting

KNOWN = ("Qwen3MoeTopKRouter", "Qwen2MoeTopKRouter", "OlmoeTopKRouter", "MixtralTopKRouter")
"""Their classes in transformers: the most probable experts by a softmax over all, with weights of these probabilities, which
add up to 1 by the attribute `norm_topk_prob`, or where there is none."""


class Routers:
    """Of one model, in order of its layers. `row` is what they are told of the row under way, its backward pass included."""

    def __init__(self, modules: list[Any], device: str) -> None:
        first = modules[0]
        self.experts, self.top_k, self.layers = int(first.num_experts), int(first.top_k), len(modules)
        self.load = ExpertLoad(self.layers, self.experts, self.top_k, device)
        self.row: RowRouting | None = None
        for number, module in enumerate(modules):
            module.register_forward_hook(self._hook(torch.tensor(number, device=device)))

    @contextmanager
    def told(self, row: RowRouting | None, *, counts: bool) -> Iterator[None]:
        """Around a forward pass. `counts`: it is one that trains; what a backward pass computes again counts once."""
        self.row = row if counts or (row is not None and row.recorded is not None) else None
        self.load.open(counts)
        try:
            yield
        finally:
            self.load.open(False)

    def _hook(self, number: Tensor) -> Any:
        def behind(module: Any, given: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            row = self.row
            if row is None:
                return found
            recorded = row.of_layer(number)
            # newer transformers gives the logits, older the probabilities in their place
            with torch.set_grad_enabled(recorded is not None and torch.is_grad_enabled()):
                logits = F.linear(given[0].reshape(-1, given[0].shape[-1]), module.weight)
            if recorded is None:
                self.load.add(number, logits.softmax(-1, dtype=torch.float32), found[2], row)
                return found
            probabilities, experts = routing.choose(logits, module.top_k, recorded)
            self.load.add(number, probabilities, experts, row)
            weights = routing.weigh(probabilities, experts, normalised=getattr(module, "norm_topk_prob", True))
            return found[0], weights.to(found[1].dtype), experts

        return behind


def watched(lm: nn.Module, device: str) -> Routers | None:
    """Watch a model's routers; None where it has none, or others than known ones."""
    modules = [module for module in lm.modules() if type(module).__name__ in KNOWN]
    return Routers(modules, device) if modules else None
