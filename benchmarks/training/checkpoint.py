"""How long a save holds training up, how long it writes, and how fast it loads, by size of the model.

    python -m benchmarks.training.checkpoint [--device cuda] [--layers 4 12] [--hidden 1024] [--folder DIR] [--json FILE]
    python -m benchmarks.training.checkpoint --device cuda --shape 3B --brief --folder DIR

A Qwen3 with drawn weights in float32 and AdamW's two moments, sharded over one rank, saved twice (the first save also takes the
host memory that later ones use again) and loaded by a backend built anew. `--train`: a step is trained while the second save
is written, and one without, to see what writing costs it. `--shape`: a model of benchmarks/shapes.py in place of layers and
hidden size. `--brief`: only the two saves; `--once`: only the first. Each size runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.shapes import SHAPES, make_model
from telescope.algorithms.grpo import GRPO
from telescope.backends.base import Job, Saved, World
from telescope.backends.fsdp import FSDP
from telescope.backends.fsdp.backend import FSDPBackend
from telescope.config.sections import ModelSettings, TrainerSettings
from telescope.maths.memory import ModelShape
from telescope.runlog import digests

PATIENCE_S = 1800


@dataclass(frozen=True)
class Measured:
    """Seconds. `in_place`: of a save without the copy, which holds training up until all is written. `state_gb`: what was
    written. `load`: reading alone, of a backend's build; `verify`: reading all bytes before it and comparing their CRC-32."""

    parameters_m: float
    state_gb: float
    first_stall: float
    stall: float | None
    write: float
    in_place: float | None
    verify: float | None
    load: float | None
    step: float | None
    step_beside_a_save: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 12])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--once", action="store_true", help="only the first save")
    parser.add_argument("--copies", action="store_true", help="memory for copies, and copies; nothing is written")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary one")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(one(given)))
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {given.device}")
    rows = []
    for layers in given.layers if given.shape is None else [0]:
        folder = Path(tempfile.mkdtemp(prefix="telescope-checkpoint-", dir=given.folder))
        try:
            rows.append(json.loads(_run(layers, given, folder)))
        finally:
            shutil.rmtree(folder)
        print(", ".join(f"{name} {value:.3f}" for name, value in rows[-1].items() if value is not None), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"torch": torch.__version__, "device": given.device, "rows": rows}, indent=1) + "\n")


def _run(layers: int, given: argparse.Namespace, folder: Path) -> str:
    arguments = ["--one", str(layers), "--hidden", str(given.hidden), "--device", given.device, "--folder", str(folder)]
    arguments += [f"--{name}" for name in ("train", "brief", "once", "copies") if getattr(given, name)]
    arguments += ["--shape", given.shape] if given.shape else []
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.training.checkpoint", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ran.stdout.splitlines()[-1]


def one(given: argparse.Namespace) -> dict[str, float | None]:
    job, settings = _job(given), FSDP(mixed_precision_dtype=None if given.device == "cpu" else "bfloat16")
    backend = FSDPBackend(settings, job)
    if not given.copies:
        return asdict(measure(given, backend, job))
    found = _copies(backend, given.device)
    backend.close()
    return {**found}


def measure(given: argparse.Namespace, backend: FSDPBackend, job: Job) -> Measured:
    device, folder, train = given.device, given.folder, given.train
    settings = FSDP(mixed_precision_dtype=None if device == "cpu" else "bfloat16")
    backend._updater.make_state(backend._policy.parameters())
    first, wrote = _save(backend, folder / "first", device)
    _tell(f"first save: {first:.3f} s held up, {wrote.nbytes / 1e9:.2f} GB written in {wrote.seconds:.1f} s")
    if given.once:
        backend.close()
        return Measured(_millions(backend), wrote.nbytes / 1e9, first, None, wrote.seconds, None, None, None, None, None)
    shutil.rmtree(folder / "first")
    alone = _step(backend, 1) if train else None
    outcomes: queue.Queue[object] = queue.Queue()
    stall = _begin(backend, folder / "second", device, outcomes)
    _tell(f"second save: {stall:.3f} s held up")
    beside = _step(backend, 2) if train else None
    written = outcomes.get(timeout=PATIENCE_S)
    assert isinstance(written, Saved), written
    found = Measured(_millions(backend), written.nbytes / 1e9, first, stall, written.seconds, None, None, None, alone, beside)
    if given.brief:
        backend.close()
        return found
    backend._saver._settings = replace(backend._saver._settings, background=False)
    in_place, _ = _save(backend, folder / "third", device)
    shutil.rmtree(folder / "third")
    backend.close()
    del backend
    started = time.perf_counter()
    FSDPBackend(settings, job).close()
    build = time.perf_counter() - started
    started = time.perf_counter()
    names = [path.name for path in (folder / "second").glob("*.safetensors")]
    assert digests.differing(folder / "second", digests.of_files(folder / "second", names)) is None
    verify = time.perf_counter() - started
    started = time.perf_counter()
    FSDPBackend(settings, replace(job, resume=folder / "second")).close()
    load = time.perf_counter() - started - build
    return replace(found, in_place=in_place, verify=verify, load=load)


def _millions(backend: FSDPBackend) -> float:
    return sum(parameter.numel() for parameter in backend._policy.parameters()) / 1e6


def _tell(words: str) -> None:
    """At once, so that a measurement that is cut off has said what it knew."""
    print(words, file=sys.stderr, flush=True)


def _copies(backend: FSDPBackend, device: str) -> dict[str, float]:
    """Memory reserved while steps go on; then copies to it, which is all that a stall consists of but the start of a thread."""
    alone = min(_step(backend, number) for number in range(1, 5))
    beside: list[float] = []
    tensors, started = backend._state(training_state=True), time.perf_counter()
    backend._saver.reserve(tensors)
    assert backend._saver._reserving is not None
    while backend._saver._reserving.is_alive():
        beside.append(_step(backend, 5 + len(beside)))
    reserved, copies = time.perf_counter() - started, []
    for _ in range(3):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        backend._saver._copies.take(tensors)
        copies.append(time.perf_counter() - started)
    return {
        "parameters_m": _millions(backend),
        "state_gb": sum(tensor.nbytes for tensor in tensors.values()) / 1e9,
        "reserving": reserved,
        "step": alone,
        "step_while_reserving": sum(beside) / max(len(beside), 1),
        "longest": max(beside, default=0.0),
        "first_copy": copies[0],
        "copy": min(copies[1:]),
    }


def _begin(backend: FSDPBackend, folder: Path, device: str, outcomes: queue.Queue[object]) -> float:
    """The stall: until training may go on."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    backend.save(1, folder, outcomes.put)
    return time.perf_counter() - started


def _save(backend: FSDPBackend, folder: Path, device: str) -> tuple[float, Saved]:
    outcomes: queue.Queue[object] = queue.Queue()
    stall = _begin(backend, folder, device, outcomes)
    outcome = outcomes.get(timeout=PATIENCE_S)
    assert isinstance(outcome, Saved), outcome
    return stall, outcome


def _step(backend: FSDPBackend, step: int) -> float:
    from tests.backends.shards import make_shard

    started = time.perf_counter()
    backend.train_step(make_shard(step, lengths=(64,) * 4))
    return time.perf_counter() - started


def _job(given: argparse.Namespace) -> Job:
    hidden, folder = given.hidden, given.folder
    shape = ModelShape(
        vocabulary=32_768, hidden=hidden, intermediate=3 * hidden, layers=given.one, heads=hidden // 64,
        kv_heads=hidden // 128, head_dim=64, tied=True, qk_norm=True,
    )  # fmt: skip
    make_model(shape if given.shape is None else SHAPES[given.shape], folder / "model")
    return Job(
        algorithm=GRPO(),
        model=ModelSettings(name=str(folder / "model")),
        trainer=TrainerSettings(learning_rate=1e-6, seq_len=256),
        number_of_steps=10,
        temperature=1.0,
        max_tokens=64,
        seed=0,
        world=World(0, 1, "cpu" if given.device == "cpu" else "cuda:0"),
    )


if __name__ == "__main__":
    main()
