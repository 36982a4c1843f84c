"""The FSDP backend with a look at its gradient before each update: AdamW's first step hides the gradient's size."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from telescope.backends.base import Job
from telescope.backends.fsdp import FSDP
from telescope.backends.fsdp.backend import FSDPBackend
from telescope.backends.fsdp.updates import OptimizerUpdate


class Watching(FSDPBackend):
    """`gradients` are those of the last update, `updates` those of all since the start."""

    def __init__(self, settings: FSDP, job: Job) -> None:
        super().__init__(settings, job)
        self.updates: list[dict[str, torch.Tensor]] = []
        update = self._updater.update

        def watched(step: int, *, empty: bool = False) -> OptimizerUpdate:
            found = ((name, p.grad) for name, p in self._policy.named_parameters())
            gradient = {name: grad.full_tensor().clone() for name, grad in found if isinstance(grad, DTensor)}
            self.updates.append(gradient)
            return update(step, empty=empty)

        self._updater.update = watched  # type: ignore[method-assign]

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        return self.updates[-1]


def watch(job: Job, **settings: Any) -> Watching:
    return Watching(FSDP(**{"mixed_precision_dtype": None, "gradient_checkpointing": False, **settings}), job)


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest relative distance of any tensor's gradient, by norm."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).norm() / left[name].norm()) for name in left)
