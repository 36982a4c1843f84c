"""Four ranks that train with one option of the FSDP backend after the other: `python -m tests.backends.options FOLDER MODEL`.

One process imports everything and forks the ranks, before anything has threads; they meet by files, so no port is needed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from telescope.backends.base import World
from telescope.backends.fsdp import optimizers
from telescope.backends.fsdp.sharding import make_mesh
from tests.backends.four_ranks import SHARES, forked, meet
from tests.backends.shards import make_job, make_shard, part
from tests.backends.test_optimizers import TRAINER, Small, give_gradients, hosted_states, trained
from tests.backends.watching import watch

SAME_TO_THE_BIT: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"gradient_checkpointing": "selective"},
    "full": {"gradient_checkpointing": "full"},
    "the first layer alone": {"gradient_checkpointing": "full", "checkpointed_layers": 1, "reshard_after_forward": False},
    "the first layer's products": {"gradient_checkpointing": "selective", "checkpointed_layers": 1, "offload": "parameters"},
    "gathered throughout": {"reshard_after_forward": False},
    "gathered by pairs": {"reshard_after_forward": 2, "gradient_checkpointing": "selective"},
    "moments on the host": {"offload": "optimizer"},
    "all on the host": {"offload": "parameters"},
}
"""By AdamW, on four ranks."""
BY_SGD: dict[str, dict[str, Any]] = {
    "4": {},
    "2 replicas": {"replicas": 2},
    "4 replicas": {"replicas": 4},
    "2 replicas, all on the host": {"replicas": 2, "offload": "parameters"},
}
"""On four ranks; what they found is also compared with one rank."""
OPTIMIZERS: tuple[optimizers.Kind, ...] = ("adamw", "adamw_8bit", "muon")


def main() -> int:
    folder, model = Path(sys.argv[1]), sys.argv[2]

    def run(rank: int) -> None:
        meet(folder / "four", rank, 4)
        steps_of_optimizers(World(rank, 4, "cpu"))
        for name, settings in SAME_TO_THE_BIT.items():
            train(World(rank, 4, "cpu"), folder / name, model, settings)
        for name, settings in BY_SGD.items():
            train(World(rank, 4, "cpu"), folder / name, model, {"optimizer": "sgd", **settings})
        dist.destroy_process_group()
        if rank < 2:
            meet(folder / "two", rank, 2)
            steps_of_optimizers(World(rank, 2, "cpu"))
            train(World(rank, 2, "cpu"), folder / "2", model, {"optimizer": "sgd"})
            train(World(rank, 2, "cpu"), folder / "2, all on the host", model, {"optimizer": "sgd", "offload": "parameters"})
            dist.destroy_process_group()

    return forked(run)


def train(world: World, file: Path, model: str, settings: dict[str, Any]) -> None:
    """Two steps; the gradients of both and the weights after them."""
    rate = 1.0 if settings.get("optimizer") == "sgd" else 1e-3
    backend = watch(make_job(model=model, seq_len=64, pad_to_multiple_of=16, learning_rate=rate, world=world), **settings)
    shares = SHARES if world.size == 4 else ([0, 1, 2, 3, 4], [5, 6, 7])
    for step in (1, 2):
        backend.train_step(part(make_shard(step, seed=step), shares[world.rank]))
        held = [p for p in backend._policy.parameters() if p.grad is not None]
        assert not held, "gradients stand after the update"
    weights = dict(backend.weights())
    if world.rank == 0:
        save(file, backend.updates, weights)
    backend.close()


def save(file: Path, gradients: list[dict[str, torch.Tensor]], weights: dict[str, torch.Tensor]) -> None:
    np.savez(file.with_suffix(".npz"), gradients=flat(*gradients), weights=flat(weights))


def flat(*found: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([tensor.numpy().ravel() for tensors in found for tensor in tensors.values()])


def steps_of_optimizers(world: World) -> None:
    """Of given gradients, spread and whole: a processor rounds the ends of its vectors otherwise, and no more is between them.

    (With codes such a rounding may end in the next one, of which there are 64 from a tenth of the largest moment to all of it.)
    """
    for kind in OPTIMIZERS:
        expected, _ = trained(kind)
        for replicas, hosted in ((1, False), (2, True)):
            module = Small()
            fully_shard(module, mesh=make_mesh(world, replicas).mesh)
            optimizer = optimizers.make(kind, module, TRAINER)
            stepper = hosted_states(optimizer) if hosted else optimizer
            for step in range(3):
                whole = Small()
                give_gradients(whole, step)
                for name, parameter in module.named_parameters():
                    parameter.grad = distributed_like(parameter, whole.get_parameter(name).grad)
                stepper.step()
            for name, parameter in module.named_parameters():
                apart = (parameter.full_tensor() - expected.get_parameter(name)).abs()
                most = 0.03 * TRAINER.learning_rate if kind == "adamw_8bit" else 2e-7
                assert float(apart.max()) <= most, (kind, replicas, name, float(apart.max()))
                assert float(apart.mean()) <= 2e-8, (kind, replicas, name, float(apart.mean()))


def distributed_like(parameter: Any, whole: torch.Tensor) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
