"""Which prompt a group gets and which seed a sample: counter-based hashes, no random state to carry.

The n-th group's environment, and each sample's seed, depend on the run's seed and on n alone. Within an environment each prompt
is drawn once an epoch, in an order that a keyed permutation gives place by place, so a split of 10^6 prompts needs no list; an
environment with a curriculum goes through that order once, and then by its pools (curriculum.py).
Nothing here depends on Python's version or hash seed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from math import isqrt

import msgspec

from telescope.flow.curriculum import Curriculum, CurriculumState, PassRatePools, Pools
from telescope.records import PromptRef

_ROUNDS = 8


def keyed_hash(purpose: str, *numbers: int) -> int:
    """64 bits from a purpose and integers: blake2b-8 over `purpose/n1/n2/…` in decimal, big-endian."""
    return _hashed("/".join([purpose, *map(str, numbers)]))


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def sample_seed(run_seed: int, group_id: int, sample: int) -> int:
    """Sampling seed of one rollout, in [0, 2^48): exact in every reader's numbers. Retries keep it."""
    return _hashed(f"sample/{run_seed}/{group_id}/{sample}") >> 16  # one a rollout: spelled out, for speed


def _unit(word: int) -> float:
    """64 bits as a number in [0, 1): the upper 53 make one exactly."""
    return (word >> 11) / (1 << 53)


class Permutation:
    """A keyed shuffle of 0 … size−1, one place at a time: `Permutation(10, 7)[0]` is where prompt 0 of the epoch is found.

    A Feistel network over pairs (left, right) with left < a, right < b and a·b just above `size`; places beyond `size` are
    walked through until one falls inside (Black and Rogaway 2002, generalised Feistel and cycle walking).
    """

    def __init__(self, size: int, key: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} places is empty")
        self._size = size
        self._rounds_begun = [blake2b(f"round/{key}/{turn}/".encode(), digest_size=8) for turn in range(_ROUNDS)]
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
            left = (left + self._word(turn, right)) % self._a
            right = (right + self._word(turn + 1, left)) % self._b
        return left * self._b + right

    def _word(self, turn: int, half: int) -> int:
        """`keyed_hash("round", key, turn, half)`, begun when the permutation was made."""
        word = self._rounds_begun[turn].copy()
        word.update(b"%d" % half)
        return int.from_bytes(word.digest(), "big")


class Cursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far one environment's prompts are drawn: `place` of them in epoch `epoch` (0-based), and those given back."""

    epoch: int = 0
    place: int = 0
    returned: tuple[int, ...] = ()
    """Prompt indices of cancelled groups, next to be drawn, oldest first."""
    curriculum: CurriculumState | None = None
    """What the environment's curriculum knows; None without one."""


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

    def __init__(
        self,
        seed: int,
        environments: tuple[tuple[str, float], ...],
        split: str,
        sizes: dict[str, int],
        curricula: Mapping[str, Pools] | None = None,
    ) -> None:
        """`sizes`: prompts of each label, all at least 1; `curricula`: settings of the labels that have one."""
        self._seed = seed
        self._environments = environments
        self._settings = dict(curricula or {})
        self._curricula: dict[str, Curriculum] = {label: PassRatePools(pools) for label, pools in self._settings.items()}
        self._split = split
        self._labels = [label for label, _ in environments]
        self._edges = list(accumulate(weight for _, weight in environments))
        self._sizes = sizes
        self._next_group = 0
        self._cursors = dict.fromkeys(self._labels, Cursor())
        self._orders: dict[str, tuple[int, Permutation]] = {}

    @property
    def next_group(self) -> int:
        """Index of the group drawn next."""
        return self._next_group

    @property
    def position(self) -> DataPosition:
        """Takes time and room by the prompts that curricula know: for checkpoints, not for each event."""
        cursors = dict(self._cursors)
        for label, curriculum in self._curricula.items():
            cursors[label] = msgspec.structs.replace(cursors[label], curriculum=curriculum.state)
        return DataPosition(self._next_group, cursors)

    def restore(self, position: DataPosition) -> None:
        """Go on from a saved position. Raises ValueError where it belongs to other environments."""
        if sorted(position.cursors) != sorted(self._labels):
            raise ValueError(
                f"the data position knows environments {sorted(position.cursors)}, this run {sorted(self._labels)}"
            )
        for label, cursor in position.cursors.items():
            if (cursor.curriculum is None) == (label in self._settings):
                has, not_so = ("no", "has one") if cursor.curriculum is None else ("a", "has none")
                raise ValueError(f"the data position has {has} curriculum of environments.{label}, and this run {not_so}")
        self._next_group = position.next_group
        self._cursors = {label: msgspec.structs.replace(position.cursors[label], curriculum=None) for label in self._labels}
        self._curricula = {
            label: PassRatePools(pools, position.cursors[label].curriculum) for label, pools in self._settings.items()
        }

    def scout(self) -> Draws:
        """Another one at the same place, to `foretell` with."""
        scout = Draws(self._seed, self._environments, self._split, self._sizes)
        scout._next_group, scout._cursors, scout._orders = self._next_group, dict(self._cursors), dict(self._orders)
        scout._curricula = self._curricula
        return scout

    def foretell(self) -> PromptRef | None:
        """The next group's prompt as far as is known now; None where a curriculum will decide on results that are yet to come.
        Of a scout only: it draws."""
        label = self._label_of(self._next_group)
        if label in self._curricula:
            self._next_group += 1
            return None
        return self.draw().prompt

    def draw(self) -> Drawn:
        """The next group's index and prompt. Given-back prompts of the drawn environment go first."""
        group_id = self._next_group
        self._next_group += 1
        label = self._label_of(group_id)
        if label in self._curricula:
            return Drawn(group_id, PromptRef(label, self._split, self._by_curriculum(label, group_id)), returned=False)
        cursor = self._cursors[label]
        if cursor.returned:
            self._cursors[label] = msgspec.structs.replace(cursor, returned=cursor.returned[1:])
            return Drawn(group_id, PromptRef(label, self._split, cursor.returned[0]), returned=True)
        if cursor.place == self._sizes[label]:
            self._cursors[label] = Cursor(cursor.epoch + 1)
        return Drawn(group_id, PromptRef(label, self._split, self._in_order(label)), returned=False)

    def give_back(self, prompt: PromptRef) -> None:
        """The prompt's group was cancelled: it is drawn next; a curriculum takes it back into its pool."""
        if prompt.environment in self._curricula:
            self._curricula[prompt.environment].came_back(prompt.index)
            return
        cursor = self._cursors[prompt.environment]
        self._cursors[prompt.environment] = msgspec.structs.replace(cursor, returned=(*cursor.returned, prompt.index))

    def without_result(self, prompt: PromptRef) -> None:
        """The prompt's group ended without a result, and is not to be tried again: its turn of this epoch is over."""
        if prompt.environment in self._curricula:
            self._curricula[prompt.environment].came_back(prompt.index)

    def played(self, prompt: PromptRef, rewards: Sequence[float]) -> None:
        """The prompt's group is complete, trained on or not."""
        if prompt.environment in self._curricula:
            self._curricula[prompt.environment].played(prompt.index, rewards)

    def resumed(self, prompt: PromptRef) -> None:
        """A group of the prompt is in play again after `restore`. In order of the groups' ids."""
        if prompt.environment in self._curricula:
            self._curricula[prompt.environment].resumed(prompt.index)

    def _by_curriculum(self, label: str, group_id: int) -> int:
        point = _unit(keyed_hash(f"pool of {label}", self._seed, group_id))
        return self._curricula[label].draw(point, lambda: self._unseen(label))

    def _unseen(self, label: str) -> int | None:
        return self._in_order(label) if self._cursors[label].place < self._sizes[label] else None

    def _in_order(self, label: str) -> int:
        """The prompt at the cursor, which moves on."""
        cursor = self._cursors[label]
        self._cursors[label] = msgspec.structs.replace(cursor, place=cursor.place + 1)
        return self._order_of(label, cursor.epoch)[cursor.place]

    def _label_of(self, group_id: int) -> str:
        if len(self._labels) == 1:
            return self._labels[0]
        point = _unit(keyed_hash("environment", self._seed, group_id)) * self._edges[-1]
        return self._labels[min(bisect_right(self._edges, point), len(self._labels) - 1)]

    def _order_of(self, label: str, epoch: int) -> Permutation:
        known = self._orders.get(label)
        if known is None or known[0] != epoch:
            key = keyed_hash(f"order of {label}", self._seed, epoch)
            known = self._orders[label] = (epoch, Permutation(self._sizes[label], key))
        return known[1]
