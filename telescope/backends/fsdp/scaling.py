"""A power of two on the loss, so that float16 gradients do not vanish; 1 for every other precision."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

FIRST = 2.0**16
GROW_AFTER = 200


class LossScale:
    """Halved at a step whose gradient overflowed, doubled after 200 steps without one. All ranks see the same norms."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = FIRST if enabled else 1.0
        self.good = 0

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale if self.enabled else loss

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients, which are float32 by now."""
        if not self.enabled:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / self.scale)

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
