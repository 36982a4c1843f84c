"""What grader processes cost: `python -m benchmarks.graders`.

Times the way there and back of a call that does nothing, comparisons by math-verify side by side, and the pause after a call
that had to be stopped. Prints lines of Markdown. Needs the extra `math`.
"""

from __future__ import annotations

import asyncio
import operator
import statistics
import time
from collections.abc import Sequence

from telescope.environments.graders.maths import compare_symbolically
from telescope.environments.graders.pool import GraderOverrun, grade, open_graders

PAIRS = (("x^2+2x+1", "(x+1)^2"), ("\\frac{n^2-3n}{2}", "n(n-3)/2"), ("\\sqrt{3}/3", "1/\\sqrt{3}"), ("[-1,1]", "(-1,1)"))
CALLS, COMPARISONS = 500, 200


async def milliseconds(calls: int) -> list[float]:
    taken = []
    for _ in range(calls):
        begun = time.perf_counter()
        await grade(operator.neg, 1)
        taken.append(1000 * (time.perf_counter() - begun))
    return taken


async def measure() -> None:
    async with open_graders(2) as graders:
        begun = time.perf_counter()
        await grade(operator.neg, 1)
        show("start of a process", [1000 * (time.perf_counter() - begun)])
        show("a call that does nothing", await milliseconds(CALLS))
        begun = time.perf_counter()
        await asyncio.gather(*(grade(compare_symbolically, *PAIRS[0]) for _ in range(2)))
        show("first comparison, math-verify imported by two processes", [1000 * (time.perf_counter() - begun)])
        begun = time.perf_counter()
        await asyncio.gather(*(grade(compare_symbolically, *PAIRS[n % len(PAIRS)]) for n in range(COMPARISONS)))
        each = 1000 * (time.perf_counter() - begun) / COMPARISONS
        show(f"a comparison, {COMPARISONS} at once on two processes", [each])
        begun = time.perf_counter()
        try:
            await grade(compare_symbolically, "1", "9^{9^{9^9}}", limit_s=1.0)
        except GraderOverrun:
            show("a power tower held to 1 s of processor time", [1000 * (time.perf_counter() - begun)])
        begun = time.perf_counter()
        await grade(compare_symbolically, *PAIRS[0])
        show("the comparison after it", [1000 * (time.perf_counter() - begun)])
        print(f"\nProcesses started: {graders.started}")


def show(what: str, taken: Sequence[float]) -> None:
    ordered = sorted(taken)
    print(f"| {what} | {statistics.median(ordered):.2f} | {ordered[int(0.95 * (len(ordered) - 1))]:.2f} |")


if __name__ == "__main__":
    print("| what | median ms | 95 % below |\n|---|---|---|")
    asyncio.run(measure())
