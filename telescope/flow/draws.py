"""Which prompt a group gets and which seed a sample: counter-based hashes, no random state to carry.

The n-th group's environment, and each sample's seed, depend on the run's seed and on n alone. Within an environment each prompt
is drawn once an epoch, in an order that a keyed permutation gives place by place, so a split of 10^6 prompts needs no list.
Nothing here depends on Python's version or hash seed.
"""

from __future__ import annotations

from bisect import bisect_right
from hashlib import blake2b
from itertools import accumulate
from math import isqrt

import msgspec

from telescope.records import PromptRef

_ROUNDS = 8


def keyed_hash(purpose: str, *numbers: int) -> int:
    """64 bits from a purpose and integers: blake2b-8 over `purpose/n1/n2/…` in decimal, big-endian."""
    text = "/".join([purpose, *map(str, numbers)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def sample_seed(run_seed: int, group_id: int, sample: int) -> int:
    """Sampling seed of one rollout, in [0, 2^48): exact in every reader's numbers. Retries keep it."""
    return keyed_hash("sample", run_seed, group_id, sample) >> 16


class Permutation:
    """A keyed shuffle of 0 … size−1, one place at a time: `Permutation(10, 7)[0]` is where prompt 0 of the epoch is found.

    A Feistel network over pairs (left, right) with left < a, right < b and a·b just above `size`; places beyond `size` are
    walked through until one falls inside (Black and Rogaway 2002, generalised Feistel and cycle walking).
    """

    def __init__(self, size: int, key: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} places is empty")
        self._size = size
        self._key = key
        self._a = isqrt(size - 1) + 1
        self._b = -(-size // self._a)

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self._size:
            raise IndexError(f"place {place} is outside a permutation of {self._size}")
        place = self._rounds(place)
        while place >= self._size:
            place = self._rounds(place)
        return place

    def _rounds(self, place: int) -> int:
        left, right = divmod(place, self._b)
        for turn in range(0, _ROUNDS, 2):
            left = (left + keyed_hash("round", self._key, turn, right)) % self._a
            right = (right + keyed_hash("round", self._key, turn + 1, left)) % self._b
        return left * self._b + right


class Cursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far one environment's prompts are drawn: `place` of them in epoch `epoch` (0-based), and those given back."""

    epoch: int = 0
    place: int = 0
    returned: tuple[int, ...] = ()
    """Prompt indices of cancelled groups, next to be drawn, oldest first."""


class DataPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole state of drawing, small enough for a checkpoint."""

    next_group: int
    cursors: dict[str, Cursor]


class Drawn(msgspec.Struct, frozen=True):
    group_id: int
    prompt: PromptRef
    returned: bool


class Draws:
    """Draws the prompts of groups 0, 1, 2 … from environments by weight."""

    def __init__(self, seed: int, environments: tuple[tuple[str, float], ...], split: str, sizes: dict[str, int]) -> None:
        """`sizes` gives the number of prompts of each label, all at least 1."""
        self._seed = seed
        self._split = split
        self._labels = [label for label, _ in environments]
        self._edges = list(accumulate(weight for _, weight in environments))
        self._sizes = sizes
        self._next_group = 0
        self._cursors = dict.fromkeys(self._labels, Cursor())
        self._orders: dict[str, tuple[int, Permutation]] = {}

    @property
    def position(self) -> DataPosition:
        return DataPosition(self._next_group, dict(self._cursors))

    def restore(self, position: DataPosition) -> None:
        """Go on from a saved position. Raises ValueError where it belongs to other environments."""
        if sorted(position.cursors) != sorted(self._labels):
            raise ValueError(
                f"the data position knows environments {sorted(position.cursors)}, this run {sorted(self._labels)}"
            )
        self._next_group = position.next_group
        self._cursors = {label: position.cursors[label] for label in self._labels}

    def draw(self) -> Drawn:
        """The next group's index and prompt. Given-back prompts of the drawn environment go first."""
        group_id = self._next_group
        self._next_group += 1
        label = self._label_of(group_id)
        cursor = self._cursors[label]
        if cursor.returned:
            self._cursors[label] = msgspec.structs.replace(cursor, returned=cursor.returned[1:])
            return Drawn(group_id, PromptRef(label, self._split, cursor.returned[0]), returned=True)
        if cursor.place == self._sizes[label]:
            cursor = Cursor(cursor.epoch + 1)
        index = self._order_of(label, cursor.epoch)[cursor.place]
        self._cursors[label] = msgspec.structs.replace(cursor, place=cursor.place + 1)
        return Drawn(group_id, PromptRef(label, self._split, index), returned=False)

    def give_back(self, prompt: PromptRef) -> None:
        cursor = self._cursors[prompt.environment]
        self._cursors[prompt.environment] = msgspec.structs.replace(cursor, returned=(*cursor.returned, prompt.index))

    def _label_of(self, group_id: int) -> str:
        # 53 bits make a float in [0, 1) exactly
        point = (keyed_hash("environment", self._seed, group_id) >> 11) / (1 << 53) * self._edges[-1]
        return self._labels[min(bisect_right(self._edges, point), len(self._labels) - 1)]

    def _order_of(self, label: str, epoch: int) -> Permutation:
        known = self._orders.get(label)
        if known is None or known[0] != epoch:
            key = keyed_hash(f"order of {label}", self._seed, epoch)
            known = self._orders[label] = (epoch, Permutation(self._sizes[label], key))
        return known[1]
