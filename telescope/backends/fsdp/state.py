"""All that a rank must keep to go on as if it had never stopped, as named tensors; and putting it back in place.

`model.<published name>` (adapters alone, where these are trained), `optimizer.<name>.<kind>`, `trainer.counters` (JSON), and
for each rank `rank_<r>.random`. The learning rate follows from the step and needs no state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from telescope.backends.base import CheckpointUnfit, World
from telescope.backends.common import lora, randomness
from telescope.backends.common.saving import ShardReader, own_key
from telescope.backends.fsdp.policy import Policy
from telescope.backends.fsdp.updates import ShardUpdater

log = logging.getLogger(__name__)

MODEL = "model."
OPTIMIZER = "optimizer."
COUNTERS = "trainer.counters"
RANDOM = "random"


def gathered(policy: Policy, updater: ShardUpdater, world: World, *, training_state: bool) -> dict[str, Tensor]:
    """As they lie here, not copied. `training_state`: all; else the weights alone."""
    weights = {MODEL + name: tensor for name, tensor in policy.by_name().items()}
    if not training_state:
        return weights
    tensors, numbers = _optimizer(policy, updater, world)
    counters = {COUNTERS: randomness.as_bytes({**updater.counters(), "optimizer": numbers})}
    return {**weights, **tensors, **counters, own_key(world.rank, RANDOM): randomness.state(world.device)}


def put_back(folder: Path, policy: Policy, updater: ShardUpdater, world: World) -> None:
    """Read what `gathered` gave, on any number of ranks. Raises `CheckpointUnfit`.

    A checkpoint of weights alone leaves the optimiser as it is; a rank that was not there then keeps the random state of its
    seed.
    """
    reader = ShardReader(folder)
    reader.read_into({MODEL + name: tensor for name, tensor in policy.by_name().items()})
    if COUNTERS not in reader.shapes:
        log.warning("%s has weights alone: the optimiser begins anew", folder)
        return
    counters = randomness.from_bytes(reader.read(COUNTERS, torch.uint8))
    updater.set_counters(counters)
    if any(OPTIMIZER in name for name in reader.shapes) or counters["optimizer"]:
        updater.make_state(_with_state(reader, counters["optimizer"], policy))
        tensors, _ = _optimizer(policy, updater, world)
        _check_same_optimizer(folder, reader, tensors)
        reader.read_into(tensors)
        _set_numbers(policy, updater, counters["optimizer"])
    if (name := own_key(world.rank, RANDOM)) in reader.shapes:
        randomness.restore(reader.read(name, torch.uint8), world.device)


def _with_state(reader: ShardReader, numbers: Mapping[str, Any], policy: Policy) -> list[nn.Parameter]:
    """The parameters that have a state there. One that nothing flows through, e.g. the bias of a router's choice, gets none."""
    keys = (name.partition(OPTIMIZER)[2] for name in reader.shapes if OPTIMIZER in name)
    there = {key.rpartition(".")[0] for key in keys} | set(numbers)
    return [parameter for name, parameter in lora.published(policy, "lm.", adapters=policy.adapters) if name in there]


def _optimizer(policy: Policy, updater: ShardUpdater, world: World) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The optimiser's tensors, those without a dimension as one of one entry, and its plain numbers."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter, state in _states(policy, updater):
        for kind, value in state.items():
            if isinstance(value, Tensor):
                tensors[_key(name, kind, parameter, value, world)] = value.reshape(1) if value.ndim == 0 else value
            elif isinstance(value, int | float):
                numbers.setdefault(name, {})[kind] = value
    return tensors, numbers


def _key(name: str, kind: str, parameter: nn.Parameter, value: Tensor, world: World) -> str:
    """A plain tensor beside a sharded weight is this rank's alone, unless it is a count that all have alike."""
    key = f"{OPTIMIZER}{name}.{kind}"
    alone = isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1 and world.size > 1
    return own_key(world.rank, key) if alone else key


def _states(policy: Policy, updater: ShardUpdater) -> Iterator[tuple[str, nn.Parameter, Mapping[str, Any]]]:
    for name, parameter in lora.published(policy, "lm.", adapters=policy.adapters):
        if parameter in updater.optimizer.state:
            yield name, parameter, updater.optimizer.state[parameter]


def _set_numbers(policy: Policy, updater: ShardUpdater, numbers: Mapping[str, Mapping[str, Any]]) -> None:
    for name, parameter, _ in _states(policy, updater):
        updater.optimizer.state[parameter].update(numbers.get(name, {}))


def _check_same_optimizer(folder: Path, reader: ShardReader, tensors: Mapping[str, Tensor]) -> None:
    there = {name for name in reader.shapes if name.startswith(OPTIMIZER)}
    here = {name for name in tensors if name.startswith(OPTIMIZER)}
    if there != here:
        odd = sorted(there ^ here)[0]
        raise CheckpointUnfit(
            f"{folder} {'holds' if odd in there else 'has no'} {odd}, and the optimiser here has other states: resume with the "
            "backend.optimizer that wrote it"
        )
