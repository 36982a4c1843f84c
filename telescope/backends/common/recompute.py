"""What a layer keeps for its backward pass where it does not keep everything: the choice of operators that are worth keeping.

Owns that choice and the words for it. Which layers compute again, and how they are told, is each backend's own.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Mode = Literal["none", "full", "selective"]

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
ATTENTIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
)
"""Operators of `torch.ops.aten`, as far as this torch has them."""
OTHERS = ("torch_attn::_varlen_attn", "flash_attn::_flash_attn_varlen_forward", "flash_attn_3::fwd")
"""Operators of attention that packages register, by name."""


def mode(setting: bool | Literal["full", "selective"]) -> Mode:
    """backend.gradient_checkpointing in one word: true is full."""
    if isinstance(setting, bool):
        return "full" if setting else "none"
    return setting


def checkpoint_arguments(kept: Mode) -> dict[str, Any]:
    """What `torch.utils.checkpoint.checkpoint` is told for `full` and `selective`.

    selective: results of matrix products and of attention stay, so that norms, rotations and activation functions alone are
    computed twice. As in Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), the other
    way round: there attention is what is computed again, which kernels that keep no scores have made needless.

    Random states are not put back for it: nothing in a model that is trained here draws.
    """
    arguments: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kept == "selective":
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    return arguments


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if worth_keeping(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def worth_keeping(operator: Any) -> bool:
    """Whether it does most of a layer's arithmetic for what it returns."""
    return operator in _kept_operators() or operator.name().partition(".")[0] in OTHERS


@functools.cache
def _kept_operators() -> frozenset[Any]:
    """Without those that write into a tensor they are given, as compiled layers call them: such a result can't be put back."""
    packets = (getattr(torch.ops.aten, name, None) for name in (*PRODUCTS, *ATTENTIONS))
    found = (getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads())
    return frozenset(operator for operator in found if not operator._schema.is_mutable)
