"""All lines of a table on this machine, by turns, and the table: what one would type for each, one after another.

    python -m benchmarks.peers.compare --cards 2 --shape 0.6B --turns 2 --with-async --python TRL_VENV/bin/python
    python -m benchmarks.peers.compare --cards 1 --shape 0.6B --python TRL_VENV/bin/python -- --steps 12

What follows `--` goes to every command. A line that fails is named, and the others go on; the table has those that ended well.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.peers.result import FEWEST_STEPS, UnusableResult, read_result
from benchmarks.peers.table import page
from benchmarks.peers.trl_arguments import CARDS
from benchmarks.peers.workload import ROOT

OURS = {2: ("two_cards",), 1: ("one_card", "one_card_in_turns")}
THEIRS = {2: "server", 1: "colocate"}


def plan_turn(
    cards: int, shape: str, turn: int, python: str, out: Path, common: Sequence[str], *, with_async: bool
) -> Iterator[tuple[Path, list[str]]]:
    """The commands of a turn, each with its file of figures."""
    modes = [(THEIRS[cards], "tuned"), (THEIRS[cards], "defaults")]
    if with_async and cards == CARDS["async"]:
        modes.append(("async", "tuned"))
    lines = [("ours", layout, ["--layout", layout]) for layout in OURS[cards]]
    lines += [
        ("trl", f"{mode}_{variant}", ["--mode", mode, "--variant", variant, "--python", python]) for mode, variant in modes
    ]
    for module, name, options in lines:
        file = out / f"{module}_{shape}_{name}_{turn}.json"
        yield (
            file,
            [sys.executable, "-m", f"benchmarks.peers.{module}", "--shape", shape, *options, *common, "--out", str(file)],
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, choices=sorted(OURS), default=2)
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--python", required=True, help="the Python that has TRL")
    parser.add_argument("--with-async", action="store_true", help="TRL's AsyncGRPOTrainer, too")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"), help="a folder for the files of figures")
    parser.add_argument("common", nargs="*", help="options of every command, after --")
    given = parser.parse_args()
    done: list[Path] = []
    failed: list[Path] = []
    for turn in range(1, given.turns + 1):
        planned = plan_turn(
            given.cards, given.shape, turn, given.python, given.out.absolute(), given.common, with_async=given.with_async
        )
        for file, command in planned:
            print("$", " ".join(command), flush=True)
            (failed if subprocess.run(command, cwd=ROOT, check=False).returncode else done).append(file)
    try:
        print("\n".join(page([read_result(file) for file in done], FEWEST_STEPS)) if done else "no line ended well")
    except UnusableResult as error:
        print(error)
        return 1
    for file in failed:
        print(f"without {file.stem}, which failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
