"""Four ranks with settings that were built apart, together: `python -m tests.backends.combined FOLDER MODEL`.

Each combination trains two steps, saving after the first, and then the second once more from what was saved. One process
imports everything and forks the ranks, by tests/backends/four_ranks.py.
"""

from __future__ import annotations

import json
import os
import queue
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from telescope.backends.base import Job, Outcome, Saved, World
from telescope.config.sections import LoraSettings, ModelSettings
from tests.backends.four_ranks import SHARES, forked, meet
from tests.backends.options import flat
from tests.backends.shards import in_minibatches, make_job, make_shard, part
from tests.backends.watching import Watching, watch
from tests.digits.batches import VARIANTS

PATIENCE_S = 120.0
SPEED = {"trainer_tokens_per_s", "mfu"}


@dataclass(frozen=True)
class Combination:
    """`lora`: adapters are trained; `sizes`: trajectories of each minibatch; `exact`: so near one rank's numbers."""

    backend: dict[str, Any]
    algorithm: str = "grpo clipped"
    lora: bool = False
    sizes: tuple[int, ...] = (8,)
    near: float = 1e-5


COMBINATIONS: dict[str, Combination] = {
    "shared rows": Combination({"context_parallel_size": 2}),
    "shared rows in replicas": Combination({"context_parallel_size": 2, "replicas": 2}, sizes=(4, 4)),
    "rows shared over replicas": Combination({"context_parallel_size": 4, "replicas": 2}),
    "shared rows, adapters, the base model": Combination(
        {"context_parallel_size": 2, "replicas": 2, "gradient_checkpointing": True, "checkpointed_layers": 1},
        algorithm="grpo, penalties of all kinds",
        lora=True,
    ),
    "shared rows, products kept, groups of ranks, moments on the host": Combination(
        {"context_parallel_size": 2, "gradient_checkpointing": "selective", "reshard_after_forward": 2, "offload": "optimizer"},
        algorithm="gspo, masks of sequences",
        sizes=(4, 4),
    ),
    "shared rows, moments of a byte on the host": Combination(
        {"context_parallel_size": 2, "replicas": 2, "optimizer": "adamw_8bit", "offload": "optimizer"}
    ),
    "shared rows, muon, replicas": Combination(
        {"context_parallel_size": 2, "replicas": 2, "optimizer": "muon", "offload": "optimizer"}
    ),
    "shared rows, float16": Combination(
        {"context_parallel_size": 2, "replicas": 2, "mixed_precision_dtype": "float16"}, sizes=(4, 4), near=0.05
    ),
    "all on the host": Combination(
        {"context_parallel_size": 2, "replicas": 2, "offload": "parameters"}, algorithm="grpo, penalties of all kinds"
    ),
}


def main() -> int:
    folder, model = Path(sys.argv[1]), sys.argv[2]

    def run(rank: int) -> None:
        meet(folder / "four", rank, 4)
        for name, combination in COMBINATIONS.items():
            train(World(rank, 4, "cpu"), folder / name, model, combination)
        dist.destroy_process_group()

    return forked(run)


def train(world: World, folder: Path, model: str, combination: Combination) -> None:
    """Rank 0 writes what was found: metrics of both steps, and of the second as it went on from the checkpoint; and weights."""
    job = job_of(combination, model, world)
    first = watch(job, **combination.backend)
    metrics = [step(first, combination, 1)]
    saved(first, folder / "trainer")
    metrics.append(step(first, combination, 2))
    ends = dict(first.weights())
    first.close()
    again = watch(replace(job, resume=folder / "trainer"), **combination.backend)
    metrics.append(step(again, combination, 2))
    found = dict(again.weights())
    again.close()
    if world.rank == 0:
        (folder / "metrics.json").write_text(json.dumps(metrics))
        np.savez(folder / "weights.npz", went_on=flat(ends), resumed=flat(found))


def job_of(combination: Combination, model: str, world: World) -> Job:
    job = make_job(
        seq_len=64, pad_to_multiple_of=16, world=world, algorithm=VARIANTS[combination.algorithm], lr_scheduler="linear"
    )
    lora = LoraSettings(rank=2, alpha=4) if combination.lora else None
    return replace(job, model=ModelSettings(name=model, lora=lora))


def step(backend: Watching, combination: Combination, number: int) -> dict[str, float]:
    world = backend._job.world
    shard = in_minibatches(make_shard(number, seed=number), combination.sizes)
    metrics = backend.train_step(part(shard, own(world, combination))).metrics
    return {name: value for name, value in metrics.items() if name not in SPEED}


def own(world: World, combination: Combination) -> list[int]:
    if world.size == 1:
        return list(range(8))
    shared = combination.backend.get("context_parallel_size", 1)
    first = world.rank // shared * shared
    return sorted(item for share in SHARES[first : first + shared] for item in share)


def saved(backend: Watching, folder: Path) -> None:
    outcomes: queue.Queue[Outcome] = queue.Queue()
    backend.save(1, folder, outcomes.put)
    outcome = outcomes.get(timeout=PATIENCE_S)
    assert isinstance(outcome, Saved), outcome
    dist.barrier()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
