"""The learning rate's factor at a step. Pure functions of the step number: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["none", "constant", "linear", "cosine"]


def learning_rate_factor(
    step: int, *, schedule: Schedule, number_of_steps: int, warmup_steps: int = 0, min_ratio: float = 0.0
) -> float:
    """Factor on the learning rate for step 1..number_of_steps, e.g. 0.25 at step 1 of 4 warm-up steps (never 0 there).

    none: 1 always. constant: warm-up, then 1. linear, cosine: warm-up, then down to `min_ratio`, met at the last step.
    """
    if step < 1:
        raise ValueError(f"step={step}: steps count from 1")
    if schedule == "none":
        return 1.0
    if step <= warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    full = max(warmup_steps, 1)  # the last step at the full rate
    if number_of_steps <= full:
        return 1.0
    progress = min((step - full) / (number_of_steps - full), 1.0)
    fall = progress if schedule == "linear" else (1.0 - math.cos(math.pi * progress)) / 2.0
    return 1.0 - (1.0 - min_ratio) * fall
