"""Random draws that are the same on every machine, Python version and process: hashes of a key and a counter.

Owns how a task turns (seed, split, index) into a problem. Refuses `random` and numpy generators: only their raw streams, not
their methods, are promised to stay the same between releases, and two workers must never disagree about a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_WORD = 1 << 64


class HashedRandom:
    """An endless stream of draws named by its key, e.g. `HashedRandom("countdown", 0, "train", 41)`."""

    def __init__(self, *key: str | int) -> None:
        self._key = "\x1f".join(str(part) for part in key).encode()
        self._block = 0
        self._words: list[int] = []

    def _word(self) -> int:
        if not self._words:
            digest = hashlib.blake2b(self._key + b"\x1e%d" % self._block, digest_size=64).digest()
            self._words = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8)]
            self._block += 1
        return self._words.pop()

    def below(self, n: int) -> int:
        """A whole number in [0, n), each equally likely (words beyond the last full multiple of n are drawn again)."""
        if n < 1:
            raise ValueError(f"there is no whole number in [0, {n})")
        usable = _WORD - _WORD % n
        word = self._word()
        while word >= usable:
            word = self._word()
        return word % n

    def between(self, low: int, high: int) -> int:
        """A whole number in [low, high], both ends included."""
        return low + self.below(high - low + 1)

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        order = list(items)
        for at in range(len(order) - 1, 0, -1):
            other = self.below(at + 1)
            order[at], order[other] = order[other], order[at]
        return order
