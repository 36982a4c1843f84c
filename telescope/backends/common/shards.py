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


def rows_needed(shard: TrainShard, *, seq_len: int) -> list[int]:
    """The fewest rows of each minibatch. A trajectory longer than `seq_len` is refused."""
    return [packing.rows_needed([shard.items[index].length for index in own], seq_len=seq_len) for own in _by_minibatch(shard)]


def pack(
    shard: TrainShard,
    *,
    seq_len: int,
    multiple: int,
    rows: Sequence[int] = (),
    attention_length: float = ATTENTION_LENGTH,
) -> list[list[packing.Row]]:
    """Rows of the shard, minibatch by minibatch; their items count through the shard. `rows`: as many as a minibatch may be
    spread over, where that is more than it needs. A trajectory longer than `seq_len` is refused."""
    members = _by_minibatch(shard)
    return [
        [
            replace(row, items=tuple(own[item] for item in row.items))
            for row in packing.pack(
                [shard.items[index].length for index in own],
                seq_len=seq_len,
                multiple=multiple,
                rows=most,
                attention_length=attention_length,
            )
        ]
        for own, most in zip(members, rows or [0] * len(members), strict=True)
    ]


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
        "packed_tokens": float(sum(row.used for row in plan)),
        "squared_tokens": float(sum(length * length for row in plan for length in row.lengths)),
        "row_tokens": float(sum(row.size for row in plan)),
        "rows": float(len(plan)),
        "filler_rows": float(sum(not row.items for row in plan)),
        "staleness_mean": float(lags.sum()),
        "staleness_mean#count": float(len(lags)),
    }
    return sums, {"staleness_max": float(lags.max()) if len(lags) else -math.inf}
