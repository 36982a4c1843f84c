"""The FSDP backend with a look at its gradient before each update: AdamW's first step hides the gradient's size."""

from __future__ import annotations

import torch

from telescope.backends.base import Job
from telescope.backends.fsdp import FSDP
from telescope.backends.fsdp.backend import FSDPBackend


class Watching(FSDPBackend):
    gradients: dict[str, torch.Tensor]

    def _update(self, step: int) -> dict[str, float]:
        self.gradients = {name: p.grad.full_tensor().clone() for name, p in self._policy.named_parameters()}
        return super()._update(step)


def watch(job: Job, **settings: object) -> Watching:
    return Watching(FSDP(**{"mixed_precision_dtype": None, "gradient_checkpointing": False, **settings}), job)


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest relative distance of any tensor's gradient, by norm."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).norm() / left[name].norm()) for name in left)
