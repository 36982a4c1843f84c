"""What credit within a rollout changes on the two-turn tool game.

    python -m benchmarks.learning.turns FILE.json [--seeds 0 1 2] [--ways 0 1 2]

One process, the product's environment, chat, advantages, packing and trainer (tests/learning/turns.py); `look_up` with its
embedded model and clipped GRPO, 24 steps of 16 groups of 8. Each way plays prompts drawn with the same seeds. A run is a row of
the file; what is there is not run again. Shown are means over five steps, and of all pairs of the same seed the difference
to credit=rollout with its interval (Student's t).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from telescope.algorithms.grpo import GRPO
from telescope.environments.tasks.look_up import LookUp
from tests.learning.turns import learn_turns

STEPS = 24
CLIPPED: dict[str, Any] = {"use_ppo_clip": True, "clip_low": 0.2, "clip_high": 0.28}
WAYS = {
    "credit=rollout": (GRPO(**CLIPPED), LookUp()),
    "credit=turn": (GRPO(**CLIPPED, credit="turn"), LookUp()),
    "credit=turn turn_discount=0.5 call_credit=0.5": (
        GRPO(**CLIPPED, credit="turn", turn_discount=0.5),
        LookUp(call_credit=0.5),
    ),
}
BASE = "credit=rollout"
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
"""Student's t by degrees of freedom, two-sided at 95 %."""


def play(way: str, seed: int) -> dict[str, Any]:
    algorithm, environment = WAYS[way]
    began = time.monotonic()
    curve = learn_turns(
        environment, "tiny_tools", algorithm,
        seed=seed, steps=STEPS, prompts=16, group_size=8, max_tokens=26, learning_rate=3e-4,
    )  # fmt: skip
    fives = [round(statistics.fmean(curve[at : at + 5]), 3) for at in range(0, STEPS, 5)]
    seconds = round(time.monotonic() - began)
    return {"way": way, "seed": seed, "fives": fives, "mean": round(statistics.fmean(curve), 4), "seconds": seconds}


def find_interval(differences: list[float]) -> str:
    """Mean and 95 % interval, e.g. `-0.0040 [-0.0213, +0.0133]`."""
    mean = statistics.fmean(differences)
    if len(differences) - 1 not in T_975:
        return f"{mean:+.4f}"
    half = T_975[len(differences) - 1] * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]"


def write_table(rows: list[dict[str, Any]]) -> str:
    by = {(row["way"], row["seed"]): row for row in rows}
    lines = ["| way | seed | exact, by five steps | mean | seconds |", "|---|---|---|---|---|"]
    for row in rows:
        fives = " ".join(f"{value:.3f}" for value in row["fives"])
        lines.append(f"| {row['way']} | {row['seed']} | {fives} | {row['mean']:.4f} | {row['seconds']} |")
    for way in (way for way in WAYS if way != BASE):
        pairs = [(row, by[BASE, row["seed"]]) for row in rows if row["way"] == way and (BASE, row["seed"]) in by]
        if pairs:
            mean = find_interval([own["mean"] - other["mean"] for own, other in pairs])
            end = find_interval([own["fives"][-1] - other["fives"][-1] for own, other in pairs])
            lines.append(f"{way} less {BASE}, {len(pairs)} seeds: all steps {mean}; steps 21 to {STEPS} {end}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Credit by rollout against credit by turn.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--ways", type=int, nargs="*", default=[0, 1, 2])
    asked = parser.parse_args()
    rows = json.loads(asked.file.read_text()) if asked.file.exists() else []
    for seed in asked.seeds:
        for way in (list(WAYS)[number] for number in asked.ways):
            if not any((row["way"], row["seed"]) == (way, seed) for row in rows):
                rows.append(play(way, seed))
                asked.file.write_text(json.dumps(rows, indent=1) + "\n")
    print(write_table(rows))


if __name__ == "__main__":
    main()
