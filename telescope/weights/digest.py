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
POSITION, SPREAD = -7046029254386353131, -4658895280553007687
"""Odd constants (2^64 over the golden ratio; splitmix64's second multiplier), as signed numbers."""


class Sample:
    """What of a version is compared, and what was found of it so far: a side adds bucket by bucket, in order."""

    def __init__(self, specs: Sequence[TensorSpec], version: int, *, everything: bool, device: torch.device) -> None:
        self.specs = tuple(specs) if everything else drawn(specs, version)
        self._whole = everything
        self._found = [torch.zeros(0, dtype=torch.int64, device=device)]

    def add(self, data: Tensor, start: int = 0) -> None:
        """The bytes of the layout from `start` on, as many as `data` has. Queued on the device, not waited for."""
        inside = [spec for spec in self.specs if start <= spec.offset < start + data.numel()]
        self._found.append(digests(data, inside, whole=self._whole, start=start))

    @property
    def digests(self) -> Tensor:
        """[n] int64 of the tensors of `specs` that were added."""
        return torch.cat(self._found)

    def text(self) -> str:
        return text(self.digests, whole=self._whole)


def drawn(specs: Sequence[TensorSpec], version: int, count: int = DRAWN) -> tuple[TensorSpec, ...]:
    """The tensors whose bytes are compared at a version: evenly spread over the layout, in its order."""
    if len(specs) <= count:
        return tuple(specs)
    places = {(number * len(specs) // count + version) % len(specs) for number in range(count)}
    return tuple(specs[place] for place in sorted(places))


def digest(data: Tensor, *, whole: bool = False) -> Tensor:
    """64 bits (0-dim int64, on the device of `data`, not waited for) of bytes [n] uint8 that begin at a multiple of 8.

    `whole`: every word of it, else `WORDS_AT_ONCE` at most. Integers wrap around alike everywhere, so the order in which a
    device adds does not matter.
    """
    full = data.numel() // 8 * 8
    words = data[:full].view(torch.int64)
    stride = 1 if whole else max(1, -(-words.numel() // WORDS_AT_ONCE))
    words = words[::stride]
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), WORDS_AT_ONCE):
        total += _mixed(words[start : start + WORDS_AT_ONCE], start + 1)
    if full < data.numel():
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: data.numel() - full] = data[full:]
        total += _mixed(tail.view(torch.int64), 0)
    return total


def digests(data: Tensor, specs: Sequence[TensorSpec], *, whole: bool = False, start: int = 0) -> Tensor:
    """[len(specs)] int64: of each tensor within flat bytes, whose first one has the offset `start` in the layout."""
    found = [digest(data[spec.offset - start :][: spec.nbytes], whole=whole) for spec in specs]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=data.device)


def text(values: Tensor, *, whole: bool = False) -> str:
    """Many digests as one word, e.g. `sample:08f1c2…`, or `all:…` where every byte counts. Waits for the device."""
    combined = _mixed(values, 1)
    return f"{'all' if whole else 'sample'}:{int(combined.cpu()) & (1 << 64) - 1:016x}"


def _mixed(words: Tensor, first: int) -> Tensor:
    """The sum of words [n] int64, each stirred with its place, which counts from `first`."""
    mixed = torch.arange(first, first + words.numel(), dtype=torch.int64, device=words.device)
    mixed.mul_(POSITION).bitwise_xor_(words).mul_(SPREAD)
    mixed.bitwise_xor_(mixed >> 29).mul_(POSITION)
    mixed.bitwise_xor_(mixed >> 32)
    return mixed.sum()
