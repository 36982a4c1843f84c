"""Trajectories into rows of tokens. Numpy only; owns the alignment of every token array.

Alignment: index t of every array belongs to token t. `logprobs[t]`, `mask[t]` and the trainer's `current[t]` speak of token t
given the tokens before it in its own trajectory. The first token of a trajectory has no such probability, so it is refused as
a sampled one. The log-prob of a sampled token t is therefore always read from the model's output at place t - 1, and both lie
in the same trajectory: the last token of one never predicts the first of the next.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from telescope.maths import prefixes, routing
from telescope.records import TrainItem, Trajectory

ATTENTION_LENGTH = 24_576
"""Tokens at which attention costs as much as all the rest of a layer, where no model says it: about 12 times the hidden
size (here 2,048)."""


@dataclass(frozen=True)
class Row:
    """One packed row: trajectories `items` (indices) at `starts` with `lengths`, then padding up to `size` tokens."""

    items: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    size: int
    repeated: tuple[int, ...] = ()
    """Of each item the leading tokens that the item before it has too, which are not computed again; empty: none are."""

    @property
    def used(self) -> int:
        """Tokens before the padding."""
        return sum(self.lengths)

    @property
    def computed(self) -> int:
        """Tokens that are run through the model, without the padding."""
        return self.used - sum(self.repeated)

    @property
    def computed_size(self) -> int:
        """The same with the padding."""
        return self.size - sum(self.repeated)

    @property
    def squares(self) -> int:
        """Σ length² of what is computed, twice the pairs of tokens that attention looks at."""
        return sum(length * length for length in self.lengths) - sum(count * count for count in self.repeated)


@dataclass(frozen=True)
class RowArrays:
    """The arrays of one row of T tokens and S = items + 1 segments; the last segment is the padding, even if empty."""

    ids: np.ndarray  # [T] int64, 0 in the padding
    position_ids: np.ndarray  # [T] int64, from 0 again in each segment
    segments: np.ndarray  # [T] int64, 0..S-1
    mask: np.ndarray  # [T] bool, True where the policy sampled the token
    logprobs: np.ndarray  # [T] float32, sampling log-prob; NaN where the mask is False
    advantages: np.ndarray  # [T] float32, the rollout's; of turns at their sampled tokens, 0 at others; 0 in the padding
    sequence_tokens: np.ndarray  # [S] float32, n_i of the rollout each segment belongs to; 0 for the padding
    temperatures: np.ndarray  # [S] float64, at which each segment was sampled; 1 for the padding
    boundaries: np.ndarray  # [S + 1] int32, cumulative: segment s is boundaries[s]:boundaries[s + 1]
    routed: np.ndarray | None = None  # [T, L, K] uint8 or int16, recorded experts; None: of no token
    repeated: tuple[int, ...] = ()  # of each segment the leading tokens that the one before it has too; empty: none are


def cost(lengths: Sequence[int], *, attention_length: float = ATTENTION_LENGTH) -> float:
    """Relative cost of training a rollout whose trajectories have these lengths: tokens, and attention's square."""
    return float(sum(length + length * length / attention_length for length in lengths))


def pack(
    lengths: Sequence[int],
    *,
    seq_len: int,
    multiple: int = 1,
    rows: int = 0,
    attention_length: float = ATTENTION_LENGTH,
) -> list[Row]:
    """Rows of at most `seq_len` tokens, each padded to a multiple: as few as first-fit makes (or up to `rows`, where that is
    more), as equal in cost as two rules can make them. The costliest trajectory first, each to the cheapest row with room; or
    where that leaves one without room, or is worse, each to the first row with room. The costliest row comes first, so that
    rows of one place cost about the same on all ranks, which wait for each other layer by layer.

    Deterministic. `pack([3, 7, 5, 2, 4], seq_len=10)` has rows of 7, 5 + 2 and 3 + 4 tokens. A row's size can pass `seq_len` by
    its padding only where `multiple` does not divide it.
    """
    costs = [cost([length], attention_length=attention_length) for length in lengths]
    return [_row(items, lengths, multiple) for items in _spread(lengths, costs, seq_len, rows)]


def pack_shared(
    samples: Sequence[np.ndarray],
    groups: Sequence[int],
    *,
    seq_len: int,
    multiple: int = 1,
    rows: int = 0,
    attention_length: float = ATTENTION_LENGTH,
) -> list[Row]:
    """As `pack`, of samples' tokens, where a common beginning is computed once a row: `seq_len` bounds what is computed.
    `groups` says which samples probably begin alike; they are packed together. Items of a row are sorted by their tokens."""
    bundles = _bundles(samples, groups, seq_len)
    costs = [bundle.tokens + bundle.pairs / attention_length for bundle in bundles]
    found = []
    for members in _spread([bundle.tokens for bundle in bundles], costs, seq_len, rows):
        items, repeated = prefixes.in_order(samples, [item for member in members for item in bundles[member].items])
        row = _row(items, [len(sample) for sample in samples], 1)
        shared = tuple(repeated) if any(repeated) else ()
        found.append(replace(row, size=row.used + -(row.used - sum(shared)) % multiple, repeated=shared))
    return found


def rows_needed(lengths: Sequence[int], *, seq_len: int) -> int:
    """The fewest rows that `pack` makes. Ranks take the largest of theirs, and fill up with `filler` rows."""
    return len(_first_fit(_order(lengths, seq_len), lengths, seq_len))


def shared_rows_needed(samples: Sequence[np.ndarray], groups: Sequence[int], *, seq_len: int) -> int:
    """The same of `pack_shared`."""
    return rows_needed([bundle.tokens for bundle in _bundles(samples, groups, seq_len)], seq_len=seq_len)


def _bundles(samples: Sequence[np.ndarray], groups: Sequence[int], seq_len: int) -> list[prefixes.Bundle]:
    for item, sample in enumerate(samples):
        _check_length(item, len(sample), seq_len)
    return list(prefixes.bundles(samples, groups, seq_len))


def _order(lengths: Sequence[int], seq_len: int) -> list[int]:
    """The longest first. Refuses one that no row can hold."""
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    for item in order:
        _check_length(item, lengths[item], seq_len)
    return order


def _spread(lengths: Sequence[int], costs: Sequence[float], seq_len: int, rows: int) -> list[list[int]]:
    """Which of them share a row, the costliest row first: see `pack`."""
    order = _order(lengths, seq_len)

    def cost_of(row: Sequence[int]) -> float:
        return sum(costs[item] for item in row)

    full = _first_fit(order, lengths, seq_len)
    even = _cheapest_with_room(order, lengths, costs, seq_len, min(max(rows, len(full)), len(lengths)))
    chosen = min((way for way in (even, full) if way is not None), key=lambda way: max(map(cost_of, way), default=0.0))
    return sorted(map(sorted, chosen), key=lambda row: (-cost_of(row), row))


def _first_fit(order: Sequence[int], lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[int] = []
    for item in order:
        place = next((row for row, free in enumerate(room) if free >= lengths[item]), None)
        if place is None:
            rows.append([])
            room.append(seq_len)
            place = len(rows) - 1
        rows[place].append(item)
        room[place] -= lengths[item]
    return rows


def _cheapest_with_room(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], seq_len: int, count: int
) -> list[list[int]] | None:
    """`count` rows; None where an item finds no room in any."""
    rows: list[list[int]] = [[] for _ in range(count)]
    room = [seq_len] * count
    loads = [(0.0, row) for row in range(count)]
    for item in order:
        passed = []
        while loads and room[loads[0][1]] < lengths[item]:
            passed.append(heapq.heappop(loads))
        if not loads:
            return None
        load, row = heapq.heappop(loads)
        rows[row].append(item)
        room[row] -= lengths[item]
        for entry in (*passed, (load + costs[item], row)):
            heapq.heappush(loads, entry)
    return rows


def filler(*, multiple: int = 1) -> Row:
    """A row of padding alone: it keeps a rank in step with the others and counts for nothing."""
    return Row(items=(), starts=(), lengths=(), size=multiple)


def with_filler(rows: Sequence[Row], count: int, *, multiple: int = 1) -> list[Row]:
    """`rows` and as many filler rows as make `count`."""
    if len(rows) > count:
        raise ValueError(f"{len(rows)} rows do not fit in {count}: the count must be the largest of all ranks")
    return [*rows, *(filler(multiple=multiple) for _ in range(count - len(rows)))]


def arrange(
    row: Row, trajectories: Sequence[Trajectory], items: Sequence[TrainItem], *, dtype: DTypeLike = np.float32
) -> RowArrays:
    """The arrays of `row`, taken from all trajectories of the shard and their items. Refuses missing log-probs.

    `dtype` is that of the log-probs, advantages and token counts (float64 in exact tests).
    """
    if len(trajectories) != len(items):
        raise ValueError(f"{len(trajectories)} trajectories for {len(items)} items")
    boundaries = np.array([*row.starts, row.used, row.size], dtype=np.int32)
    arrays = _padding(row, boundaries, dtype)
    for start, index in zip(row.starts, row.items, strict=True):
        _place(arrays, start, trajectories[index], items[index])
    arrays.sequence_tokens[:-1] = [items[index].sequence_tokens for index in row.items]
    arrays.temperatures[:-1] = [items[index].temperature for index in row.items]
    routed = routing.joined(
        [*(trajectories[index].routed for index in row.items), None], [*row.lengths, row.size - row.used]
    )  # fmt: skip
    return replace(arrays, routed=routed, repeated=row.repeated)


def lay_out(row: Row, per_trajectory: Sequence[np.ndarray], *, fill: float = np.nan) -> np.ndarray:
    """Any other per-token array of the trajectories, placed as `row` places them: [T], `fill` in the padding."""
    laid = np.full(row.size, fill, per_trajectory[0].dtype if per_trajectory else np.float32)
    for start, index in zip(row.starts, row.items, strict=True):
        laid[start : start + len(per_trajectory[index])] = per_trajectory[index]
    return laid


def _check_length(item: int, length: int, seq_len: int) -> None:
    if length < 1:
        raise ValueError(f"trajectory {item} is empty")
    if length > seq_len:
        raise ValueError(
            f"trajectory {item} has {length} tokens and a packed row holds trainer.seq_len={seq_len}: "
            f"raise trainer.seq_len, or lower inference.max_model_len to at most {seq_len}"
        )


def _row(items: Sequence[int], lengths: Sequence[int], multiple: int) -> Row:
    sizes = [lengths[item] for item in items]
    *starts, used = accumulate(sizes, initial=0)
    return Row(items=tuple(items), starts=tuple(starts), lengths=tuple(sizes), size=-(-used // multiple) * multiple)


def _padding(row: Row, boundaries: np.ndarray, dtype: DTypeLike) -> RowArrays:
    sizes = np.diff(boundaries)
    return RowArrays(
        ids=np.zeros(row.size, np.int64),
        position_ids=np.arange(row.size, dtype=np.int64) - np.repeat(boundaries[:-1], sizes),
        segments=np.repeat(np.arange(len(sizes), dtype=np.int64), sizes),
        mask=np.zeros(row.size, np.bool_),
        logprobs=np.full(row.size, np.nan, dtype),
        advantages=np.zeros(row.size, dtype),
        sequence_tokens=np.zeros(len(sizes), dtype),
        temperatures=np.ones(len(sizes)),
        boundaries=boundaries,
    )


def _place(arrays: RowArrays, start: int, trajectory: Trajectory, item: TrainItem) -> None:
    mask = trajectory.mask.astype(np.bool_)
    if mask[0]:
        raise ValueError(
            f"rollout {item.rollout_id} marks its first token as sampled: nothing precedes it, so it has no "
            "probability; a trajectory begins with at least one prompt token"
        )
    missing = int((~np.isfinite(trajectory.logprobs[mask])).sum())
    if missing:
        raise ValueError(
            f"rollout {item.rollout_id} lacks the sampling log-prob of {missing} trained tokens: a missing log-prob is an "
            "error, never 0; the server must return one for each sampled token"
        )
    here = slice(start, start + len(mask))
    arrays.ids[here] = trajectory.ids
    arrays.mask[here] = mask
    arrays.logprobs[here] = np.where(mask, trajectory.logprobs, np.nan)
    if isinstance(item.turns, msgspec.UnsetType):
        arrays.advantages[here] = item.advantage
        return
    by_token = item.token_advantages
    if np.shape(by_token) != (int(mask.sum()),):
        raise ValueError(
            f"rollout {item.rollout_id} has advantages of {np.size(by_token)} tokens in its turns, and {int(mask.sum())} "
            "sampled ones"
        )
    arrays.advantages[here][mask] = by_token
