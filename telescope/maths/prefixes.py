"""Samples of a packed row that begin alike: how many tokens each repeats, and where its tokens stand once none is there twice.

Answers to one prompt begin with it, and branches of one rollout with the turns before they part. A token's hidden state in a
causal model depends on what precedes it alone, so one forward pass over the common beginning serves them all: the gradient is
the same, as a sum over samples. Numpy only. Owns the comparison and the places; which samples share a row is packing's, and
targets, masks and losses stay with the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

LEAST = 16
"""Shorter common beginnings, such as the first marks of a chat template, are not worth a longer list of keys."""


def alike(left: np.ndarray, right: np.ndarray) -> int:
    """Tokens with which both begin."""
    count = min(len(left), len(right))
    differ = np.flatnonzero(left[:count] != right[:count])
    return int(differ[0]) if len(differ) else count


def in_order(samples: Sequence[np.ndarray], items: Sequence[int]) -> tuple[list[int], list[int]]:
    """(The items sorted by their tokens, of each the leading tokens that the one before it has too). Sorted so, samples with a
    common beginning are neighbours, and each repeats as much as it can.

    `in_order([[1, 2, 3], [9], [1, 2, 4]], [0, 1, 2])` is ([0, 2, 1], [0, 2, 0]), were `LEAST` not above 2."""
    ordered = sorted(items, key=lambda item: (samples[item].astype(">i8").tobytes(), item))
    before = [None, *ordered[:-1]]
    counts = [0 if last is None else alike(samples[last], samples[item]) for last, item in zip(before, ordered, strict=True)]
    return ordered, [count if count >= LEAST else 0 for count in counts]


@dataclass(frozen=True)
class Bundle:
    """Samples that are packed together, as they begin alike."""

    items: tuple[int, ...]
    tokens: int
    """Without those that are repeated."""
    pairs: int
    """Σ length² less Σ repeated², twice the pairs of tokens that attention looks at."""


def bundles(samples: Sequence[np.ndarray], groups: Sequence[int], seq_len: int) -> Iterator[Bundle]:
    """The samples of each group, cut where more than `seq_len` tokens would be computed. The first of a bundle repeats
    nothing."""
    members: dict[int, list[int]] = {}
    for item, group in enumerate(groups):
        members.setdefault(group, []).append(item)
    for own in members.values():
        here: list[int] = []
        tokens = pairs = 0
        for item, repeated in zip(*in_order(samples, own), strict=True):
            length = len(samples[item])
            if here and tokens + length - repeated > seq_len:
                yield Bundle(tuple(here), tokens, pairs)
                here, tokens, pairs, repeated = [], 0, 0, 0
            here.append(item)
            tokens += length - repeated
            pairs += length * length - repeated * repeated
        yield Bundle(tuple(here), tokens, pairs)


def places(boundaries: np.ndarray, repeated: Sequence[int]) -> np.ndarray:
    """[T] int64: of each token of a row its place among the U tokens that are computed, in the order of the row; of a repeated
    one that of the token it repeats. Sample s is tokens boundaries[s] to boundaries[s + 1], and its first repeated[s] ones are
    those of the sample before it; beyond the list none are."""
    found = np.empty(int(boundaries[-1]), np.int64)
    new = 0
    for sample, (start, end) in enumerate(zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True)):
        count = repeated[sample] if sample < len(repeated) else 0
        if count:
            before = int(boundaries[sample - 1])
            if count > min(start - before, end - start):
                raise ValueError(
                    f"sample {sample} of {end - start} tokens repeats {count} of {start - before}: no such beginning"
                )
            found[start : start + count] = found[before : before + count]
        found[start + count : end] = np.arange(new, new + end - start - count)
        new += end - start - count
    return found


def computed(boundaries: np.ndarray, repeated: Sequence[int]) -> np.ndarray:
    """[U] int64: the row's tokens that are computed, each the first of its kind."""
    fresh = np.ones(int(boundaries[-1]), np.bool_)
    for start, count in zip(boundaries.tolist(), repeated, strict=False):
        fresh[start : start + count] = False
    return np.flatnonzero(fresh)
