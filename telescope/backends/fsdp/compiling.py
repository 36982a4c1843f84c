"""torch.compile for the layers of a model, each by itself, its attention left out.

Owns what is compiled. Attention is left out because it is told the lengths of a row's samples, other ones in each row: its
kernels are compiled already, and a graph for each set of lengths would never be used twice. The number of tokens in a row is a
symbol, so that rows of all lengths share one graph.
"""

from __future__ import annotations

from typing import Any

import torch

from telescope.backends.common import attention


def compile_layers(lm: Any, kind: attention.Kind) -> None:
    """Before sharding, so that the collectives of FSDP stay outside. Compilation itself happens in the first pass."""
    from transformers import AttentionInterface

    name = attention.NAMES[kind]
    AttentionInterface.register(name, torch.compiler.disable(AttentionInterface()[name]))  # type: ignore[no-untyped-call]
    for layer in lm.get_decoder().layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
