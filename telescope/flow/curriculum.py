"""Which of an environment's prompts is worth playing now: pools by how often a prompt's samples pass.

    never played ─▶ in play ─▶ pool of its pass rate ─▶ in play ─▶ …

Owns the pools and what is known of a prompt. Refuses random state (a draw is decided by the number it is given) and prompts'
texts. Memory grows with the prompts that were played, not with the split.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import msgspec

NEW = "new"
"""Name of the pool of prompts that were never played."""


class PassRatePool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts whose pass rate is at most `up_to` and above that of the pool before. `share` of the draws, among pools that have
    a prompt."""

    name: str
    up_to: float
    share: float


class PassRateRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one environment's curriculum. Raises ValueError with a sentence."""

    pools: tuple[PassRatePool, ...]
    """In order of `up_to`; the last one's is 1."""
    new_share: float = 1.0
    """Share of draws that go to prompts never played, while there are any."""
    window: int = 2
    """Groups of a prompt, the latest, that its pass rate is the mean of."""
    pass_above: float = 0.0
    """A sample passes with a reward above this."""

    def __post_init__(self) -> None:
        limits = [pool.up_to for pool in self.pools]
        names = [pool.name for pool in self.pools]
        if not limits or limits[-1] != 1 or any(low >= high for low, high in zip([0.0, *limits], [*limits, 2.0], strict=True)):
            raise ValueError(
                f"pools end at up_to={limits}: they must rise from above 0 to exactly 1, so that each rate has a pool"
            )
        if len({NEW, *names}) <= len(names):
            raise ValueError(f"pools are called {names}: give each its own name, and none {NEW!r}")
        if any(not 0 <= share < float("inf") for share in (self.new_share, *(pool.share for pool in self.pools))):
            raise ValueError("a pool's share must be 0 or more: it is the weight of the pool among those that have a prompt")
        if self.new_share == 0:
            raise ValueError("new_share=0 would never play a prompt for the first time: give it a share above 0")
        if self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1 group")


class PassRecord(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a prompt: samples that passed, and samples, of each of its last groups."""

    passed: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        """Mean over the groups, each counting alike."""
        return sum(a / b for a, b in zip(self.passed, self.samples, strict=True)) / len(self.samples)


class CurriculumState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a curriculum's memory, for a checkpoint. Prompts in play are kept as if they had come back without a result."""

    pools: tuple[tuple[int, ...], ...]
    """Prompts of each pool, the next one first."""
    again: tuple[int, ...]
    """Never played to an end, though drawn."""
    records: dict[int, PassRecord]


class Curriculum(Protocol):
    """What drawing asks of a curriculum. The same calls give the same answers, on any machine."""

    def draw(self, point: float, fresh: Callable[[], int | None]) -> int:
        """The next prompt's index, by `point` in [0, 1). `fresh` gives one that was never drawn, or None after the last."""
        ...

    def record(self, index: int, rewards: Sequence[float]) -> None:
        """A group of the prompt is complete, whether it is trained on or not."""
        ...

    def give_back(self, index: int) -> None:
        """A group of the prompt ended without a result."""
        ...

    def resume(self, index: int) -> None:
        """A group of the prompt was in play when the state was saved, and is again. In order of their draws."""
        ...

    @property
    def state(self) -> CurriculumState: ...


class PassRateCurriculum:
    """The shipped curriculum. Within a pool prompts take turns: who was played longest ago is next."""

    def __init__(self, settings: PassRateRules, state: CurriculumState | None = None) -> None:
        """Raises ValueError where the state has another number of pools."""
        self._settings = settings
        self._limits = [pool.up_to for pool in settings.pools]
        self._pools: list[dict[int, None]] = [{} for _ in settings.pools]
        self._again: dict[int, None] = {}
        self._records: dict[int, PassRecord] = {}
        self._in_play: dict[int, int] = {}  # times, by index, in order of their draws
        self._exhausted = False
        if state is not None:
            if len(state.pools) != len(self._pools):
                raise ValueError(f"the saved curriculum has {len(state.pools)} pools, the settings {len(self._pools)}")
            self._pools = [dict.fromkeys(pool) for pool in state.pools]
            self._again = dict.fromkeys(state.again)
            self._records = dict(state.records)

    @property
    def state(self) -> CurriculumState:
        pools = [list(pool) for pool in self._pools]
        again = list(self._again)
        for index in self._in_play:
            (pools[self._place(index)] if index in self._records else again).append(index)
        return CurriculumState(tuple(map(tuple, pools)), tuple(again), dict(self._records))

    def sizes(self) -> dict[str, int]:
        """Prompts waiting in each pool by name; those never drawn are in none."""
        names = [pool.name for pool in self._settings.pools]
        return {NEW: len(self._again)} | {name: len(pool) for name, pool in zip(names, self._pools, strict=True)}

    def draw(self, point: float, fresh: Callable[[], int | None]) -> int:
        index = self._pick(point, fresh)
        self._in_play[index] = self._in_play.pop(index, 0) + 1
        return index

    def record(self, index: int, rewards: Sequence[float]) -> None:
        old, window = self._records.get(index, PassRecord()), self._settings.window
        passed = sum(reward > self._settings.pass_above for reward in rewards)
        self._records[index] = PassRecord((*old.passed, passed)[-window:], (*old.samples, len(rewards))[-window:])
        self._leave_play(index)

    def give_back(self, index: int) -> None:
        self._leave_play(index)

    def resume(self, index: int) -> None:
        for pool in (self._again, *self._pools):
            pool.pop(index, None)
        self._in_play[index] = self._in_play.get(index, 0) + 1

    def _pick(self, point: float, fresh: Callable[[], int | None]) -> int:
        shares = [self._settings.new_share, *(pool.share for pool in self._settings.pools)]
        has = [not self._exhausted or bool(self._again), *map(bool, self._pools)]
        while any(has):
            choice = _choose(point, [share if there else 0.0 for share, there in zip(shares, has, strict=True)], has)
            if choice:
                return _take_first(self._pools[choice - 1])
            if self._again:
                return _take_first(self._again)
            index = fresh()
            if index is not None:
                return index
            self._exhausted, has[0] = True, False
        return next(iter(self._in_play))  # every prompt is in play: the one drawn longest ago, once more

    def _leave_play(self, index: int) -> None:
        """Into the pool of its rate, at its end, once no group of the prompt is in play."""
        times = self._in_play.get(index, 1) - 1
        if times:
            self._in_play[index] = times
            return
        self._in_play.pop(index, None)
        for pool in (self._again, *self._pools):
            pool.pop(index, None)
        (self._pools[self._place(index)] if index in self._records else self._again)[index] = None

    def _place(self, index: int) -> int:
        """Number of the pool for the prompt's pass rate."""
        rate = min(self._records[index].rate, 1.0)
        return next(number for number, limit in enumerate(self._limits) if rate <= limit)


def _choose(point: float, shares: Sequence[float], has: Sequence[bool]) -> int:
    """The pool that `point` in [0, 1) falls to, by share; where only pools of share 0 have a prompt, the first of these."""
    edges = list(accumulate(shares))
    if edges[-1] <= 0:
        return list(has).index(True)
    chosen = bisect_right(edges, point * edges[-1])
    return min(chosen, max(number for number, share in enumerate(shares) if share > 0))


def _take_first(pool: dict[int, None]) -> int:
    index = next(iter(pool))
    del pool[index]
    return index
