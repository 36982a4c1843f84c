"""torch.compile for the layers of a model, each by itself, its attention left out.

Owns what is compiled. Attention is left out because it is told the lengths of a row's samples, other ones in each row: its
kernels are compiled already, and a graph for each set of lengths would never be used twice. A layer is then two graphs, all
that comes before its attention and all that comes after. The number of tokens in a row is a symbol, so that rows of all lengths
share them.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch._functorch import config as functorch

from telescope.backends.common import attention
from telescope.backends.common.attention_choice import Kind

log = logging.getLogger(__name__)

BAN = "ban_recompute_materialized_backward"
"""Of `torch._functorch.config`: what a product of the backward pass takes is kept. torch 2.11 and 2.13 have it."""


def compile_layers(lm: Any, kind: Kind, *, pointwise_again: bool = False) -> None:
    """Before sharding, so that the collectives of FSDP stay outside. Compilation itself happens in the first pass.

    `pointwise_again`: PyTorch's partitioner, which cuts a graph into forward and backward, keeps what a product of the backward
    pass takes as it is: the outputs of norms and the MLP's activated gate times up. With it they are made again from what is
    kept anyway; no product is computed twice. (`torch._functorch.config.activation_memory_budget` below 1 begins with the same,
    but goes on to products by a solver's estimates, so that nobody could say what a layer keeps.)
    """
    from transformers import AttentionInterface

    # else the layer breaks too where the attention inside it does, and is four graphs, each of them started by the host
    torch._dynamo.config.nested_graph_breaks = True
    ban_pointwise(not pointwise_again)
    name = attention.register(kind)
    AttentionInterface.register(name, torch.compiler.disable(AttentionInterface()[name]))  # type: ignore[no-untyped-call]
    for layer in lm.get_decoder().layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def ban_pointwise(banned: bool, config: Any = functorch) -> None:
    """Whether the partitioner must keep what a product of the backward pass takes; a torch without that choice keeps it."""
    if hasattr(config, BAN):
        setattr(config, BAN, banned)
    elif not banned:
        log.warning(
            "torch %s has no torch._functorch.config.%s: backend.recompute_pointwise=true does nothing, and layers that keep "
            "everything hold more memory than the estimate says; set it to false, so that the estimate counts that",
            torch.__version__,
            BAN,
        )
