"""Whether two mathematical answers are the same, asked once: at once where that needs no algebra, else in a grader process.

Owns what is remembered of verdicts. How answers are compared is maths.py's, the processes are pool.py's.
"""

from __future__ import annotations

from telescope.environments.graders.maths import Conventions, compare_exactly, compare_symbolically
from telescope.environments.graders.pool import grade
from telescope.environments.graders.quantities import PercentReading
from telescope.environments.lru import LruCache

TOO_HEAVY = "too_heavy"
"""The tag of an answer that used up its processor time."""
MATH_VERIFY = "math-verify>=0.9,<0.10"
"""What algebra needs, as pip takes it."""
REMEMBERED = 4096


class MathsGrader:
    """`limit_s`: seconds of processor time for one comparison; the other two are those of `Conventions`."""

    def __init__(self, percent: PercentReading, tolerance: float, limit_s: float) -> None:
        self._conventions = Conventions(percent, tolerance)
        self._limit_s = limit_s
        self._verdicts: LruCache[tuple[str, str], bool] = LruCache(REMEMBERED)  # samples of a group often give one answer

    async def is_right(self, wanted: str, given: str) -> bool:
        """Raises `GraderOverrun` where the comparison takes too long, which is `given`'s doing where `wanted` is easy."""
        known = compare_exactly(wanted, given, self._conventions)
        if known is None:
            known = self._verdicts.peek((wanted, given))
        if known is None:
            asked = wanted, given, self._conventions.percent, self._conventions.tolerance
            known = bool(await grade(compare_symbolically, *asked, limit_s=self._limit_s))
            self._verdicts.put((wanted, given), known)
        return known
