"""One of four ranks, forked once (forking.py): `tests.backends.gang FOLDER MODEL` with RANK and PORTS, a port for each world.

The four train all cases as a world of four, then three of them as a world of three, and so on: real processes, real gloo, the
real backend.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch

from telescope.backends.base import World
from tests.backends.cases import SHARED_CASES, SHARED_WORLDS, WORLDS, Case, Found, cases, job, ranks_of, share
from tests.backends.watching import Watching, watch
from tests.digits.batches import VARIANTS

ALL_NEEDS = VARIANTS["grpo, penalties of all kinds"]
"""The backend is built once a world; it holds a frozen base model because this one needs it."""


def main() -> int:
    folder, model = Path(sys.argv[1]), sys.argv[2]
    rank, ports = int(os.environ["RANK"]), json.loads(os.environ["PORTS"])
    known = cases(folder / "logprobs.npy")
    for packing in sorted((*WORLDS, *SHARED_WORLDS), key=lambda world: -ranks_of(world)[0]):
        size = ranks_of(packing)[0]
        if rank >= size:
            continue
        os.environ |= {"WORLD_SIZE": str(size), "MASTER_PORT": str(ports[packing])}
        run(known, World(rank, size, "cpu"), packing, model, folder)
    return 0


def run(known: list[Case], world: World, packing: str, model: str, folder: Path) -> None:
    """All cases in one world; rank 0 writes what it found. Worlds that share rows train some cases alone."""
    shared = ranks_of(packing)[1]
    backend = watch(
        job(model, ALL_NEEDS, world, packing, 0), optimizer="sgd", collective_timeout_s=60.0, context_parallel_size=shared
    )
    frozen, start = backend._reference, [p.detach().to_local().clone() for p in backend._policy.parameters()]
    before = flat(dict(backend.weights()))
    found, gradients, updates = [], [], []
    for seed, case in enumerate(known):
        if shared > 1 and case.name not in SHARED_CASES:
            continue
        backend._job = job(model, case.algorithm, world, packing, seed)
        backend._updater._rate = lambda step, rate=case.rate: rate
        backend._reference = frozen if case.algorithm.needs_reference else None
        result = backend.train_step(share(case, packing, world.rank, seed))
        found.append(Found(case.name, result.metrics))
        gradients.append(flat(backend.gradients))
        after = dict(backend.weights())
        updates.append(flat(after) - before if world.rank == 0 else before)
        put_back(backend, start)
    if world.rank == 0:
        (folder / f"{packing}.json").write_bytes(msgspec.json.encode(found))
        np.save(folder / f"{packing}-gradients.npy", np.stack(gradients))
        np.save(folder / f"{packing}-updates.npy", np.stack(updates))
    backend.close()


def flat(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([tensor.reshape(-1).numpy() for tensor in tensors.values()] or [np.zeros(0, np.float32)])


@torch.no_grad()
def put_back(backend: Watching, start: list[torch.Tensor]) -> None:
    for parameter, first in zip(backend._policy.parameters(), start, strict=True):
        parameter.to_local().copy_(first)
