"""What the processes of a plan would refuse where they are to run, known before any of them is started.

Owns the one list that a run, another attempt of it, the head of several hosts, a Slurm job and `telescope.check` ask. Refuses
to guess: of hosts other than this one only what the plan says is judged, and what can't be told here is left to the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from telescope._launch.local import compute_capability
from telescope._launch.plan import Plan, PlanError
from telescope.config.precision import unserved
from telescope.weights.choose import TransportRefused, of_plan

if TYPE_CHECKING:
    from telescope.config.run import RunConfig


def obstacles(config: RunConfig, plan: Plan, *, elsewhere: bool = False) -> list[str]:
    """Sentences with the remedy, each that of the process which would say it. `elsewhere`: its hosts are not this one alone."""
    return [*_weights(config, plan), *filter(None, (unserved(config, plan.device),)), *_training(config, plan, elsewhere)]


def refuse(config: RunConfig, plan: Plan, *, elsewhere: bool = False) -> None:
    """Raises `PlanError` with all of them, one a line."""
    if found := obstacles(config, plan, elsewhere=elsewhere):
        raise PlanError("\n".join(found))


def _weights(config: RunConfig, plan: Plan) -> Iterator[str]:
    try:
        of_plan(config.weight_sync.transport, plan, adapters=config.model.lora is not None)
    except TransportRefused as error:
        yield str(error)


def _training(config: RunConfig, plan: Plan, elsewhere: bool) -> Iterator[str]:
    yield from config.backend.obstacles(
        on_gpu=plan.device == "gpu",
        capability=lambda: None if elsewhere else compute_capability(),
        model_dtype=config.model.dtype,
        elsewhere=elsewhere,
    )
