"""Modules that are built, called and named like those of Transformer Engine which megatron-core wraps, of PyTorch's operators:
a CPU has them. A norm and the product after it are one module, whose parameters are `layer_norm_weight`, `weight`, `bias`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from telescope.backends.megatron.layers import Norm, normed
from telescope.backends.megatron.modules import LayerModules


class NormLinear(ColumnParallelLinear):  # type: ignore[misc]
    """In place of TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **told: Any) -> None:
        super().__init__(input_size, output_size, config=config, **told)
        device = torch.cuda.current_device()
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype, device=device))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = config.layernorm_epsilon
        self.fuse_wgrad_accumulation = False

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor | None] = super().forward(normed(hidden, self.layer_norm_weight, self.eps))
        return result


class Linear(RowParallelLinear):  # type: ignore[misc]
    """In place of TERowParallelLinear."""

    fuse_wgrad_accumulation = False


class EngineNorm(Norm):
    """In place of TENorm, which marks the norms of heads as well."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps, spread=True)


def modules() -> LayerModules:
    return LayerModules(norm=EngineNorm, head_norm=EngineNorm, entering=NormLinear, leaving=Linear, norm_enters=True)
