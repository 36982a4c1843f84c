"""Which prompt a group gets and which seed a sample: counter-based hashes, no random state to carry.

The n-th group's environment, and each sample's seed, depend on the run's seed and on n alone. Within an environment each prompt
is drawn once an epoch, in an order that a keyed permutation gives place by place, so a split of 10^6 prompts needs no list; an
environment with a curriculum goes through that order once, and then by its pools (curriculum.py).
Nothing here depends on Python's version or hash seed.

`PromptPrefetch` names the prompts that workers may make ready: those of the next groups to be sent out, a bounded number ahead.
It looks at the draws to come without drawing, so it changes no decision; where a prompt that came back pushes in, the guess is
mended when its group is admitted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from math import isqrt

import msgspec

from telescope.flow.curriculum import Curriculum, CurriculumState, PassRateCurriculum, PassRateRules
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


class DrawnPrompt(msgspec.Struct, frozen=True):
    group_id: int
    prompt: PromptRef
    returned: bool


class PromptSampler:
    """Draws the prompts of groups 0, 1, 2 … from environments by weight."""

    def __init__(
        self,
        seed: int,
        environments: tuple[tuple[str, float], ...],
        split: str,
        sizes: dict[str, int],
        curricula: Mapping[str, PassRateRules] | None = None,
    ) -> None:
        """`sizes`: prompts of each label, all at least 1; `curricula`: settings of the labels that have one."""
        self._seed = seed
        self._environments = environments
        self._settings = dict(curricula or {})
        self._curricula: dict[str, Curriculum] = {label: PassRateCurriculum(pools) for label, pools in self._settings.items()}
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
            label: PassRateCurriculum(pools, position.cursors[label].curriculum) for label, pools in self._settings.items()
        }

    def fork(self) -> PromptSampler:
        """Another one at the same place, to `foretell` with."""
        fork = PromptSampler(self._seed, self._environments, self._split, self._sizes)
        fork._next_group, fork._cursors, fork._orders = self._next_group, dict(self._cursors), dict(self._orders)
        fork._curricula = self._curricula
        return fork

    def foretell(self) -> PromptRef | None:
        """The next group's prompt as far as is known now; None where a curriculum will decide on results that are yet to come.
        Of a fork only: it draws."""
        label = self._label_of(self._next_group)
        if label in self._curricula:
            self._next_group += 1
            return None
        return self.draw().prompt

    def draw(self) -> DrawnPrompt:
        """The next group's index and prompt. Given-back prompts of the drawn environment go first."""
        group_id = self._next_group
        self._next_group += 1
        label = self._label_of(group_id)
        if label in self._curricula:
            return DrawnPrompt(group_id, PromptRef(label, self._split, self._by_curriculum(label, group_id)), returned=False)
        cursor = self._cursors[label]
        if cursor.returned:
            self._cursors[label] = msgspec.structs.replace(cursor, returned=cursor.returned[1:])
            return DrawnPrompt(group_id, PromptRef(label, self._split, cursor.returned[0]), returned=True)
        if cursor.place == self._sizes[label]:
            self._cursors[label] = Cursor(cursor.epoch + 1)
        return DrawnPrompt(group_id, PromptRef(label, self._split, self._in_order(label)), returned=False)

    def give_back(self, prompt: PromptRef) -> None:
        """The prompt's group was cancelled: it is drawn next; a curriculum takes it back into its pool."""
        if prompt.environment in self._curricula:
            self._curricula[prompt.environment].give_back(prompt.index)
            return
        cursor = self._cursors[prompt.environment]
        self._cursors[prompt.environment] = msgspec.structs.replace(cursor, returned=(*cursor.returned, prompt.index))

    def drop(self, prompt: PromptRef) -> None:
        """The prompt's group ended without a result, and is not to be tried again: its turn of this epoch is over."""
        if prompt.environment in self._curricula:
            self._curricula[prompt.environment].give_back(prompt.index)

    def record(self, prompt: PromptRef, rewards: Sequence[float]) -> None:
        """The prompt's group is complete, trained on or not."""
        if prompt.environment in self._curricula:
            self._curricula[prompt.environment].record(prompt.index, rewards)

    def resume(self, prompt: PromptRef) -> None:
        """A group of the prompt is in play again after `restore`. In order of the groups' ids."""
        if prompt.environment in self._curricula:
            self._curricula[prompt.environment].resume(prompt.index)

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


REMEMBERED = 4
"""Times the number ahead: names of which is known that they were given. Workers keep more."""


class PromptPrefetch:
    """Groups are sent out in order of their ids: the prompts of `size` of them are named beyond the last one sent."""

    def __init__(self, draws: PromptSampler, size: int) -> None:
        self._draws = draws
        self._size = size
        self._fork = draws.fork()
        self._admitted: dict[int, PromptRef] = {}  # not sent out yet, by group id
        self._foretold: dict[int, PromptRef | None] = {}  # not admitted yet; None: it hangs on results to come
        self._sent = draws.next_group - 1  # -1 at the start of a run
        self._next = draws.next_group  # the first group whose prompt was not named
        self._named: dict[PromptRef, None] = {}
        self._out: list[PromptRef] = []

    def note_admitted(self, group_id: int, prompt: PromptRef) -> None:
        """The group's prompt is drawn. Where it is another one than was foretold, the later ones are foretold anew."""
        self._admitted[group_id] = prompt
        if group_id >= self._next:
            return
        foretold = self._foretold.pop(group_id)
        if foretold == prompt:
            return
        self._name(prompt)
        if foretold is not None:
            self._fork = self._draws.fork()
            for later in range(self._draws.next_group, self._next):
                self._foretell(later)

    def note_sent(self, group_id: int) -> None:
        """The group's first sample is on its way."""
        self._sent = max(self._sent, group_id)

    def take_hints(self) -> tuple[PromptRef, ...]:
        """Prompts to be made ready that were not named before."""
        while self._next <= self._sent + self._size:
            if self._next >= self._draws.next_group:
                self._foretell(self._next)
            elif self._next > self._sent:
                self._name(self._admitted[self._next])
            self._next += 1
        # they are admitted in order of their ids
        while self._admitted and (oldest := next(iter(self._admitted))) <= self._sent:
            del self._admitted[oldest]
        out, self._out = tuple(self._out), []
        return out

    def _foretell(self, group_id: int) -> None:
        if self._fork.next_group < group_id:
            self._fork = self._draws.fork()
        prompt = self._fork.foretell()
        if prompt is not None:
            self._name(prompt)
        self._foretold[group_id] = prompt

    def _name(self, prompt: PromptRef) -> None:
        """Unless it was named a moment ago."""
        if prompt in self._named:
            return
        self._named[prompt] = None
        self._out.append(prompt)
        if len(self._named) > REMEMBERED * self._size:
            del self._named[next(iter(self._named))]
