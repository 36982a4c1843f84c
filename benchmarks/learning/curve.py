"""What a run did, in means over so many steps: `python -m benchmarks.learning.curve RUN_DIR [steps]`.

Reward, the environment's metrics, the gap between trainer and server log-probs, lag, and seconds a step by phase.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows

SHOWN = (
    "reward/policy", "reward/trained", "logprob_difference", "ratio_mean", "entropy", "grad_norm", "staleness_mean",
    "timing_step_active",
    "rollouts/completion_tokens/mean", "rollouts/trained_completion_tokens/mean",
)  # fmt: skip


def table(directory: RunDirectory, width: int) -> list[str]:
    """One line for each `width` steps; only metrics that the run has."""
    steps = sorted(rows(directory, "step_metrics"), key=lambda row: row["step"])
    every = dict.fromkeys(name for row in steps for name in row["metrics"])
    names = [name for name in every if name in SHOWN or (name.startswith("sample/") and name.count("/") == 1)]
    lines = ["| steps | " + " | ".join(names) + " | seconds a step |", "|" + "---|" * (len(names) + 2)]
    for start in range(0, len(steps), width):
        part = steps[start : start + width]
        known = [[row["metrics"][name] for row in part if row["metrics"].get(name) is not None] for name in names]
        before = steps[start - 1]["mono_ns"] if start else part[0]["mono_ns"]
        seconds = (part[-1]["mono_ns"] - before) / 1e9 / max(1, len(part) - (start == 0))
        shown = " | ".join(f"{fmean(values):.4g}" if values else "–" for values in known)
        lines.append(f"| {part[0]['step']}–{part[-1]['step']} | {shown} | {seconds:.3f} |")
    return lines


def updates(directory: RunDirectory) -> str:
    """The pauses of all weight updates, in ms."""
    pauses = sorted(1000 * row["pause_s"] for row in rows(directory, "weights") if row["phase"] == "committed")
    if not pauses:
        return "no weight update was committed"
    median = pauses[len(pauses) // 2]
    return f"pause of a weight update: median {median:.1f} ms, longest {pauses[-1]:.1f} ms of {len(pauses)}"


def main() -> None:
    directory = RunDirectory(Path(sys.argv[1]).absolute())
    print("\n".join(table(directory, int(sys.argv[2]) if len(sys.argv) > 2 else 10)))
    print(updates(directory))


if __name__ == "__main__":
    main()
