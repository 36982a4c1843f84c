"""Tokens a second, MFU and peak memory of the FSDP backend's train step, beside a plain Hugging Face loop with padding.

    python -m benchmarks.training.throughput --shape 0.6B --row 16384 --json FILE
    python -m benchmarks.training.throughput --shape 0.6B --row 16384 --sample 16384 --even --samples 4 \\
        --methods ours ours:gradient_checkpointing=selective ours:compile=true,attention=flash2 plain
    python -m benchmarks.training.throughput --shape 4B --row 16384 --ranks 2
    python -m benchmarks.training.throughput --shape 0.6B --even --sample 2560 --prompt 2048 --group 8 --samples 64 \\
        --methods ours ours:share_prefixes=true

Ours is the real backend without an orchestrator: packed rows, GRPO's loss, clipping and AdamW over float32 masters, with the
settings of `backend=fsdp` that follow the colon. The other one is what anyone gets in fifty lines (plain_loop.py). All train
the same samples, by turns, each anew `--repeats` times; the first `--warm` steps are not counted. A method that runs out of
memory says so, and the others go on.

MFU = (6 N + 6 · layers · heads · head_dim · T) · tokens/s / peak of one card / cards, with T = Σ len² / Σ len of the samples;
with `--lora` 4 N, as frozen weights have no gradient. Padding counts nowhere. On a CPU there is no peak to compare with, and
memory is not measured. Tokens are those of the samples, a shared prompt once for each of them. `--profile FILE` writes what the
device did in one more step of each method, by kernel.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml

from benchmarks.shapes import SHAPES, make_model
from benchmarks.training.plain_loop import Step, plain
from benchmarks.training.profiling import profiled
from benchmarks.training.samples import PROMPT, Samples, draw, shard_of
from telescope.algorithms.grpo import GRPO
from telescope.backends.base import Job, World
from telescope.backends.common import ranks
from telescope.backends.fsdp import FSDP
from telescope.config.sections import LoraSettings, ModelSettings, TrainerSettings
from telescope.maths.flops import TrainingWork, utilization
from telescope.maths.memory import ModelShape
from telescope.planning.cards import CARDS

PHASES = ("forward", "backward", "clip", "optimizer")


@dataclass(frozen=True)
class Measured:
    """One method in one turn. `seconds` of each counted step."""

    method: str
    seconds: list[float]
    tokens: int
    """Of a step, all ranks together, padding apart."""
    tokens_per_s: float | None
    """By the median step; None: it ran out of memory."""
    mfu: float | None
    peak_gib: float | None
    """Of this rank's allocator."""
    standing_gib: float | None = None
    """Held by it between steps: weights and moments."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of the last step, by the device's clock."""
    error: str | None = None


@dataclass(frozen=True)
class Bench:
    """What all turns have in common."""

    asked: argparse.Namespace
    folder: Path
    world: World
    samples: Samples
    shape: ModelShape

    @property
    def gpu(self) -> bool:
        return self.world.device.startswith("cuda")

    def mfu(self, rate: float) -> float | None:
        """Of tokens a second."""
        if not self.asked.peak:
            return None
        shape, samples = self.shape, self.samples
        weights = {"frozen" if self.asked.lora else "trained": float(shape.parameters)}
        work = TrainingWork.of(
            **{"trained": 0.0} | weights, layers=shape.layers, heads=shape.heads, head_dim=shape.head_dim
        )  # fmt: skip
        operations = work.operations(samples.tokens, samples.context * samples.tokens)
        return utilization(operations, samples.tokens / rate, cards=self.world.size, peak=self.asked.peak)


def settings_of(method: str, common: list[str]) -> FSDP:
    """`ours:compile=true,attention=flash2` and the options of all methods."""
    own = [part for part in method.partition(":")[2].split(",") if part]
    options = (option.partition("=") for option in (*common, *own))
    return FSDP(**{key: yaml.safe_load(value) for key, _, value in options if key != "chunk"})


def chunk_of(method: str) -> int:
    """`ours:chunk=2048`: trainer.entropy_chunk_size."""
    found = [part.partition("=")[2] for part in method.partition(":")[2].split(",") if part.startswith("chunk=")]
    return int(found[0]) if found else TrainerSettings(learning_rate=1e-6).entropy_chunk_size


def ours(method: str, bench: Bench) -> tuple[Step, Callable[[], None]]:
    """One step of the backend, and how to end it."""
    asked = bench.asked
    trainer = TrainerSettings(learning_rate=1e-6, seq_len=asked.row, entropy_chunk_size=chunk_of(method))
    lora = LoraSettings(rank=asked.lora) if asked.lora else None
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if asked.lora else "float32"
    job = Job(
        algorithm=GRPO(), model=ModelSettings(name=str(bench.folder), lora=lora, dtype=dtype), trainer=trainer,
        number_of_steps=1000, temperature=1.0, max_tokens=asked.row, seed=0, world=bench.world,
    )  # fmt: skip
    backend = settings_of(method, asked.option).build(job)
    shard = shard_of(bench.samples, bench.world.rank, bench.world.size)

    def step(number: int) -> dict[str, float]:
        timings = backend.train_step(replace(shard, step=number)).timings
        return {phase: timings[name] for phase in PHASES if (name := f"timing_{phase}_total") in timings}

    return step, backend.close


def begin(method: str, bench: Bench) -> tuple[Step, Callable[[], None]]:
    if method == "plain":
        return plain(bench.asked.row, bench.folder, bench.world, bench.samples)
    return ours(method, bench)


def measure(method: str, bench: Bench, *, profile: bool) -> Measured:
    """One turn of one method."""
    if bench.gpu:
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    try:
        return _turn(method, bench, profile=profile)
    except torch.OutOfMemoryError as error:
        return Measured(method, [], bench.samples.tokens, None, None, _peak(bench), error=str(error).splitlines()[0])
    finally:
        ranks.leave()
        gc.collect()
        if bench.gpu:
            torch.cuda.empty_cache()


def _turn(method: str, bench: Bench, *, profile: bool) -> Measured:
    asked, seconds = bench.asked, []
    step, end = begin(method, bench)
    phases: dict[str, float] = {}
    for number in range(1, asked.warm + asked.steps + 1):
        if bench.world.size > 1:
            dist.barrier()
        started = time.perf_counter()
        phases = step(number)
        if bench.gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak, standing = _peak(bench), torch.cuda.memory_allocated() / 2**30 if bench.gpu else None
    if profile:
        table = profiled(lambda: step(asked.warm + asked.steps + 1), gpu=bench.gpu)
        if bench.world.rank == 0:
            with asked.profile.open("a", encoding="utf-8") as file:
                file.write(f"{asked.shape}, rows of {asked.row}, {method}\n{table}\n")
    end()
    counted = seconds[asked.warm :]
    rate = bench.samples.tokens / statistics.median(counted)
    return Measured(method, counted, bench.samples.tokens, rate, bench.mfu(rate), peak, standing, phases)


def _peak(bench: Bench) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if bench.gpu else None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny", help="random weights in this model's shape")
    parser.add_argument("--row", type=int, default=16_384, help="tokens of a packed row (trainer.seq_len)")
    parser.add_argument("--sample", type=int, default=2048, help="mean tokens of a sample; decides T")
    parser.add_argument("--even", action="store_true", help="all samples of the mean length, else log-normal around it")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="first tokens of a sample, the same in a group")
    parser.add_argument("--group", type=int, default=2, help="samples of one prompt")
    parser.add_argument("--samples", type=int, default=32, help="of a step, all ranks together")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="a setting of every `ours`")
    parser.add_argument("--methods", nargs="*", default=["ours", "plain"], help="plain, ours, ours:NAME=VALUE,NAME=VALUE")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="adapters of a frozen bfloat16 model (ours alone)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peak", type=float, help="bfloat16 operations a second of a card; default: by its name")
    parser.add_argument("--ranks", type=int, default=1, help="processes on this host, a GPU each")
    parser.add_argument("--folder", type=Path, help="where the model is made, or lies already")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="add the kernels of one step of each method to it")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    for method in asked.methods:
        if method != "plain":
            settings_of(method, asked.option)  # what can't be is said before anything starts
    return asked


def main() -> None:
    asked, began = parse(), time.perf_counter()
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
    kind = {"even": asked.even, "prompt": asked.prompt, "group": asked.group}
    samples = draw(asked.samples, asked.sample, asked.row, shape.vocabulary, **kind)
    with tempfile.TemporaryDirectory() as made:
        bench = Bench(asked, make_model(shape, asked.folder or Path(made) / "model"), world, samples, shape)
        turns: list[Measured] = []
        for number, name in enumerate(asked.methods * asked.repeats):
            if world.size > 1:  # a process group can't be founded again at the port of the one before
                os.environ["MASTER_PORT"] = os.environ["PORTS"].split(",")[number]
            turns.append(measure(name, bench, profile=asked.profile is not None and number < len(asked.methods)))
            if world.rank == 0:
                print(f"{time.perf_counter() - began:5.0f} s  {line(turns[-1:])}", flush=True)
                write(turns, bench, card)
    if world.rank == 0:
        tell(turns, bench, card)


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


def line(turns: list[Measured]) -> str:
    """The turns of one method in one line, by the median."""
    failed = [turn for turn in turns if turn.tokens_per_s is None]
    if failed:
        return f"{failed[0].method}: {failed[0].error}"
    rates = [turn.tokens_per_s for turn in turns if turn.tokens_per_s is not None]
    said = f"{turns[0].method}: {statistics.median(rates):,.0f} tokens/s ({min(rates):,.0f} to {max(rates):,.0f})"
    shares = [turn.mfu for turn in turns if turn.mfu is not None]
    peaks = [turn.peak_gib for turn in turns if turn.peak_gib is not None]
    standing = [turn.standing_gib for turn in turns if turn.standing_gib is not None]
    said += f", MFU {statistics.median(shares):.1%}" if shares else ""
    said += f", {max(peaks):.2f} GiB" if peaks else ""
    said += f" ({max(standing):.2f} between steps)" if standing else ""
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in turns[-1].phases.items())
    return said + (f"; {phases}" if phases else "")


def tell(turns: list[Measured], bench: Bench, card: str) -> None:
    """Medians as lines."""
    asked, samples = bench.asked, bench.samples
    where = f"{card}, torch {torch.__version__}, {bench.world.size} ranks: {asked.shape}"
    lora = f", LoRA of rank {asked.lora}" if asked.lora else ""
    print(f"\n{where}{lora}, rows of {asked.row}, {len(samples.lengths)} samples, T = {samples.context:,.0f}")
    for name in dict.fromkeys(asked.methods):
        print("  " + line([turn for turn in turns if turn.method == name]))


def write(turns: list[Measured], bench: Bench, card: str) -> None:
    """All turns so far as JSON, so that those of a run that is cut short are not lost."""
    asked, samples = bench.asked, bench.samples
    facts: dict[str, Any] = {
        "card": card, "cards": bench.world.size, "torch": torch.__version__, "python": platform.python_version(),
        "shape": asked.shape, "row": asked.row, "samples": len(samples.lengths), "tokens": samples.tokens,
        "prompt": samples.prompt, "group": samples.group,
        "context": samples.context, "options": asked.option, "lora": asked.lora, "peak_flops": asked.peak,
        "turns": [asdict(turn) for turn in turns],
    }  # fmt: skip
    if asked.json is not None:
        asked.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
