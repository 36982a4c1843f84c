"""Models with experts: refused, as their updates were seen to leave other numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from telescope.inference.extension import Weights
from telescope.inference.opening import Opening


class Experts(torch.nn.Module):
    """As vLLM's FusedMoE keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 4))


@pytest.mark.vllm
def test_a_model_with_stacked_experts_is_refused_before_it_serves() -> None:
    model = torch.nn.ModuleDict({"dense": torch.nn.Linear(4, 4), "mlp": Experts()})
    config = SimpleNamespace(model_config=SimpleNamespace(model="nowhere", quantization=None, dtype=torch.float32))
    opened = Weights(model, config, torch.device("cpu"), lambda **_: None).open(Opening("run", "server-0", "full", 1.0, 1.0), 0)
    assert opened.refused.startswith("the model has experts")
    assert not opened.copies
