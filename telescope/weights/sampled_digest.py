"""A checksum that is computed where the weights lie, on a GPU or on a CPU, with the same digits on both. Imports torch.

Owns which tensors of a version are drawn for it and how their bytes become 64 bits. It guards against stale, torn, swapped and
misplaced data, not against forgers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from telescope.records import TensorSpec

DRAWN = 16
"""Tensors that are compared at each version; which ones turns with the version, so that all have their turn."""
WORDS_AT_ONCE = 1 << 22
"""Of 8 bytes. A drawn tensor larger than this is looked at in so many words, evenly spread; a whole one in pieces of it."""
TOGETHER = 1 << 21
"""Words of small tensors that go through the same operators: a launch costs the host more than their sums cost a GPU."""
POSITION, SPREAD = -7046029254386353131, -4658895280553007687
"""Odd constants (2^64 over the golden ratio; splitmix64's second multiplier), as signed numbers."""


class SampledDigest:
    """What of a version is compared, and what was found of it so far: a side adds bucket by bucket, in order."""

    def __init__(self, specs: Sequence[TensorSpec], version: int, *, everything: bool, device: torch.device) -> None:
        chosen = specs if everything else drawn(specs, version)
        self.specs = tuple(spec for spec in chosen if spec.nbytes)  # what is empty lies in no piece
        self._whole, self._device = everything, device
        self._places: Tensor | None = None
        self._found: list[Tensor] = []

    def add(self, data: Tensor, start: int = 0) -> None:
        """The bytes of the layout from `start` on, as many as `data` has. Queued on the device, not waited for."""
        inside = [spec for spec in self.specs if start <= spec.offset < start + data.numel()]
        if inside:
            if self._places is None:
                self._places = _places(self.specs, data.device)
            self._found.append(_sums(data, inside, self._places, whole=self._whole, start=start))

    @property
    def sums(self) -> Tensor:
        """[n] int64 on the device, of the tensors of `specs` that were added: their digests less their lengths, which both
        sides know."""
        return torch.cat(self._found) if self._found else torch.zeros(0, dtype=torch.int64, device=self._device)

    def text(self, sums: Tensor | None = None) -> str:
        """Of all that was added. Waits for the device, unless its `sums` were fetched into host memory already."""
        here = self.sums.cpu() if sums is None else sums
        return text(here + _lengths(self.specs[: here.numel()]), whole=self._whole)


def drawn(specs: Sequence[TensorSpec], version: int, count: int = DRAWN) -> tuple[TensorSpec, ...]:
    """The tensors whose bytes are compared at a version: evenly spread over the layout, in its order."""
    if len(specs) <= count:
        return tuple(specs)
    places = {(number * len(specs) // count + version) % len(specs) for number in range(count)}
    return tuple(specs[place] for place in sorted(places))


def digests(data: Tensor, specs: Sequence[TensorSpec], *, whole: bool = False, start: int = 0) -> Tensor:
    """[len(specs)] int64: 64 bits of each tensor within flat bytes [n] uint8, whose first one has the offset `start` in the
    layout. On the device of `data`, not waited for.

    The digest of a tensor is its length in bytes plus the sum of its words of 8 bytes, each stirred with its place, counted
    from 1; odd bytes at its end are one more word, at place 0. `whole`: all words, else `WORDS_AT_ONCE` at most. Integers wrap
    around alike everywhere, so the order in which a device adds does not matter.
    """
    if not specs:
        return torch.zeros(0, dtype=torch.int64, device=data.device)
    found = _sums(data, specs, _places(specs, data.device), whole=whole, start=start)
    return found + _lengths(specs).to(data.device)


def text(values: Tensor, *, whole: bool = False) -> str:
    """Many digests as one word, e.g. `sample:08f1c2…`, or `all:…` where every byte counts. Waits for the device."""
    combined = _mixed(values.cpu(), 1)
    return f"{'all' if whole else 'sample'}:{int(combined) & (1 << 64) - 1:016x}"


def _lengths(specs: Sequence[TensorSpec]) -> Tensor:
    return torch.tensor([spec.nbytes for spec in specs], dtype=torch.int64)


def _most() -> int:
    """Words of a tensor, and of several together, that are looked at in one go."""
    return min(TOGETHER, WORDS_AT_ONCE)


def _places(specs: Sequence[TensorSpec], device: torch.device) -> Tensor:
    """What words are stirred with, from place 0 on, as many as the longest of the small tensors has."""
    longest = max((count for spec in specs if (count := spec.nbytes // 8) <= _most()), default=0)
    return torch.arange(longest + 1, dtype=torch.int64, device=device).mul_(POSITION)


def _sums(data: Tensor, specs: Sequence[TensorSpec], places: Tensor, *, whole: bool, start: int) -> Tensor:
    """See `SampledDigest.sums`. Small tensors one after another are looked at together."""
    every = data[: data.numel() // 8 * 8].view(torch.int64)
    found: list[Tensor] = []
    together: list[tuple[Tensor, ...]] = []
    held = 0
    for spec in specs:
        first, odd = divmod(spec.offset - start, 8)
        if odd:
            raise ValueError(f"tensor {spec.name} begins at byte {spec.offset}, which is not a multiple of 8")
        count = spec.nbytes // 8
        pieces = (every[first : first + count], *_tail(data[spec.offset - start :], spec.nbytes))
        if together and held + count > _most():
            found.append(_sums_together(together, places))
            together, held = [], 0
        if count > _most():
            found.append(_sum_alone(*pieces, whole=whole))
        else:
            together.append(pieces)
            held += count
    if together:
        found.append(_sums_together(together, places))
    return found[0] if len(found) == 1 else torch.cat(found)


def _tail(data: Tensor, nbytes: int) -> tuple[Tensor, ...]:
    """The odd bytes behind a tensor's whole words, as one word; nothing where there are none."""
    odd = nbytes % 8
    if not odd:
        return ()
    tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
    tail[:odd] = data[nbytes - odd : nbytes]
    return (tail.view(torch.int64),)


def _sums_together(tensors: Sequence[tuple[Tensor, ...]], places: Tensor) -> Tensor:
    """[len(tensors)]: of the whole words of each tensor, and of its odd bytes if it has any."""
    words, stir, ends = [], [], [0]
    for whole, *tail in tensors:
        words += [whole, *tail]
        stir += [places[1 : 1 + whole.numel()], *(places[:1] for _ in tail)]
        ends.append(ends[-1] + whole.numel() + len(tail))
    if len(words) == 1:
        return _spread(torch.bitwise_xor(stir[0], words[0])).sum().view(1)
    sums = _spread(torch.cat(stir).bitwise_xor_(torch.cat(words))).cumsum(0)
    until = torch.cat([sums[end - 1 : end] if end else places[:1] for end in ends])  # what place 0 is stirred with is 0
    return until[1:] - until[:-1]


def _sum_alone(words: Tensor, *tail: Tensor, whole: bool) -> Tensor:
    """[1]: of a tensor of any length."""
    stride = 1 if whole else max(1, -(-words.numel() // WORDS_AT_ONCE))
    words = words[::stride]
    starts = range(0, words.numel(), WORDS_AT_ONCE)
    total, *others = [_mixed(words[start : start + WORDS_AT_ONCE], start + 1) for start in starts]
    for other in (*others, *(_mixed(word, 0) for word in tail)):
        total += other
    return total.view(1)


def _mixed(words: Tensor, first: int) -> Tensor:
    """The sum of words [n] int64, each stirred with its place, which counts from `first`."""
    places = torch.arange(first, first + words.numel(), dtype=torch.int64, device=words.device)
    return _spread(places.mul_(POSITION).bitwise_xor_(words)).sum()


def _spread(mixed: Tensor) -> Tensor:
    """In place: every bit of a word moves the others."""
    mixed.mul_(SPREAD)
    mixed.bitwise_xor_(mixed >> 29).mul_(POSITION)
    return mixed.bitwise_xor_(mixed >> 32)
