"""How long ranks wait for each other, by cost and by count: `python -m benchmarks.training.packing [--draws 40] [--out FILE]`.

Draws heavy-tailed lengths, deals them to ranks both ways, packs each rank's rows, and compares the step (the costliest row of
each place, summed) with what it would be if nobody waited. Numbers only, no model: it runs anywhere in some seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from telescope.maths import dealing

SEQ_LEN = 16_384
ATTENTION_LENGTH = 10_394.0
"""Of Qwen3-0.6B."""
MEDIAN, SIGMA, SHORTEST = 1_500, 1.2, 64
RANKS = (2, 4, 8)
ROLLOUTS = (128, 256, 1024)


def lengths(seed: int, rollouts: int) -> list[list[int]]:
    """Lognormal, cut at the row's length; every rollout has one branch."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, rollouts).clip(SHORTEST, SEQ_LEN)
    return [[int(length)] for length in drawn]


def measure(ranks: int, rollouts: int, draws: int) -> dict[str, float]:
    """Imbalances (1.0: nobody waits) over the draws, and seconds to deal one batch by cost."""
    by_cost, by_count, started = [], [], time.perf_counter()
    kind = {"seq_len": SEQ_LEN, "attention_length": ATTENTION_LENGTH}
    drawn = [lengths(seed, rollouts) for seed in range(draws)]
    shares = [dealing.deal(batch, ranks, **kind) for batch in drawn]  # type: ignore[arg-type]
    seconds = (time.perf_counter() - started) / draws
    for batch, share in zip(drawn, shares, strict=True):
        in_turn = dealing.deal_by_count(rollouts, ranks)
        by_cost.append(dealing.imbalance(batch, share, **kind))  # type: ignore[arg-type]
        by_count.append(dealing.imbalance(batch, in_turn, **kind))  # type: ignore[arg-type]
    return {
        "ranks": ranks,
        "rollouts": rollouts,
        "by_cost_mean": float(np.mean(by_cost)),
        "by_cost_max": max(by_cost),
        "by_count_mean": float(np.mean(by_count)),
        "by_count_max": max(by_count),
        "deal_s": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    found = [measure(ranks, rollouts, given.draws) for ranks in RANKS for rollouts in ROLLOUTS]
    sys.stdout.write("ranks rollouts | by cost mean max | by count mean max | ms to deal\n")
    for row in found:
        sys.stdout.write(
            f"{row['ranks']:5} {row['rollouts']:8} | {row['by_cost_mean']:7.3f} {row['by_cost_max']:7.3f} | "
            f"{row['by_count_mean']:7.3f} {row['by_count_max']:7.3f} | {1000 * row['deal_s']:.1f}\n"
        )
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
