"""LoRA adapters in a Hugging Face model, through peft: injected in place, the model itself frozen.

Owns which parameters are trained and the names under which an adapter is published: those of peft's own files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from telescope.config.sections import LoraSettings

ADAPTER = "default"


class NoSuchModule(ValueError):
    """A targeted name is not a matrix of this model, or none that can have an adapter."""


def inject(lm: Any, lora: LoraSettings) -> None:
    """Give every targeted matrix its adapter, float32 whatever the model is in; B is zero, so nothing changes yet.

    A is drawn from torch's generator: seed it alike on all ranks. No dropout: a log-prob must not depend on chance.
    """
    from peft import LoraConfig, inject_adapter_in_model

    present = {name.rpartition(".")[2] for name, module in lm.named_modules() if isinstance(module, nn.Linear)}
    if absent := [name for name in lora.target_modules if name not in present]:
        raise NoSuchModule(
            f"model.lora.target_modules names {', '.join(absent)}, which {type(lm).__name__} does not have; "
            f"its matrices are {', '.join(sorted(present))}"
        )
    head = next((name for name, module in lm.named_modules() if module is lm.get_output_embeddings()), "")
    if head.rpartition(".")[2] in lora.target_modules:
        raise NoSuchModule(
            f"model.lora.target_modules names {head}, the head of {type(lm).__name__}: log-probs are computed from its weight "
            "alone, so an adapter of it would never be trained; leave it out"
        )
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.target_modules), lora_dropout=0.0, bias="none"
    )
    inject_adapter_in_model(config, lm, adapter_name=ADAPTER)
    for parameter in lm.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def published(module: nn.Module, prefix: str, *, adapters: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """What a version consists of, by the name that servers know: all weights of the model, or the adapters alone.

    `prefix` stands before the model's own names. An adapter's is `base_model.model.<module>.lora_A.weight`.
    """
    for name, parameter in module.named_parameters():
        name = name.removeprefix(prefix)
        if not adapters:
            yield name, parameter
        elif parameter.requires_grad:
            yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", parameter
