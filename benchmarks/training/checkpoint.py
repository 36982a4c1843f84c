"""How long a save holds training up, how long it writes, and how fast it loads, by size of the model.

    python -m benchmarks.training.checkpoint [--device cuda] [--layers 4 12] [--hidden 1024] [--folder DIR] [--json FILE]

A Qwen3 with drawn weights in float32 and AdamW's two moments, sharded over one rank, saved twice (the first save also takes the
host memory that later ones use again) and loaded by a backend built anew. `--train`: a step is trained while the second save
is written, and one without, to see what writing costs it. Each size runs in a process of its own.
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

from telescope.algorithms.grpo import GRPO
from telescope.backends.base import Job, Saved, World
from telescope.backends.fsdp import FSDP
from telescope.backends.fsdp.backend import FSDPBackend
from telescope.config.parts import ModelSettings, TrainerSettings
from telescope.runlog import digests

PATIENCE_S = 1800


@dataclass(frozen=True)
class Measured:
    """Seconds. `in_place`: of a save without the copy, which holds training up until all is written. `state_gb`: what was
    written. `load`: reading alone, of a backend's build; `verify`: reading all bytes before it and comparing their CRC-32."""

    parameters_m: float
    state_gb: float
    first_stall: float
    stall: float
    write: float
    in_place: float
    verify: float
    load: float
    step: float | None
    step_beside_a_save: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 12])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary one")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(asdict(measure(given.one, given.hidden, given.device, given.folder, given.train))))
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {given.device}")
    rows = []
    for layers in given.layers:
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
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.training.checkpoint", *arguments, *(["--train"] if given.train else [])],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ran.stdout.splitlines()[-1]


def measure(layers: int, hidden: int, device: str, folder: Path, train: bool) -> Measured:
    job, settings = _job(layers, hidden, device, folder), FSDP(mixed_precision_dtype=None if device == "cpu" else "bfloat16")
    backend = FSDPBackend(settings, job)
    backend._updater.make_state()
    first, _ = _save(backend, folder / "first", device)
    shutil.rmtree(folder / "first")
    alone = _step(backend, 1) if train else None
    outcomes: queue.Queue[object] = queue.Queue()
    stall = _begin(backend, folder / "second", device, outcomes)
    beside = _step(backend, 2) if train else None
    written = outcomes.get(timeout=PATIENCE_S)
    assert isinstance(written, Saved), written
    backend._saver._settings = replace(backend._saver._settings, background=False)
    in_place, _ = _save(backend, folder / "third", device)
    shutil.rmtree(folder / "third")
    numel = sum(parameter.numel() for parameter in backend._policy.parameters())
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
    return Measured(numel / 1e6, written.nbytes / 1e9, first, stall, written.seconds, in_place, verify, load, alone, beside)


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


def _job(layers: int, hidden: int, device: str, folder: Path) -> Job:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32_768,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    return Job(
        algorithm=GRPO(),
        model=ModelSettings(name=str(folder / "model")),
        trainer=TrainerSettings(learning_rate=1e-6, seq_len=256),
        number_of_steps=10,
        temperature=1.0,
        max_tokens=64,
        seed=0,
        world=World(0, 1, "cpu" if device == "cpu" else "cuda:0"),
    )


if __name__ == "__main__":
    main()
