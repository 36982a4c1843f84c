"""Names kept in order of a changing number: which worker is freest, which server least loaded. Ties go to the first arrived."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush


class Ranking:
    """A heap whose outdated entries are dropped when they come up; the smallest rank is first. Amortised O(log n)."""

    def __init__(self) -> None:
        self._current: dict[str, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._arrivals = 0

    def put(self, name: str, rank: int) -> None:
        """Enter the name, or change its rank."""
        known = self._current.get(name)
        if known is None:
            arrival = self._arrivals
            self._arrivals += 1
        elif known[0] == rank:
            return
        else:
            arrival = known[1]
        self._current[name] = (rank, arrival)
        heappush(self._heap, (rank, arrival, name))
        if len(self._heap) > 8 * len(self._current) + 64:
            self._heap = [(rank, arrival, name) for name, (rank, arrival) in self._current.items()]
            heapify(self._heap)

    def remove(self, name: str) -> None:
        self._current.pop(name, None)

    def first(self) -> str | None:
        heap = self._heap
        while heap:
            rank, arrival, name = heap[0]
            if self._current.get(name) == (rank, arrival):
                return name
            heappop(heap)
        return None

    def first_that(self, accept: Callable[[str], bool], below: int | None = None) -> str | None:
        """The first name that is accepted; None at a rank of `below` or more."""
        aside: list[tuple[int, int, str]] = []
        while (name := self.first()) is not None and not accept(name):
            if below is not None and self._heap[0][0] >= below:
                name = None
                break
            aside.append(heappop(self._heap))
        for entry in aside:
            heappush(self._heap, entry)
        return name
