"""What a layer keeps for its backward pass, and what it computes again: everything, its input alone, or its products.

Owns the choice of operators that are worth keeping, and of the layers that compute again where not all of them do.
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


class Indivisible(ValueError):
    """Not this many layers of this model can compute again; the message says why."""


def enable(lm: Any, kept: Mode, layers: int | None = None) -> None:
    """Let the layers of a transformers model compute again what `kept` does not keep: the first `layers` of them, or all.

    The first ones, since the peak of a long row comes with the last layer's gradient, while all others' activations wait: a
    last layer that keeps everything has nothing to make room for then, and by the time that others must make room, those behind
    them are gone. A test measures each choice of as many layers: none has a smaller peak. Raises `Indivisible`.

    selective: results of matrix products and of attention stay (of layers that are compiled those of attention alone: products
    inside a compiled graph are out of reach), so that norms, rotations and activation functions alone are
    computed twice. As in Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), the other
    way round: there attention is what is computed again, which kernels that keep no scores have made needless.

    Random states are not put back for it: nothing in a model that is trained here draws (policy.py sees to that).
    """
    if kept == "none":
        return
    kwargs: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kept == "selective":
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    if layers is not None:
        _only_the_first(lm, layers)


def _only_the_first(lm: Any, layers: int) -> None:
    """By the flag that each layer of transformers' models has of its own and looks at in each pass. (`every_n_layers` there
    takes the first layer and then every n-th, and not all versions that are supported have it.)"""
    from transformers.modeling_layers import GradientCheckpointingLayer

    every = lm.get_decoder().layers
    if layers > len(every):
        raise Indivisible(f"backend.checkpointed_layers={layers} is more than the {len(every)} layers of {type(lm).__name__}")
    if not all(isinstance(layer, GradientCheckpointingLayer) for layer in every):
        raise Indivisible(
            f"backend.checkpointed_layers={layers}: the layers of {type(lm).__name__} can't be told one by one whether to "
            "compute again: leave it out, so that all of them do"
        )
    for place, layer in enumerate(every):
        for module in layer.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = place < layers


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
