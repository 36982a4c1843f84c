"""What the processes of a plan would refuse where they are to run, known before any of them is started.

Owns the one list that a run, another attempt of it, the head of several hosts, a Slurm job and `telescope check` ask. Refuses
to guess: of hosts other than this one only what the plan says is judged, and what can't be told here is left to the process.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from telescope._launch.process_environment import read_own_environment
from telescope._launch.process_plan import LaunchPlan, PlanError
from telescope._launch.this_host import find_compute_capability
from telescope.config.conflicts import conflicts
from telescope.config.precision import unserved
from telescope.config.run import as_json
from telescope.config.secrets import find_missing
from telescope.weights.base import TransportRefused
from telescope.weights.transport_choice import choose, placement_of

if TYPE_CHECKING:
    from telescope.config.run import RunConfig


LOOPBACK_S = 2.0
CHECKED_BY_PROCESS = ("weight_sync.transport", "inference.quantization")
"""Settings of which their own process has a sentence."""


def find_obstacles(config: RunConfig, plan: LaunchPlan, *, elsewhere: bool = False) -> list[str]:
    """Sentences with the remedy, each that of the process which would say it. `elsewhere`: its hosts are not this one alone."""
    return [
        *(() if elsewhere else _check_loopback(plan)),
        *_check_variables(config),
        *_check_weights(config, plan),
        *filter(None, (unserved(config, plan.device),)),
        *_check_training(config, plan, elsewhere),
        *_check_device(config, plan),
    ]


def refuse(config: RunConfig, plan: LaunchPlan, *, elsewhere: bool = False) -> None:
    """Raises `PlanError` with all of them, one a line."""
    if found := find_obstacles(config, plan, elsewhere=elsewhere):
        raise PlanError("\n".join(found))


def _check_variables(config: RunConfig) -> Iterator[str]:
    """A Slurm job asks this on its node, where what the submitting shell had need not be."""
    for name in find_missing(as_json(config), read_own_environment()):
        yield (
            f"the environment variable {name} is not set on this host, but a setting refers to it (${{oc.env:{name}}}): set it "
            "where the run is started (docs/security.md)"
        )


def _check_loopback(plan: LaunchPlan) -> Iterator[str]:
    """Processes of one host talk over its own address, which a container or a namespace without a network has not."""
    if len(plan.hosts) > 1:
        return
    try:
        with socket.create_server((plan.head_address, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=LOOPBACK_S).close()
    except OSError as error:
        yield (
            f"{plan.head_address}, over which the processes of a run talk, can't be reached on this host "
            f"({error.strerror or error}): set up its loopback, e.g. `ip link set lo up`"
        )


def _check_device(config: RunConfig, plan: LaunchPlan) -> Iterator[str]:
    """What is refused at once with the device told, and else only where `cluster.device=auto` has found it."""
    if config.cluster.device != "auto":
        return
    known = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": plan.device})})
    judged = conflicts(config)
    for conflict in conflicts(known):
        if conflict not in judged and conflict.paths[0] not in CHECKED_BY_PROCESS:
            yield f"cluster.device=auto means {plan.device} here. {conflict.sentence}"


def _check_weights(config: RunConfig, plan: LaunchPlan) -> Iterator[str]:
    try:
        choose(config, placement_of(plan))
    except TransportRefused as error:
        yield str(error)


def _check_training(config: RunConfig, plan: LaunchPlan, elsewhere: bool) -> Iterator[str]:
    yield from config.backend.find_obstacles(
        on_gpu=plan.device == "gpu",
        capability=lambda: None if elsewhere else find_compute_capability(),
        model_dtype=config.model.dtype,
        elsewhere=elsewhere,
    )
