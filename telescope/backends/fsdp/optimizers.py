"""Which optimiser steps which parameters. Owns the groups: weight decay is for matrices alone, Muon for those of the layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from telescope.backends.fsdp.eight_bit import AdamW8bit
from telescope.backends.fsdp.muon import Muon
from telescope.config.sections import TrainerSettings

Kind = Literal["adamw", "adamw_8bit", "muon", "sgd"]


def make(kind: Kind, module: nn.Module, trainer: TrainerSettings) -> torch.optim.Optimizer:
    """One optimiser of all parameters of `module` that are trained."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    matrices = [(name, parameter) for name, parameter in named if parameter.ndim >= 2]
    hidden = [parameter for name, parameter in matrices if kind == "muon" and in_a_layer(name) and parameter.ndim == 2]
    chosen = {id(parameter) for parameter in hidden}
    groups = _groups(
        ([parameter for _, parameter in matrices if id(parameter) not in chosen], {"weight_decay": trainer.weight_decay}),
        ([parameter for _, parameter in named if parameter.ndim < 2], {"weight_decay": 0.0}),
        (hidden, {"weight_decay": trainer.weight_decay, "muon": True}),
    )
    match kind:
        case "sgd":
            return torch.optim.SGD(groups, lr=trainer.learning_rate, foreach=True)
        case "adamw_8bit":
            return AdamW8bit(groups, lr=trainer.learning_rate, betas=trainer.betas)
        case "muon":
            return Muon(groups, lr=trainer.learning_rate, betas=trainer.betas, fused=True)
        case "adamw":
            return torch.optim.AdamW(groups, lr=trainer.learning_rate, betas=trainer.betas, fused=True)


def in_a_layer(name: str) -> bool:
    """Not the embedding's or the head's, of which Muon's authors say that AdamW suits them better."""
    return ".layers." in name


def _groups(*given: tuple[Iterable[nn.Parameter], dict[str, Any]]) -> list[dict[str, Any]]:
    found = [{"params": list(parameters), **facts} for parameters, facts in given]
    return [group for group in found if group["params"]]
