"""A rank's shard of a step: its trajectories, packed rows and host-side numbers. Numpy only.

Owns how a shard is taken apart; the alignment of tokens, targets and padding is `maths.packing`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from telescope.backends.base import TrainShard
from telescope.maths import packing
from telescope.maths.packing import ATTENTION_LENGTH
from telescope.records import Trajectory


def trajectories(shard: TrainShard) -> list[Trajectory]:
    """One an item, as views. Raises `ValueError` where lengths and arrays disagree."""
    lengths = [item.length for item in shard.items]
    found = {len(array) for array in shard.arrays}
    if found != {sum(lengths)}:
        raise ValueError(f"step {shard.step}: its items have {sum(lengths)} tokens and its arrays {sorted(found)}")
    ends = np.cumsum(lengths)
    return [
        Trajectory(*(array[here] for array in shard.arrays))
        for here in (slice(end - length, end) for end, length in zip(ends, lengths, strict=True))
    ]


def rows_needed(shard: TrainShard, *, seq_len: int, share_prefixes: bool = False) -> list[int]:
    """The fewest rows of each minibatch. A trajectory longer than `seq_len` is refused."""
    members = _by_minibatch(shard)
    if share_prefixes:
        return [packing.shared_rows_needed(*_samples(shard, own), seq_len=seq_len) for own in members]
    return [packing.rows_needed(_lengths(shard, own), seq_len=seq_len) for own in members]


def pack(
    shard: TrainShard,
    *,
    seq_len: int,
    multiple: int,
    rows: Sequence[int] = (),
    attention_length: float = ATTENTION_LENGTH,
    share_prefixes: bool = False,
) -> list[list[packing.Row]]:
    """Rows of the shard, minibatch by minibatch; their items count through the shard. `rows`: as many as a minibatch may be
    spread over, where that is more than it needs. A trajectory longer than `seq_len` is refused. `share_prefixes`: what
    trajectories of a row have in common is computed once."""
    members = _by_minibatch(shard)
    plans = []
    for own, most in zip(members, rows or [0] * len(members), strict=True):
        if share_prefixes:
            samples, groups = _samples(shard, own)
            plan = packing.pack_shared(
                samples, groups, seq_len=seq_len, multiple=multiple, rows=most, attention_length=attention_length
            )  # fmt: skip
        else:
            plan = packing.pack(
                _lengths(shard, own), seq_len=seq_len, multiple=multiple, rows=most, attention_length=attention_length
            )
        plans.append([replace(row, items=tuple(own[item] for item in row.items)) for row in plan])
    return plans


def _lengths(shard: TrainShard, own: Sequence[int]) -> list[int]:
    return [shard.items[index].length for index in own]


def _samples(shard: TrainShard, own: Sequence[int]) -> tuple[list[np.ndarray], list[int]]:
    """Tokens and group of each."""
    ends = np.cumsum([item.length for item in shard.items])
    ids = [shard.ids[ends[index] - shard.items[index].length : ends[index]] for index in own]
    return ids, [shard.items[index].group_id for index in own]


def _by_minibatch(shard: TrainShard) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in shard.denominators]
    for index, item in enumerate(shard.items):
        if not 0 <= item.minibatch < len(members):
            raise ValueError(f"rollout {item.rollout_id} is of minibatch {item.minibatch}, and the step has {len(members)}")
        members[item.minibatch].append(index)
    return members


def staleness(shard: TrainShard) -> np.ndarray:
    """Versions between the one that sampled a trained token and the one it trains, e.g. 0 for version 4 in step 5."""
    lags: np.ndarray = shard.step - 1 - shard.versions[shard.mask.astype(bool)]
    return lags


def host_metrics(shard: TrainShard, plan: Sequence[packing.Row]) -> tuple[dict[str, float], dict[str, float]]:
    """This rank's sums and peaks, to be joined over ranks; names are those of `maths.metrics`."""
    lags = staleness(shard)
    sums = {
        "trained_tokens": float(len(lags)),
        "packed_tokens": float(sum(row.computed for row in plan)),
        "squared_tokens": float(sum(row.squares for row in plan)),
        "row_tokens": float(sum(row.computed_size for row in plan)),
        "rows": float(len(plan)),
        "filler_rows": float(sum(not row.items for row in plan)),
        "staleness_mean": float(lags.sum()),
        "staleness_mean#count": float(len(lags)),
    }
    return sums, {"staleness_max": float(lags.max()) if len(lags) else -math.inf}
