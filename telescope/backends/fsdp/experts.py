"""How the products of a layer's experts are computed: by one grouped kernel, or an expert at a time where that kernel can't.

Owns the look at the experts' widths. Which implementation a model has otherwise is transformers' choice.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd

log = logging.getLogger(__name__)

GROUPED, LOOP = "grouped_mm", "eager"
"""transformers' words for the two."""
ALIGNED = 16
"""Bytes of which a row of each matrix must be a multiple for PyTorch's grouped product."""


def choose(lm: Any, computing: torch.dtype) -> None:
    """Give a model the loop where rows of its experts' matrices, in the precision of computing, are none that the grouped
    product takes: it would end the first pass with an error of PyTorch's. Looks at nothing else."""
    if getattr(lm.config.get_text_config(), "_experts_implementation", None) != GROUPED:
        return
    stacks = (
        parameter
        for module in lm.modules()
        if not isinstance(module, _ConvNd)  # whose filters have three axes too
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 3
    )
    widths = sorted({width for stack in stacks for width in stack.shape[1:]})
    odd = [width for width in widths if width * computing.itemsize % ALIGNED]
    if not odd:
        return
    lm.set_experts_implementation(LOOP)
    log.warning(
        "%s: its experts' matrices have rows of %s numbers, no multiple of %d bytes in %s, which PyTorch's grouped product "
        "does not take: they are computed an expert at a time, which is slower",
        type(lm).__name__,
        " and ".join(map(str, odd)),
        ALIGNED,
        str(computing).removeprefix("torch."),
    )
