"""From an accumulated gradient to new weights: learning rate, loss scale, clipping, the optimiser's step.

Owns the order of an update, the schedule and the loss scale, which are every backend's. Where gradients lie and how they are
stepped is the backend's own. A gradient that is not finite, or that nothing was trained for, moves no weight: with a gradient
of 0 the moments of AdamW would move them.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from telescope.backends.base import Job
from telescope.maths.learning_rate import learning_rate_factor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptimizerUpdate:
    """One update: the gradient's norm before clipping, the rate, and whether it was left out."""

    norm: float
    rate: float
    skipped: bool
    empty: bool = False
    """No token was trained for it, on any rank: its gradient is 0, which says nothing."""


@dataclass
class StepUpdates:
    """All updates of a step, as metrics."""

    made: list[OptimizerUpdate] = field(default_factory=list)

    def add(self, update: OptimizerUpdate) -> None:
        self.made.append(update)

    @property
    def trained(self) -> int:
        """Updates that there were tokens for."""
        return sum(not update.empty for update in self.made)

    def metrics(self) -> dict[str, float]:
        """`grad_norm` is the mean over the updates that there were tokens for, `grad_norm_max` the largest; where there is none
        both are left out. `update_skipped` is a count."""
        norms = [update.norm for update in self.made if not update.empty]
        measured = {
            "grad_norm": math.fsum(norms) / len(norms),
            "grad_norm_max": max(norms, key=lambda norm: math.inf if math.isnan(norm) else norm),
        } if norms else {}  # fmt: skip
        return {
            **measured,
            "learning_rate": self.made[-1].rate,
            "updates": float(len(self.made)),
            "update_skipped": float(sum(update.skipped for update in self.made)),
            "updates_not_finite": float(sum(not math.isfinite(norm) for norm in norms)),
        }


def unmeasured(name: str) -> AbstractContextManager[None]:
    """Nobody asks how long it takes."""
    return nullcontext()


class Updater(ABC):
    """Of one rank. `skipped` counts the updates left out since the start."""

    optimizer: torch.optim.Optimizer

    def __init__(self, job: Job, *, scaled: bool) -> None:
        """`scaled`: losses are multiplied, as float16 needs it."""
        self._job = job
        self._scale = LossScale(enabled=scaled)
        self._scale_as_recorded()
        self.skipped = 0
        self.span: Callable[[str], AbstractContextManager[None]] = unmeasured
        """What measures clipping and the optimiser's step; of the step under way."""

    @abstractmethod
    def _gradients(self) -> Iterable[Tensor]:
        """What of the gradient lies here, for the loss scale to be taken out in place."""

    @abstractmethod
    def _clip(self, largest: float) -> float:
        """Scale the gradient down to the norm `largest`; return the norm it had, over all ranks. A collective."""

    @abstractmethod
    def _step(self) -> None:
        """The optimiser's, by the gradients as they are."""

    @abstractmethod
    def _clear(self) -> None:
        """Gradients begin anew."""

    @property
    def scaled_losses(self) -> bool:
        """Whether losses are multiplied by `loss_scale`, which is 1 where they are not."""
        return self._scale.enabled

    @property
    def loss_scale(self) -> float:
        return self._scale.scale

    def scaled(self, loss: Tensor) -> Tensor:
        """What is to be run backward."""
        return self._scale.scaled(loss)

    def update(self, step: int, *, empty: bool = False) -> OptimizerUpdate:
        """Use up the gradient that has accumulated. `empty`: no token was trained for it, on any rank."""
        rate = self._rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.span("clip"):
            self._scale.unscale(self._gradients())
            norm = self._clip(self._job.trainer.grad_clip)
        skipped = empty or not math.isfinite(norm)
        if not skipped:
            with self.span("optimizer"):
                self._step()
        else:
            self.skipped += 1
            why = "nothing is left to train" if empty else f"the gradient's norm is {norm}"
            log.warning("step %d: %s, so an update is left out", step, why)
        self._scale.adapt(math.isfinite(norm))
        self._clear()
        return OptimizerUpdate(norm, rate, skipped, empty)

    def counters(self) -> dict[str, float | None]:
        """What is kept beside the optimiser's own state. No scale where losses have none: to go on in float16 with a scale of
        1 would be to lose the small gradients, without a sign."""
        scale = self._scale.scale if self._scale.enabled else None
        return {"skipped": self.skipped, "scale": scale, "good": self._scale.good}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        self.skipped = int(counters["skipped"])
        if counters["scale"] is not None:
            self._scale.restore(float(counters["scale"]), int(counters["good"]))
        self._scale_as_recorded()

    def _scale_as_recorded(self) -> None:
        """A step that is run again has the scale that it had, whichever weights it is run with."""
        if self._job.recorded_loss_scale is not None and self._scale.enabled:
            self._scale.scale = self._job.recorded_loss_scale

    def _rate(self, step: int) -> float:
        trainer = self._job.trainer
        return trainer.learning_rate * learning_rate_factor(
            step,
            schedule=trainer.lr_scheduler,
            number_of_steps=self._job.number_of_steps,
            warmup_steps=trainer.warmup_steps,
            min_ratio=trainer.min_lr_ratio,
        )


FIRST_LOSS_SCALE = 2.0**16
GROW_AFTER = 200


class LossScale:
    """A power of two on the loss, so that float16 gradients do not vanish; 1 for every other precision.

    Halved at a step whose gradient overflowed, doubled after 200 steps without one. All ranks see the same norms."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = FIRST_LOSS_SCALE if enabled else 1.0
        self.good = 0

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale if self.enabled else loss

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide the gradients, which are float32 by now."""
        if not self.enabled:
            return
        for gradient in gradients:
            gradient.mul_(1.0 / self.scale)

    def restore(self, scale: float, good: int) -> None:
        """As they were after a checkpoint's step."""
        if self.enabled:
            self.scale, self.good = scale, good

    def adapt(self, finite: bool) -> None:
        if not self.enabled:
            return
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good % GROW_AFTER == 0:
            self.scale *= 2
