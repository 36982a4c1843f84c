"""What was made lately, by key: at most so many entries, the least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def peek(self, key: K) -> V | None:
        """The remembered value; None where there is none."""
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        """Remember a value in place of any other."""
        self._entries.pop(key, None)
        self.get(key, lambda: value)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The remembered value, else a new one, which is remembered unless `make` raises."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        made = self._entries[key] = make()
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)
        return made
