"""The Megatron backend on CPUs with gloo, which users are refused, with a look at its gradient before each update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from telescope.backends.base import Job
from telescope.backends.common.updates import OptimizerUpdate
from telescope.backends.megatron import Megatron
from telescope.backends.megatron.backend import MegatronBackend


@contextmanager
def on_cpu() -> Iterator[None]:
    """megatron-core makes its parameters and buffers on the device that this names."""
    with mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")):
        yield


class Watching(MegatronBackend):
    """`updates`: the gradients of all updates since the start, by Hugging Face's names, on the first ranks of all stages of the
    first model."""

    def __init__(self, settings: Megatron, job: Job) -> None:
        super().__init__(settings, job)
        self.updates: list[dict[str, torch.Tensor]] = []
        update = self._updater.update

        def watched(step: int, *, empty: bool = False) -> OptimizerUpdate:
            self.updates.append(gradients(self))
            return update(step, empty=empty)

        self._updater.update = watched  # type: ignore[method-assign]


def gradients(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    """Of all parameters of a stage, whole; on every rank of the first model."""
    found: dict[str, torch.Tensor] = {}
    for rule in (rule for name, rule in backend._table.rules.items() if name in backend._masters.parameters):
        whole = backend._masters.whole(rule.parameter, lambda piece: piece.gradient, torch.float32)
        if whole is None:
            continue
        for name, part in backend._table.split(rule, whole).items():
            dim = backend._table.of[name][1].dim
            shape = backend._table.shapes[name]
            spread = backend._parallel.spread(part.contiguous(), dim, shape, of_expert=rule.of_experts)
            found[name] = spread.full_tensor().clone()  # type: ignore[attr-defined]
    return found


def watch(job: Job, **settings: Any) -> Watching:
    return Watching(Megatron(**{"mixed_precision_dtype": None, "gradient_checkpointing": False, **settings}), job)
