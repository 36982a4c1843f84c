"""One of two stages of a model, the last of which breaks in its loss: `tests.backends.megatron_broken_stage FOLDER MODEL` with
RANK, started by test_megatron_saves.py. Writes what each has ended with."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from telescope.algorithms.base import LossOutput
from telescope.algorithms.grpo import GRPO
from telescope.backends.base import World
from tests.backends.megatron_watching import on_cpu, watch
from tests.backends.shards import make_job, make_shard

BROKEN_AT = 2
"""The row whose loss breaks, from 1: another one is on its way."""


def breaking() -> GRPO:
    calls = itertools.count(1)

    class Breaking(GRPO):
        def loss(self, row: Any, counts: Any, *, max_tokens: int) -> LossOutput:
            if next(calls) == BROKEN_AT:
                raise ValueError("this rule knows no such row")
            return super().loss(row, counts, max_tokens=max_tokens)

    return Breaking()


def main() -> int:
    folder, model, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
    said = "nothing"
    with on_cpu():
        job = make_job(model=model, seq_len=64, world=World(rank, 2, "cpu"), algorithm=breaking())
        backend = watch(job, collective_timeout_s=60.0, pipeline_parallel_size=2)
        try:
            backend.train_step(make_shard())
        except Exception as error:  # noqa: BLE001 what it is is the test's question
            said = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps(said))
    return 0
