"""The whole asynchronous system learns, with each algorithm: real servers, real trainer, weights pushed while it generates.

    python -m benchmarks.learning.run [--algorithms grpo gspo] [--steps 40] [--seeds 0] [--out benchmarks/results/learning]

Each run is what a user would type, `python -m telescope.run experiment=reverse_letters algorithm=<name>`, with the preset's own
settings, one after another. What is measured is the share of exact answers among everything that was *sampled* before a step,
groups with equal rewards included: a trainer that learns behind a server that does not shows no curve. Writes OUT.json (every
step of every run) and OUT.md (means over five steps).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows

ALGORITHMS = ("grpo", "rloo", "reinforce_pp", "dr_grpo", "cispo", "gspo", "sapo")
OWN = {"dr_grpo": ("algorithm.dr_grpo_loss_agg_mode=token_sum_norm",)}
"""Where the preset is not the algorithm of the paper: docs/algorithms.md says so of dr_grpo's aggregation."""
SHOWN = {
    "exact": "sample/exact",
    "kl": "kl_divergence_inference",
    "entropy": "entropy",
    "staleness": "staleness_mean",
    "clip": "clip_fraction",
}
WINDOW = 5
LIMIT_S = 1800


@dataclass(frozen=True)
class Curve:
    """One run, step by step."""

    algorithm: str
    seed: int
    overrides: tuple[str, ...]
    wall_s: float
    steps: dict[str, list[float | None]]

    @property
    def exact(self) -> list[float]:
        return [value for value in self.steps["exact"] if value is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/learning"))
    given = parser.parse_args()
    curves = []
    for name in given.algorithms:
        for seed in given.seeds:
            curves.append(learn(name, seed, given.steps))
            print(f"{name} seed {seed}: {means(curves[-1].exact)} in {curves[-1].wall_s:.0f} s", flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.with_suffix(".json").write_text(json.dumps([asdict(curve) for curve in curves]) + "\n")
    given.out.with_suffix(".md").write_text("\n".join(page(curves)) + "\n")
    return 0


def learn(name: str, seed: int, steps: int) -> Curve:
    """Run it. Raises `RuntimeError` with the end of its output where it fails."""
    overrides = (
        "experiment=reverse_letters",
        f"algorithm={name}",
        *OWN.get(name, ()),
        f"number_of_steps={steps}",
        f"seed={seed}",
    )
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        local = (f"run_dir={directory}", "inference.http=false", "logging.use_wandb=false", "checkpoint.at_end=none")
        started = time.monotonic()
        said = subprocess.run(
            [sys.executable, "-m", "telescope.run", *overrides, *local],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if said.returncode:
            raise RuntimeError(f"{name} seed {seed} ended with exit code {said.returncode}:\n{said.stdout[-3000:]}")
        metrics = [row["metrics"] for row in rows(RunDirectory(directory), "step_metrics")]
        found = {short: [step.get(metric) for step in metrics] for short, metric in SHOWN.items()}
        return Curve(name, seed, overrides, time.monotonic() - started, found)


def means(values: Sequence[float]) -> str:
    """Over five steps each, e.g. `.24 .38 .61`."""
    parts = [values[start : start + WINDOW] for start in range(0, len(values), WINDOW)]
    return " ".join(f"{statistics.mean(part):.2f}".removeprefix("0") for part in parts)


def page(curves: Sequence[Curve]) -> Iterator[str]:
    steps = len(curves[0].exact)
    yield "# Reverse-letters with the whole asynchronous system"
    yield ""
    yield f"`python -m benchmarks.learning.run --steps {steps}`: share of exact answers among everything sampled, means over"
    yield f"{WINDOW} steps. {platform.machine()}, CPU only; vLLM, FSDP and environment worker as separate processes."
    yield ""
    yield "| algorithm | seed | exact, by five steps | largest KL | mean staleness | seconds |"
    yield "|---|---|---|---|---|---|"
    for curve in curves:
        largest = max(abs(value) for value in curve.steps["kl"] if value is not None)
        staleness = statistics.mean(value for value in curve.steps["staleness"] if value is not None)
        measured = f"{largest:.4f} | {staleness:.2f} | {curve.wall_s:.0f}"
        yield f"| {curve.algorithm} | {curve.seed} | {means(curve.exact)} | {measured} |"


if __name__ == "__main__":
    sys.exit(main())
