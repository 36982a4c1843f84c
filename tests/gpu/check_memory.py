"""The estimate of a trainer's memory against measured peaks: `python -m tests.gpu.check_memory` (one GPU, under two minutes).

Models of known shapes with drawn weights, trained for two steps by the FSDP backend; exits 0 if each peak is within 15 % of
its estimate. `--shapes 0.5b` picks some; `--dry-run` plays the smallest on a CPU, where there is no peak to compare.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

from benchmarks.shapes import make_model
from telescope.backends.base import World
from telescope.backends.fsdp import FSDP
from telescope.maths.memory import ModelShape, TrainerMemory, trainer_memory
from telescope.planning.shapes import shape_of
from tests.backends.shards import make_job, make_shard

GIB = 2**30
CHUNK = 1024
MODELS = (("Qwen/Qwen2.5-0.5B", 4096), ("Qwen/Qwen3-0.6B", 16_384), ("Qwen/Qwen2.5-3B", 4096))  # with the tokens of a row
CASES = tuple((*model, *case) for model in MODELS for case in product((True, False), (1, 3)))  # checkpointing, rows of a step


def estimate(shape: ModelShape, tokens: int, checkpointing: bool, rows: int) -> TrainerMemory:
    return trainer_memory(shape, ranks=1, row_tokens=tokens, chunk=CHUNK, checkpointing=checkpointing, rows=rows)


def peak(model: str, world: World, tokens: int, checkpointing: bool, rows: int) -> int:
    """Bytes at the worst moment of the second step, when gradients, moments and activations are all there; 0 on a CPU."""
    job = make_job(model=model, world=world, seq_len=tokens, entropy_chunk_size=CHUNK)
    settings = FSDP(mixed_precision_dtype="bfloat16", gradient_checkpointing=checkpointing)
    backend = settings.build(job)
    try:
        lengths = ([tokens // 4] * 4 if tokens >= 1024 else [tokens]) * rows
        shard = make_shard(lengths=lengths, logprob=-12.0)
        backend.train_step(shard)
        if world.device == "cpu":
            return 0
        torch.cuda.reset_peak_memory_stats()
        backend.train_step(dataclasses.replace(shard, step=2))
        return torch.cuda.max_memory_allocated()
    finally:
        backend.close()


def dry_run() -> int:
    tiny = shape_of("tiny")
    with tempfile.TemporaryDirectory() as name:
        model = str(make_model(tiny, Path(name)))
        for checkpointing in (True, False):
            peak(model, World(0, 1, "cpu"), 256, checkpointing, 2)
            told = estimate(tiny, 256, checkpointing, 2)
            print(f"tiny, checkpointing={checkpointing}: estimate {told.total / GIB:.4f} GiB")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="", help="parts of names, comma between, e.g. 0.5b,0.6b")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    if given.dry_run:
        return dry_run()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    wanted = [part for part in given.shapes.lower().split(",") if part]
    good = True
    for shape_name in dict.fromkeys(name for name, *_ in CASES):
        if wanted and not any(part in shape_name.lower() for part in wanted):
            continue
        shape = shape_of(shape_name)
        with tempfile.TemporaryDirectory() as name:
            model = str(make_model(shape, Path(name)))
            for _, tokens, checkpointing, rows in (case for case in CASES if case[0] == shape_name):
                gc.collect()
                torch.cuda.empty_cache()
                told = estimate(shape, tokens, checkpointing, rows)
                measured = peak(model, World(0, 1, "cuda:0"), tokens, checkpointing, rows)
                far = told.total / measured - 1
                good &= abs(far) <= 0.15
                parts = {part: round(value / GIB, 2) for part, value in zip(told.__struct_fields__, _values(told), strict=True)}
                print(
                    f"{shape_name} {rows} rows of {tokens}, checkpointing={checkpointing}: peak {measured / GIB:.2f} GiB, "
                    f"estimate {told.total / GIB:.2f} ({far:+.1%}) {'ok' if abs(far) <= 0.15 else 'BAD'} {parts}",
                    flush=True,
                )
    return 0 if good else 1


def _values(memory: TrainerMemory) -> list[int]:
    return [getattr(memory, part) for part in memory.__struct_fields__]


if __name__ == "__main__":
    sys.exit(main())
