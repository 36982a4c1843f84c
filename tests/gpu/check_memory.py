"""The estimate of a trainer's memory against measured peaks: `python -m tests.gpu.check_memory` (one GPU, under two minutes).

Models of known shapes with drawn weights, trained for two steps by the FSDP backend; exits 0 if each peak is within 15 % of
its estimate. `--compiled` compares compiled layers instead (20 to 60 s a case, which compiles them): there no estimate may lie
more than 5 % below its peak or 10 % above it. `--shapes 0.5b` picks some; `--dry-run` plays the smallest on a CPU (minutes, as
layers are compiled), where there is no peak to compare.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import msgspec
import torch

from benchmarks.shapes import make_model
from telescope.backends.base import World
from telescope.backends.fsdp import FSDP
from telescope.backends.fsdp.sizing import rank_memory
from telescope.config.model_shapes import shape_of
from telescope.config.sections import LoraSettings, ModelSettings, TrainerSettings
from telescope.maths.memory import Checkpointing, ModelShape, TrainerMemory
from tests.backends.shards import make_job, make_shard
from tests.gpu.needed import need_gpus

GIB = 2**30
CHUNK = 1024
MODELS = (("Qwen/Qwen2.5-0.5B", 4096), ("Qwen/Qwen3-0.6B", 16_384), ("Qwen/Qwen2.5-3B", 4096))  # with the tokens of a row
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Case:
    """`tokens` of a row; `samples` of even length in each."""

    model: str
    tokens: int
    checkpointing: Checkpointing
    rows: int = 1
    samples: int = 4
    compiled: bool = False
    reshard: bool = True
    layers: int | None = None
    """Those that compute again; None: all."""
    pointwise: bool = True
    """What no product made is computed again."""
    lora: int = 0
    """Rank of adapters of a bfloat16 model."""

    @property
    def words(self) -> str:
        options = (
            f" in {self.layers} layers" * (self.layers is not None),
            f", rank {self.lora}" * bool(self.lora),
            ", compiled" * self.compiled,
            ", pointwise kept" * (self.compiled and not self.pointwise),
            ", kept gathered" * (not self.reshard),
        )
        shape = f"{self.model} {self.rows} rows of {self.tokens} in {self.samples} samples"
        return f"{shape}, checkpointing={self.checkpointing}{''.join(options)}"


CASES = tuple(Case(*model, *case) for model in MODELS for case in product((True, False), (1, 3)))  # checkpointing, rows
# what benchmarks/results/trainer_memory.md has no peak of: another kind of layer, joined parts, the last layer's peak, adapters
COMPILED = (
    Case("Qwen/Qwen2.5-0.5B", 4096, False, 3, compiled=True, pointwise=False),
    Case("Qwen/Qwen2.5-0.5B", 32_768, "selective", 1, 8, compiled=True),
    Case("Qwen/Qwen3-0.6B", 16_384, False, 3, 4, compiled=True, reshard=False, pointwise=False),  # joined parts of attention
    Case("Qwen/Qwen3-0.6B", 65_536, True, 1, 1, compiled=True),
    Case("Qwen/Qwen3-0.6B", 65_536, True, 1, 1),  # the last layer's peak, not compiled
    Case("Qwen/Qwen3-0.6B", 16_384, True, 2, 1, compiled=True),
    Case("Qwen/Qwen3-0.6B", 16_384, True, 2, 1, compiled=True, layers=14, pointwise=False),
    Case("Qwen/Qwen3-0.6B", 16_384, True, 2, 1, compiled=True, layers=27, pointwise=False),  # all 28's peak, or the head's
    Case("Qwen/Qwen3-0.6B", 16_384, "selective", 2, 1, compiled=True, layers=14, pointwise=False),
    Case("Qwen/Qwen3-0.6B", 16_384, True, 2, 1, layers=14),
    Case("Qwen/Qwen3-0.6B", 16_384, False, 2, 1, compiled=True),
    Case("Qwen/Qwen3-0.6B", 16_384, True, 2, 1, compiled=True, layers=14),
    Case("Qwen/Qwen3-0.6B", 16_384, False, 1, 1, compiled=True, lora=16),
    Case("Qwen/Qwen3-0.6B", 16_384, False, 1, 1, compiled=True, lora=16, pointwise=False),
    Case("Qwen/Qwen3-0.6B", 65_536, "selective", 1, 1, compiled=True, lora=16),
)


def estimate(shape: ModelShape, case: Case) -> TrainerMemory:
    backend, model = settings_of(case), model_of(case, "")
    trainer = TrainerSettings(learning_rate=1e-6, seq_len=case.tokens, entropy_chunk_size=CHUNK)
    told = rank_memory(backend, shape, model, trainer, ranks=1, longest=case.tokens // case.samples)
    return msgspec.structs.replace(told, accumulates=case.rows > 1)


def settings_of(case: Case) -> FSDP:
    return FSDP(
        mixed_precision_dtype="bfloat16",
        gradient_checkpointing=case.checkpointing,
        checkpointed_layers=case.layers,
        compile=case.compiled,
        recompute_pointwise=case.pointwise,
        reshard_after_forward=case.reshard,
    )


def model_of(case: Case, folder: str) -> ModelSettings:
    lora = LoraSettings(rank=case.lora, target_modules=SEVEN) if case.lora else None
    return ModelSettings(name=folder, lora=lora, dtype="bfloat16" if case.lora else "float32")


def peak(folder: str, world: World, case: Case) -> int:
    """Bytes at the worst moment of the second step, when gradients, moments and activations are all there; 0 on a CPU."""
    job = make_job(model=folder, world=world, seq_len=case.tokens, entropy_chunk_size=CHUNK)
    job = dataclasses.replace(job, model=model_of(case, folder))
    torch._dynamo.reset()
    backend = settings_of(case).build(job)
    try:
        shard = make_shard(lengths=[case.tokens // case.samples] * case.samples * case.rows, logprob=-12.0)
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
        for (kept, layers), compiled, lora in product(((True, None), (True, 1), (False, None)), (False, True), (0, 2)):
            case = Case("tiny", 256, kept, 2, 4, compiled=compiled, lora=lora, layers=layers)
            peak(model, World(0, 1, "cpu"), case)
            print(f"{case.words}: estimate {estimate(tiny, case).total / GIB:.4f} GiB")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="", help="parts of names, comma between, e.g. 0.5b,0.6b")
    parser.add_argument("--compiled", action="store_true", help="the cases with compiled layers, and no others")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    if given.dry_run:
        return dry_run()
    need_gpus(instead="--dry-run plays the smallest on a CPU")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    wanted = [part for part in given.shapes.lower().split(",") if part]
    good = True
    cases = COMPILED if given.compiled else CASES
    for shape_name in dict.fromkeys(case.model for case in cases):
        if wanted and not any(part in shape_name.lower() for part in wanted):
            continue
        with tempfile.TemporaryDirectory() as name:
            model = str(make_model(shape_of(shape_name), Path(name)))
            found = [compare(model, case) for case in cases if case.model == shape_name]
        good &= all(found)
    return 0 if good else 1


def compare(model: str, case: Case) -> bool:
    """One case; prints its line."""
    gc.collect()
    torch.cuda.empty_cache()
    began = time.perf_counter()
    told, measured = estimate(shape_of(case.model), case), peak(model, World(0, 1, "cuda:0"), case)
    far = told.total / measured - 1
    good = -0.05 <= far <= 0.10 if case in COMPILED else abs(far) <= 0.15
    parts = {part: round(value / GIB, 2) for part, value in zip(told.__struct_fields__, _values(told), strict=True)}
    print(
        f"{case.words}: peak {measured / GIB:.2f} GiB, estimate {told.total / GIB:.2f} ({far:+.1%}) {'ok' if good else 'BAD'} "
        f"{parts} {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return good


def _values(memory: TrainerMemory) -> list[int]:
    return [getattr(memory, part) for part in memory.__struct_fields__]


if __name__ == "__main__":
    sys.exit(main())
