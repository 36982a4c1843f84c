"""One of two ranks whose second one runs out of memory while the state is gathered: `tests.backends.megatron_broken_save FOLDER
MODEL` with RANK, started by test_megatron_saves.py. Writes what each has ended with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from telescope.backends.base import World
from telescope.backends.megatron.masters import Masters
from tests.backends.megatron_watching import on_cpu, watch
from tests.backends.shards import make_job, make_shard, part

SHARES = ((0, 3, 1, 2), (6, 7, 5, 4))
BROKEN_AT = 7


def main() -> int:
    folder, model, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
    told: list[object] = []
    said = "nothing"
    with on_cpu():
        job = make_job(model=model, seq_len=64, world=World(rank, 2, "cpu"))
        backend = watch(job, collective_timeout_s=60.0)
        backend.train_step(part(make_shard(), SHARES[rank]))
        if rank == 1:
            break_gathering()
        try:
            backend.save(1, folder / "checkpoint", told.append)
            backend.train_step(part(make_shard(2), SHARES[rank]))
        except RuntimeError as error:
            said = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps([said, len(told)]))
    return 0


def break_gathering() -> None:
    calls, real = 0, Masters.whole

    def whole(*given: Any) -> torch.Tensor | None:
        nonlocal calls
        calls += 1
        if calls == BROKEN_AT:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(*given)

    Masters.whole = whole  # type: ignore[assignment, method-assign]
