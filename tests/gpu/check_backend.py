"""The FSDP backend on one GPU against the CPU in float32: `python -m tests.gpu.check_backend [--speed]`.

Exits 0 only if all agree, and if the look at layers' masks finds a window by each kernel. No pytest module: machines without a
GPU have nothing to say about it. With `--speed` a 0.6B-shaped model with drawn weights is timed at 16,384 tokens a row.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from telescope.backends.base import TrainShard, World
from telescope.backends.common import attention
from telescope.backends.fsdp.policy import UnfitModel
from tests.backends.models import random_model, random_other
from tests.backends.shards import make_job, make_shard
from tests.backends.watching import Watching, distance, watch
from tests.gpu.needed import need_gpus

GPU = World(0, 1, "cuda:0")
CHOICES: tuple[dict[str, object], ...] = (
    {"gradient_checkpointing": False},
    {"gradient_checkpointing": False, "reshard_after_forward": False},  # weights stay gathered over both rows
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": "selective"},
)
COMPILED: tuple[dict[str, object], ...] = tuple({"compile": True, **choice} for choice in CHOICES)
"""Half a minute each, the first time."""
CASES = (
    # attention, mixed precision, largest distance of a gradient, of a mean log-prob difference
    ("sdpa", None, 1e-3, 1e-4),
    ("sdpa", "bfloat16", 0.1, 0.05),
    ("flash", "bfloat16", 0.1, 0.05),  # the first of flash3, flash2 and varlen that is there
    ("varlen", "bfloat16", 0.1, 0.05),
    ("cudnn", "bfloat16", 0.1, 0.05),
    ("flex", "bfloat16", 0.1, 0.05),
    ("flash", "float16", 0.1, 0.05),
)
LENGTHS = (50, 230, 110, 300, 70, 180, 400, 90, 33, 129)


def one_step(model: str, world: World, **settings: object) -> tuple[Watching, dict[str, float]]:
    backend = watch(make_job(model=model, world=world, seq_len=1024), **settings)
    result = backend.train_step(make_shard(lengths=LENGTHS))
    return backend, result.metrics


def agreement(folder: Path, kinds: list[str], choices: Sequence[dict[str, object]]) -> bool:
    """Each attention on the GPU against sdpa in float32 on the CPU."""
    model = random_model(folder / "model", hidden_size=256, head_dim=64, intermediate_size=512, initializer_range=0.05)
    backend, expected = one_step(model, World(0, 1, "cpu"), attention="sdpa")
    reference = backend.gradients
    backend.close()
    good = True
    for (kind, precision, of_gradient, of_metric), choice in itertools.product(CASES, choices):
        if kind not in kinds or (kind == "flex" and "compile" in choice):  # flex is compiled as it is
            continue
        settings = {"attention": kind, "mixed_precision_dtype": precision, **choice}
        backend, found = one_step(model, GPU, **settings)
        scale = 2.0**16 if precision == "float16" else 1.0
        gradients = {name: tensor.cpu() / scale for name, tensor in backend.gradients.items()}
        backend.close()
        far = distance(reference, gradients)
        apart = abs(found["kl_divergence_inference"] - expected["kl_divergence_inference"])
        fine = far < of_gradient and apart < of_metric
        good &= fine
        print(f"{settings}: gradient {far:.1e}, kl {apart:.1e} {'ok' if fine else 'BAD'}", flush=True)
    return good


def looks(folder: Path, kinds: list[str], choices: Sequence[dict[str, object]], world: World = GPU) -> bool:
    """A window that layers keep to their mask alone is found before the first step, whatever computes."""
    changes = {"hidden_size": 256, "initializer_range": 0.05, "num_local_experts": 4}
    model = random_other(folder / "windows", "phimoe", sliding_window=20, **changes)
    good = True
    for (kind, precision, *_), choice in itertools.product(CASES, choices):
        if kind not in kinds or (kind == "flex" and "compile" in choice):
            continue
        settings = {"attention": kind, "mixed_precision_dtype": precision, **choice}
        said = "nothing"
        try:
            watch(make_job(model=model, world=world, seq_len=1024), **settings).close()
        except UnfitModel as error:
            said = str(error)
        found = "hides tokens of samples of 21 tokens and more" in said
        good &= found
        print(f"{settings}: the look finds {'the window ok' if found else f'no window BAD: {said}'}", flush=True)
    return good


def speed(folder: Path) -> None:
    """Tokens a second, MFU and memory of a 0.6B-shaped model, rows of 16,384 tokens of samples of 2,048."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("cuda"):
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder / "large")
    weights = 596_049_920
    torch.cuda.empty_cache()
    length, samples = 2048, 16
    for settings in (
        {"attention": "flash"},
        {"attention": "flash", "gradient_checkpointing": False},
        {"attention": "sdpa"},
        {"attention": "flex"},
    ):
        job = make_job(model=str(folder / "large"), world=GPU, seq_len=16_384, entropy_chunk_size=2048)
        try:
            backend = watch(job, **{"mixed_precision_dtype": "bfloat16", "gradient_checkpointing": True, **settings})
            shard = long_shard(length, samples)
            torch.cuda.reset_peak_memory_stats()
            seconds = []
            for step in (1, 2, 3):
                started = time.perf_counter()
                result = backend.train_step(dataclasses.replace(shard, step=step))
                seconds.append(time.perf_counter() - started)
        except torch.OutOfMemoryError as error:
            print(f"{settings}: {str(error).splitlines()[0]}")
            backend.close()
            continue
        backend.close()
        rate = length * samples / seconds[-1]
        flops = 6 * weights + 6 * 28 * 16 * 128 * length
        memory = torch.cuda.max_memory_allocated() / 2**30
        print(f"{settings}: {rate:.0f} tokens/s, MFU {flops * rate / 989e12:.1%}, {memory:.1f} GiB")
        print({name: round(value, 3) for name, value in result.timings.items() if name.endswith("_total")})
        del backend
        torch.cuda.empty_cache()


def long_shard(length: int, samples: int) -> TrainShard:
    return make_shard(lengths=[length] * samples, logprob=-12.0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--kinds", nargs="*", default=list(dict.fromkeys(kind for kind, *_ in CASES)))
    parser.add_argument("--compiled", action="store_true", help="layers compiled too")
    given = parser.parse_args()
    need_gpus()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "numpy", np.__version__)
    with tempfile.TemporaryDirectory() as name:
        attention.LONG = 128  # half of the samples
        good = agreement(Path(name), given.kinds, (*CHOICES, *(COMPILED if given.compiled else ())))
        good &= looks(Path(name), given.kinds, (CHOICES[0], *(COMPILED[:1] if given.compiled else ())))
        if given.speed:
            speed(Path(name))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
