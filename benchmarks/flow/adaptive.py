"""What adaptive concurrency does on a real engine with a small KV cache: `python -m benchmarks.flow.adaptive FOLDER`.

Two runs each, with and without `orchestrator.adaptive_concurrency`, in turn: a model of the embedded one's shape with random
weights on vLLM's CPU backend, so that completions are long and of all lengths, with far more lanes than the cache has room for.
Figures come from the journals (what engines reported) and the step metrics. Processor seconds depend less on what else the
machine does than the wall clock.
"""

from __future__ import annotations

import argparse
import shutil
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.flow.predict import play
from telescope.config.models import model_folder
from telescope.flow import events as seen
from telescope.flow.replay import decode_line
from telescope.runlog.journal import journal_lines
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows

WORK = (
    "number_of_steps=6", "rollout.max_tokens=180", "orchestrator.prompts_batch_size_for_trainer=8",
    "orchestrator.max_concurrent_prompts_per_server=24", "orchestrator.discard_group_zero_advantage=false",
    "orchestrator.free_lane_after_generation=true", "trainer.learning_rate=0.0",
)  # fmt: skip


def random_model(folder: Path) -> Path:
    """The embedded model with weights that say nothing: every token is about as likely as any other, the last one too."""
    if not folder.exists():
        shutil.copytree(model_folder("tiny"), folder)
        random = np.random.default_rng(0)
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            noise = {
                name: value if value.ndim == 1 else (0.02 * random.standard_normal(value.shape)).astype(value.dtype)
                for name, value in tensors.items()
            }
            save_file(noise, file, metadata={"format": "pt"})
    return folder


def figures(run: RunDirectory) -> dict[str, float]:
    """What the engine said of itself, and what the run got out of it."""
    lines = [decode_line(text, number) for number, text in enumerate(journal_lines(run.journal), start=1) if number > 1]
    loads = [(line.now, line.event) for line in lines if isinstance(line.event, seen.ServerLoad)]
    turns = [row for row in rows(run, "turns") if row.get("completion_tokens")]
    begun, ended = min(row["placed_ns"] for row in turns), max(row["done_ns"] for row in turns)
    tokens, seconds = sum(row["completion_tokens"] for row in turns), (ended - begun) / 1e9
    metrics = [row["metrics"] for row in rows(run, "step_metrics")]
    # the first step's figure holds the engine's start
    engines = sum(row.get("processor_s/engines", 0.0) for row in metrics[1:])
    late = sum(row["metrics"]["tokens"] for row in rows(run, "step_metrics") if row["step"] > 1)
    span = max(loads[-1][0] - loads[0][0], 1e-9)
    held = sum((after[0] - before[0]) * before[1].kv_used for before, after in pairwise(loads)) / span
    return {
        "tokens/s": tokens / seconds,
        "ms of the engine's processor a trained token": 1e3 * engines / max(late, 1),
        "tokens a completion": fmean(row["completion_tokens"] for row in turns),
        "preemptions": float(max(event.preemptions for _, event in loads)),
        "of them in the second half": float(loads[-1][1].preemptions - loads[len(loads) // 2][1].preemptions),
        "waiting in the second half": fmean(event.waiting for _, event in loads[len(loads) // 2 :]),
        "share of KV in use": held,
        "reports above 95 %": sum(event.kv_used >= 0.95 for _, event in loads) / len(loads),
        "running": fmean(event.running for _, event in loads),
        "waiting in the engine": fmean(event.waiting for _, event in loads),
        "median request s": sorted((row["done_ns"] - row["placed_ns"]) / 1e9 for row in turns)[len(turns) // 2],
        "step s": fmean(row["timing_step_total"] for row in metrics[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kv-mb", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    model = random_model(given.folder.absolute() / "model")
    for number in range(given.rounds):
        for adaptive in ("false", "true"):
            overrides = (f"orchestrator.adaptive_concurrency={adaptive}", f"inference.cpu_kv_cache_mb={given.kv_mb}")
            run = play(given.folder, f"adaptive-{adaptive}-{number}", (*WORK, f"model.name={model}", *overrides))
            said = ", ".join(f"{name} {value:.3g}" for name, value in figures(run).items())
            print(f"adaptive={adaptive}: {said}", flush=True)


if __name__ == "__main__":
    main()
