"""What a Hugging Face model takes to be trained, from its parameters and configuration. `maths.flops` owns the formulas."""

from __future__ import annotations

import logging
from typing import Any

import torch

from telescope.maths import flops
from telescope.maths.memory import EXPERTS

log = logging.getLogger(__name__)


def training_work(lm: Any) -> flops.TrainingWork:
    """Of a causal language model, sharded or not. Of experts those count that a token goes through; an embedding that is only
    looked up does not."""
    config = lm.config.get_text_config()
    experts = next((count for name in EXPERTS if (count := getattr(config, name, None))), 0)
    active = (getattr(config, "num_experts_per_tok", None) or experts) / experts if experts else 1.0
    embedding, head = lm.get_input_embeddings().weight, lm.get_output_embeddings().weight
    trained = frozen = 0.0
    for name, parameter in lm.named_parameters():
        if parameter is embedding and embedding is not head:
            continue
        count = parameter.numel() * (active if ".experts." in name else 1.0)
        trained += count if parameter.requires_grad else 0.0
        frozen += 0.0 if parameter.requires_grad else count
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    mean = sum(_head_dims(config, layers, heads)) / layers
    return flops.TrainingWork.of(trained=trained, frozen=frozen, layers=layers, heads=heads, head_dim=mean)


def _head_dims(config: Any, layers: int, heads: int) -> list[float]:
    """Of each layer. Where they differ newer transformers has no common number, and older one a second for full attention."""
    if own := getattr(config, "per_layer_config", None):
        return [_head_dim(own[number], heads) for number in range(layers)]
    if wide := getattr(config, "global_head_dim", None):
        return [float(wide if kind == "full_attention" else config.head_dim) for kind in config.layer_types]
    return [_head_dim(config, heads)] * layers


def _head_dim(config: Any, heads: int) -> float:
    """The width of a head; with a compressed cache the mean of its keys' and its values', which are not alike."""
    scores, values = getattr(config, "qk_nope_head_dim", None), getattr(config, "v_head_dim", None)
    if scores and values:
        return float(scores + config.qk_rope_head_dim + values) / 2
    return float(getattr(config, "head_dim", None) or config.hidden_size // heads)


def card_bytes(device: str) -> int:
    """Memory of the whole card; 0 on a CPU."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.startswith("cuda") else 0


def peak_flops(device: str, given: float | None) -> float | None:
    """Operations a second of one card: as given, else by its name; None on a CPU, and for an unknown card, said once."""
    if given is not None or not device.startswith("cuda"):
        return given
    name = torch.cuda.get_device_name(device)
    known = flops.peak_of(name)
    if known is None:
        log.warning("the peak of a %s is not known here, so there is no mfu: set trainer.peak_flops", name)
    return known
