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
from telescope.records import Trajectory


def trajectories(shard: TrainShard) -> list[Trajectory]:
    """One an item, as views. Raises `ValueError` where lengths and arrays disagree."""
    lengths = [item.length for item in shard.items]
    found = {len(array) for array in (shard.ids, shard.mask, shard.logprobs, shard.versions)}
    if found != {sum(lengths)}:
        raise ValueError(f"step {shard.step}: its items have {sum(lengths)} tokens and its arrays {sorted(found)}")
    ends = np.cumsum(lengths)
    return [
        Trajectory(shard.ids[here], shard.mask[here], shard.logprobs[here], shard.versions[here])
        for here in (slice(end - length, end) for end, length in zip(ends, lengths, strict=True))
    ]


def pack(shard: TrainShard, *, seq_len: int, multiple: int) -> list[list[packing.Row]]:
    """Rows of the shard, minibatch by minibatch; their items count through the shard. A trajectory longer than `seq_len` is
    refused."""
    members: list[list[int]] = [[] for _ in shard.denominators]
    for index, item in enumerate(shard.items):
        if not 0 <= item.minibatch < len(members):
            raise ValueError(f"rollout {item.rollout_id} is of minibatch {item.minibatch}, and the step has {len(members)}")
        members[item.minibatch].append(index)
    return [_pack([shard.items[index].length for index in own], own, seq_len, multiple) for own in members]


def _pack(lengths: Sequence[int], indices: Sequence[int], seq_len: int, multiple: int) -> list[packing.Row]:
    rows = packing.pack(lengths, seq_len=seq_len, multiple=multiple)
    return [replace(row, items=tuple(indices[item] for item in row.items)) for row in rows]


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
        "row_tokens": float(sum(row.size for row in plan)),
        "rows": float(len(plan)),
        "filler_rows": float(sum(not row.items for row in plan)),
        "staleness_mean": float(lags.sum()),
        "staleness_mean#count": float(len(lags)),
    }
    return sums, {"staleness_max": float(lags.max()) if len(lags) else -math.inf}
