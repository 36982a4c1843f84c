"""Names kept in order of a changing number: which worker is freest, which server least loaded. Ties go to the first arrived."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace


class Ranking:
    """A heap whose outdated entries are dropped when they come up; the smallest rank is first. Amortised O(log n).

    New ranks wait until somebody asks: most numbers change several times between two questions.
    """

    def __init__(self) -> None:
        self._moved: dict[str, int] = {}
        self._current: dict[str, tuple[int, int, str]] = {}  # its latest entry in the heap; all others are outdated
        self._heap: list[tuple[int, int, str]] = []
        self._arrivals = 0

    def put(self, name: str, rank: int) -> None:
        """Enter the name, or change its rank."""
        self._moved[name] = rank

    def _settle(self) -> None:
        current, heap = self._current, self._heap
        for name, rank in self._moved.items():
            known = current.get(name)
            if known is None:
                arrival = self._arrivals
                self._arrivals += 1
            elif known[0] == rank:
                continue
            else:
                arrival = known[1]
            entry = current[name] = (rank, arrival, name)
            if heap and heap[0] is known:
                heapreplace(heap, entry)  # whoever was chosen last, mostly
            else:
                heappush(heap, entry)
        self._moved.clear()
        if len(heap) > 8 * len(current) + 64:
            heap[:] = current.values()
            heapify(heap)

    def remove(self, name: str) -> None:
        self._current.pop(name, None)
        self._moved.pop(name, None)

    def first(self) -> str | None:
        if self._moved:
            self._settle()
        heap = self._heap
        while heap:
            name = heap[0][2]
            if heap[0] is self._current.get(name):
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
