"""What credit within a rollout changes on the two-turn tool game: `python -m benchmarks.learning.turns [steps] [seeds]`.

One process, the product's environment, chat, advantages, packing and trainer (tests/learning/turns.py); `look_up` with its
embedded model and clipped GRPO. Each way plays the same prompts with the same seeds; shown are means over five steps, and the
paired differences of the mean over all steps with their intervals (Student's t).
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from telescope.algorithms.grpo import GRPO
from telescope.environments.tasks.look_up import LookUp
from tests.learning.turns import learn_turns

CLIPPED = {"use_ppo_clip": True, "clip_low": 0.2, "clip_high": 0.28}
WAYS = {
    "credit=rollout": (GRPO(**CLIPPED), LookUp()),
    "credit=turn": (GRPO(**CLIPPED, credit="turn"), LookUp()),
    "credit=turn turn_discount=0.5 call_credit=0.5": (
        GRPO(**CLIPPED, credit="turn", turn_discount=0.5),
        LookUp(call_credit=0.5),
    ),
}
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
"""Student's t by degrees of freedom, two-sided at 95 %."""


def find_interval(differences: list[float]) -> tuple[float, float, float]:
    """Mean, and both ends of its 95 % interval."""
    mean = statistics.fmean(differences)
    half = T_975[len(differences) - 1] * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    seeds = range(int(sys.argv[2]) if len(sys.argv) > 2 else 3)
    curves: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for seed in seeds:
        for way, (algorithm, environment) in WAYS.items():
            began = time.monotonic()
            curve = learn_turns(
                environment, "tiny_tools", algorithm,
                seed=seed, steps=steps, prompts=16, group_size=8, max_tokens=26, learning_rate=3e-4,
            )  # fmt: skip
            curves[way].append(curve)
            fives = " ".join(f"{statistics.fmean(curve[at : at + 5]):.3f}" for at in range(0, steps, 5))
            print(f"| {way} | {seed} | {fives} | {statistics.fmean(curve):.4f} | {time.monotonic() - began:.0f} |", flush=True)
    base = curves["credit=rollout"]
    for way, found in curves.items():
        for what, part in (("all steps", slice(None)), ("last 5 steps", slice(-5, None))):
            pairs = zip(found, base, strict=True)
            differences = [statistics.fmean(own[part]) - statistics.fmean(other[part]) for own, other in pairs]
            print(way, what, "difference, low, high:", *(f"{value:+.4f}" for value in find_interval(differences)))
    print(json.dumps(curves))


if __name__ == "__main__":
    main()
