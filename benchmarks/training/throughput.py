"""Tokens a second, MFU and peak memory of the FSDP backend's train step, beside a plain Hugging Face loop with padding.

    python -m benchmarks.training.throughput --shape 0.6B --row 16384 --option gradient_checkpointing=selective --json FILE
    python -m benchmarks.training.throughput --shape 4B --row 16384 --ranks 2

Ours is the real backend without an orchestrator: packed rows, GRPO's loss, clipping and AdamW over float32 masters. The other
one is what anyone gets in fifty lines: transformers with sdpa, `fully_shard` a layer, bfloat16 over float32 masters, full
checkpointing, the head in checkpointed chunks, fused AdamW; samples padded to the longest of their micro-batch, which has the
row's tokens. Both train the same samples, by turns, each anew `--repeats` times; the first `--warm` steps are not counted.

MFU = (6 N + 6 · layers · heads · head_dim · T) · tokens/s / peak of one card / cards, with T = Σ len² / Σ len of the samples.
Padding counts nowhere. On a CPU there is no peak to compare with, and memory is not measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.shapes import SHAPES, make_model
from telescope.algorithms.grpo import GRPO
from telescope.backends.base import Job, TrainShard, World
from telescope.backends.common import ranks
from telescope.backends.fsdp import FSDP
from telescope.config.parts import ModelSettings, TrainerSettings
from telescope.maths.batching import assign, denominators
from telescope.maths.memory import ModelShape
from telescope.planning.cards import CARDS
from telescope.records import TrainItem

CHUNK = 1024
PROMPT = 16
"""Tokens of each sample that are not trained."""
Step = Callable[[int], None]


@dataclass(frozen=True)
class Measured:
    """One method in one turn. `seconds` of each counted step."""

    method: str
    seconds: list[float]
    tokens: int
    """Of a step, all ranks together, padding apart."""
    tokens_per_s: float
    """By the median step."""
    mfu: float | None
    peak_gib: float | None
    """Of this rank's allocator."""


@dataclass(frozen=True)
class Samples:
    """What all ranks train in a step."""

    lengths: tuple[int, ...]
    ids: tuple[np.ndarray, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def context(self) -> float:
        """T of the MFU: the length of the sample that a token is in, on average."""
        return sum(length**2 for length in self.lengths) / self.tokens


def draw(count: int, mean: int, longest: int, vocabulary: int) -> Samples:
    """Log-normal lengths around `mean`, none above `longest`."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(mean) - 0.32, 0.8, count), 2 * PROMPT, longest).astype(int).tolist()
    return Samples(tuple(lengths), tuple(random.integers(0, vocabulary, length) for length in lengths))


def shard_of(samples: Samples, rank: int, size: int) -> TrainShard:
    """This rank's, dealt by length."""
    mine = assign([float(length) for length in samples.lengths], size)[rank]
    trained = [length - PROMPT for length in samples.lengths]
    masks = [np.r_[np.zeros(PROMPT, np.uint8), np.ones(trained[i], np.uint8)] for i in mine]
    mask = np.concatenate(masks)
    items = tuple(
        TrainItem(
            rollout_id=i, group_id=i // 2, sequence=i, length=samples.lengths[i], advantage=1.0 - 2.0 * (i % 2),
            sequence_tokens=trained[i],
        )
        for i in mine
    )  # fmt: skip
    return TrainShard(
        step=1,
        items=items,
        ids=np.concatenate([samples.ids[i] for i in mine]).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -12.0, np.nan).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        denominators=(denominators(trained, [i // 2 for i in range(len(trained))]),),
    )


def ours(asked: argparse.Namespace, folder: Path, world: World, samples: Samples) -> tuple[Step, Callable[[], None]]:
    """One step of the backend, and how to end it."""
    options = {key: yaml.safe_load(value) for key, _, value in (option.partition("=") for option in asked.option)}
    trainer = TrainerSettings(learning_rate=1e-6, seq_len=asked.row, entropy_chunk_size=CHUNK)
    job = Job(
        algorithm=GRPO(), model=ModelSettings(name=str(folder)), trainer=trainer, number_of_steps=1000, temperature=1.0,
        max_tokens=asked.row, seed=0, world=world,
    )  # fmt: skip
    backend = FSDP(**options).build(job)
    shard = shard_of(samples, world.rank, world.size)
    return (lambda step: void(backend.train_step(replace(shard, step=step)))), backend.close


def void(_: object) -> None:
    """Nothing of it is wanted."""


def plain(asked: argparse.Namespace, folder: Path, world: World, samples: Samples) -> tuple[Step, Callable[[], None]]:
    """One step of the loop that anyone writes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    ranks.join(world, 600.0)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = init_device_mesh(world.device.partition(":")[0], (world.size,))
    shard = functools.partial(
        fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    for layer in lm.model.layers:
        shard(layer)
    model = shard(Padded(lm))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    batches = list(padded(samples, asked.row, world))

    def step(_: int) -> None:
        for ids, lengths in batches:
            model(ids.to(world.device), lengths.to(world.device)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, ranks.leave


class Padded(torch.nn.Module):
    """Mean negative log-prob of what is no prompt and no padding."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """ids [B, L], lengths [B]."""
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        hidden = self.lm.model(input_ids=ids, attention_mask=(places < lengths[:, None]).long(), use_cache=False)[0]
        counted = ((places >= PROMPT) & (places < lengths[:, None]))[:, 1:]
        states, targets = hidden[:, :-1][counted], ids[:, 1:][counted]
        total = states.new_zeros((), dtype=torch.float32)
        for some, wanted in zip(states.split(CHUNK), targets.split(CHUNK), strict=True):
            total = total + checkpoint(negative, some, self.lm.lm_head.weight, wanted, use_reentrant=False)
        return total / max(len(targets), 1)


def negative(states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log p(target); states [n, H], head [V, H]."""
    return F.cross_entropy(F.linear(states, head).float(), targets, reduction="sum")


def padded(samples: Samples, row: int, world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches, longest samples first; as many as the rank with most has, its last one again if need be."""
    dealt = [cut(samples, list(share), row) for share in assign([float(length) for length in samples.lengths], world.size)]
    mine = dealt[world.rank]
    for number in range(max(len(each) for each in dealt)):
        picked = mine[min(number, len(mine) - 1)]
        ids = np.zeros((len(picked), max(samples.lengths[i] for i in picked)), np.int64)
        for place, i in enumerate(picked):
            ids[place, : samples.lengths[i]] = samples.ids[i]
        yield torch.from_numpy(ids), torch.tensor([samples.lengths[i] for i in picked])


def cut(samples: Samples, mine: list[int], row: int) -> list[list[int]]:
    """Samples by length, into batches whose padded size is at most `row`."""
    batches: list[list[int]] = []
    for i in sorted(mine, key=lambda i: -samples.lengths[i]):
        if batches and (len(batches[-1]) + 1) * samples.lengths[batches[-1][0]] <= row:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


METHODS = {"ours": ours, "plain": plain}


def measure(name: str, asked: argparse.Namespace, folder: Path, world: World, samples: Samples, shape: ModelShape) -> Measured:
    """One turn of one method."""
    gpu = world.device.startswith("cuda")
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    step, end = METHODS[name](asked, folder, world, samples)
    seconds = []
    for number in range(1, asked.warm + asked.steps + 1):
        if world.size > 1:
            dist.barrier()
        started = time.perf_counter()
        step(number)
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    end()
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else None
    if gpu:
        torch.cuda.empty_cache()
    counted = seconds[asked.warm :]
    rate = samples.tokens / statistics.median(counted)
    flops = 6 * shape.parameters + 6 * shape.layers * shape.heads * shape.head_dim * samples.context
    mfu = flops * rate / (asked.peak * world.size) if asked.peak else None
    return Measured(name, counted, samples.tokens, rate, mfu, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny", help="random weights in this model's shape")
    parser.add_argument("--row", type=int, default=16_384, help="tokens of a packed row (trainer.seq_len)")
    parser.add_argument("--sample", type=int, default=2048, help="mean tokens of a sample")
    parser.add_argument("--samples", type=int, default=32, help="of a step, all ranks together")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="a setting of backend=fsdp")
    parser.add_argument("--methods", nargs="*", choices=sorted(METHODS), default=["ours", "plain"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peak", type=float, help="bfloat16 operations a second of a card; default: by its name")
    parser.add_argument("--ranks", type=int, default=1, help="processes on this host, a GPU each")
    parser.add_argument("--folder", type=Path, help="where the model is made, or lies already")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.ranks > 1 and "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as made:
            make_model(SHAPES[asked.shape], asked.folder or Path(made) / "model")
            start(asked.ranks, asked.repeats * len(asked.methods), asked.folder or Path(made) / "model")
        return
    gpu, rank = torch.cuda.is_available(), int(os.environ.get("RANK", "0"))
    world = World(rank, asked.ranks, f"cuda:{rank}" if gpu else "cpu")
    card = torch.cuda.get_device_name(rank) if gpu else platform.processor() or platform.machine()
    asked.peak = asked.peak or next((one.flops for name, one in CARDS.items() if gpu and name.upper() in card), None)
    shape = SHAPES[asked.shape]
    samples = draw(asked.samples, asked.sample, asked.row, shape.vocabulary)
    with tempfile.TemporaryDirectory() as made:
        folder = make_model(shape, asked.folder or Path(made) / "model")
        turns = []
        for number, name in enumerate(asked.methods * asked.repeats):
            if world.size > 1:  # a process group can't be founded again at the port of the one before
                os.environ["MASTER_PORT"] = os.environ["PORTS"].split(",")[number]
            turns.append(measure(name, asked, folder, world, samples, shape))
    if world.rank == 0:
        tell(turns, asked, card, samples, world)


def start(count: int, turns: int, folder: Path) -> None:
    """This command line once a rank, on one host."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(turns)]
    ports = ",".join(str(each.getsockname()[1]) for each in held)
    for each in held:
        each.close()
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "PORTS": ports}
    command = [sys.executable, "-m", "benchmarks.training.throughput", *sys.argv[1:], "--folder", str(folder)]
    children = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(count)]
    codes = [child.wait() for child in children]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def tell(turns: list[Measured], asked: argparse.Namespace, card: str, samples: Samples, world: World) -> None:
    """Medians as lines, everything as JSON."""
    for name in asked.methods:
        mine = [turn for turn in turns if turn.method == name]
        rates = [turn.tokens_per_s for turn in mine]
        mfu = f", MFU {statistics.median(t.mfu for t in mine if t.mfu is not None):.1%}" if mine[0].mfu is not None else ""
        peak = f", {max(t.peak_gib for t in mine if t.peak_gib is not None):.2f} GiB" if mine[0].peak_gib is not None else ""
        sys.stdout.write(
            f"{name}: {statistics.median(rates):,.0f} tokens/s ({min(rates):,.0f} to {max(rates):,.0f}){mfu}{peak}\n"
        )
    facts = {
        "card": card, "cards": world.size, "torch": torch.__version__, "python": platform.python_version(),
        "shape": asked.shape, "row": asked.row, "samples": len(samples.lengths), "tokens": samples.tokens,
        "context": samples.context, "options": asked.option, "peak_flops": asked.peak,
        "turns": [asdict(turn) for turn in turns],
    }  # fmt: skip
    if asked.json is not None:
        asked.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
