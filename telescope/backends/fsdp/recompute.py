"""What a layer keeps for its backward pass, and what it computes again: everything, its input alone, or its products.

Owns how transformers' layers are told, and which of them compute again where not all do. Operators worth keeping are
common/recompute.py's.
"""

from __future__ import annotations

from typing import Any

from telescope.backends.common.recompute import Mode, checkpoint_arguments
from telescope.backends.common.recompute import mode as mode
from telescope.backends.common.recompute import worth_keeping as worth_keeping


class Indivisible(ValueError):
    """Not this many layers of this model can compute again; the message says why."""


def enable(lm: Any, kept: Mode, layers: int | None = None) -> None:
    """Let the layers of a transformers model compute again what `kept` does not keep: the first `layers` of them, or all.

    The first ones, since the peak of a long row comes with the last layer's gradient, while all others' activations wait: a
    last layer that keeps everything has nothing to make room for then, and by the time that others must make room, those behind
    them are gone. A test measures each choice of as many layers: none has a smaller peak. Raises `Indivisible`.

    `selective` is telescope.backends.common.recompute's; of layers that are compiled the results of attention alone stay, as
    products inside a compiled graph are out of reach. Nothing in a model that is trained here draws (policy.py sees to that).
    """
    if kept == "none":
        return
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint_arguments(kept))
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
