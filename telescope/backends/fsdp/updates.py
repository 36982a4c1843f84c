"""From an accumulated gradient to new weights, for parameters that FSDP has sharded.

Owns where the gradient lies and what steps it. The order of an update is common/updates.py's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from telescope.backends.base import Job
from telescope.backends.common.stored_states import ON_HOST, StoredStates
from telescope.backends.common.updates import OptimizerUpdate as OptimizerUpdate
from telescope.backends.common.updates import Updater
from telescope.backends.fsdp import optimizers


class ShardUpdater(Updater):
    """Of a module's parameters that are trained."""

    def __init__(self, kind: optimizers.Kind, job: Job, module: nn.Module, *, scaled: bool, hosted: bool = False) -> None:
        """`hosted`: moments lie in host memory between updates."""
        super().__init__(job, scaled=scaled)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.optimizer = optimizers.make(kind, module, job.trainer)
        self._hosted = StoredStates(self.optimizer, job.world.device, lambda *_: ON_HOST) if hosted else None

    def _gradients(self) -> Iterable[Tensor]:
        return (parameter.grad for parameter in self._parameters if parameter.grad is not None)

    def _clip(self, largest: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, largest)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _step(self) -> None:
        (self._hosted or self.optimizer).step()

    def _clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def make_state(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let the optimiser make the state of these parameters, which it does at their first step, so that it can be read into:
        a step with a rate and gradients of 0, which leaves the weights as they are."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        (self._hosted or self.optimizer).step()
        self.optimizer.zero_grad(set_to_none=True)
