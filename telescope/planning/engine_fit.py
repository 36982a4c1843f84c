"""From a run's requests to the times of an engine's steps. Rows of `turns` and `weights` in, numbers out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import msgspec
import numpy as np

from telescope.planning.latencies import EngineTimes

SHARE_LIMIT = 0.9
ALONE = 4.0
"""Sequences in a step, itself included, that take no longer than one."""
FEWEST_ALONE = 5
NOTHING = 1e-12


class TimeOverlap:
    """The integral over time of what is in progress: `over(a, b)` is the mean of all weights of intervals, from a to b."""

    def __init__(self, intervals: Sequence[tuple[float, float, float]]) -> None:
        """(from, to, weight) each."""
        edges = sorted([(start, weight) for start, _, weight in intervals] + [(end, -weight) for _, end, weight in intervals])
        self._times = [0.0]
        self._levels = [0.0]
        self._sums = [0.0]
        level = total = before = 0.0
        for at, change in edges:
            total += level * (at - before)
            level, before = level + change, at
            self._times.append(at)
            self._levels.append(level)
            self._sums.append(total)

    def over(self, start: float, end: float) -> float:
        return (self._until(end) - self._until(start)) / max(end - start, 1e-9)

    def _until(self, at: float) -> float:
        index = max(bisect_right(self._times, at) - 1, 0)
        return self._sums[index] + self._levels[index] * (at - self._times[index])


class FittedEngine(msgspec.Struct, frozen=True):
    """What requests say of their engines."""

    times: EngineTimes
    shared_share: float
    error: float
    """Mean absolute error of a request's time, as a share of the mean time."""
    steps: dict[str, float]
    """Engine steps that each request accounts for: its tokens, shared with the sequences beside it."""


def fit_engine(
    turns: Sequence[Mapping[str, Any]],
    pauses: Sequence[Mapping[str, Any]],
    training: Sequence[tuple[float, float, float]],
    *,
    kv_tokens: float,
    max_seqs: int,
) -> FittedEngine:
    """`turns`: finished requests, one at least, each with a token at least. `training`: when the trainer worked, in seconds
    since the first request was placed.

    Least squares over the requests, no coefficient below 0: what a request took against its tokens, alone and times the
    sequences and the cached tokens beside it, the prompts that its server read meanwhile, and the trainer's work beside it."""
    origin = min(row["placed_ns"] for row in turns)

    def ends(row: Mapping[str, Any]) -> tuple[float, float]:
        end = (row["done_ns"] - origin) / 1e9
        return max(0.0, end - row["generated_s"]), end

    trainer = TimeOverlap(training)
    features: list[list[float]] = []
    took: list[float] = []
    steps: dict[str, float] = {}
    for name in sorted({row["server"] for row in turns}):
        mine = [row for row in turns if row["server"] == name]
        beside = TimeOverlap([(*ends(row), 1.0) for row in mine])
        cached = TimeOverlap([(*ends(row), row["prompt_tokens"] + row["completion_tokens"] / 2) for row in mine])
        still = TimeOverlap([_pause(row, origin) for row in pauses if row["server"] == name])
        read = sorted((ends(row)[0], max(1, row["prompt_tokens"] - row["cached_tokens"])) for row in mine)
        starts, prompts = [at for at, _ in read], np.cumsum([0, *(tokens for _, tokens in read)])
        for row in mine:
            start, end = ends(row)
            tokens = float(row["completion_tokens"])
            reads = float(prompts[bisect_right(starts, end)] - prompts[bisect_right(starts, start - 1e-6)])
            took.append(max(0.0, row["generated_s"] - still.over(start, end) * (end - start)))
            steps[row["request_id"]] = tokens / max(1.0, beside.over(start, end))
            features.append(
                [tokens, tokens * beside.over(start, end), tokens * cached.over(start, end), reads,
                 tokens * min(1.0, trainer.over(start, end))]
            )  # fmt: skip
    found = _fit(np.array(features), np.array(took))
    step_s, sequence_s, kv_token_s, prefill_token_s, beside_training_s = found
    fitted = np.array(features) @ np.array(found)
    base = float((np.array(features)[:, :3] @ np.array(found[:3])).sum() / np.array(features)[:, 0].sum())
    shared = min(beside_training_s / max(base + beside_training_s, 1e-12), SHARE_LIMIT)
    times = EngineTimes(
        step_s=max(step_s, 1e-9),
        sequence_s=sequence_s,
        kv_token_s=kv_token_s,
        prefill_token_s=prefill_token_s,
        kv_tokens=kv_tokens,
        max_seqs=max_seqs,
    )
    error = float(np.abs(fitted - took).mean() / max(np.mean(took), 1e-12))
    return FittedEngine(times, shared, error, steps)


def _pause(row: Mapping[str, Any], origin: int) -> tuple[float, float, float]:
    end = (row["ended_ns"] - origin) / 1e9
    return end - row["pause_s"], end, 1.0


def _fit(features: np.ndarray, took: np.ndarray) -> list[float]:
    """A step's own time is what requests saw that ran nearly alone, where some did: least squares would not find it among all
    the others, which fill and empty a crowded server at each train step."""
    per_token, beside = took / features[:, 0], features[:, 1] / features[:, 0]
    alone = beside < ALONE
    if alone.sum() < FEWEST_ALONE:
        return least_squares(features, took)
    step_s = float(np.quantile(per_token[alone], 0.25))  # other work on the machine only ever adds
    return [step_s, *least_squares(features[:, 1:], took - step_s * features[:, 0])]


def least_squares(features: np.ndarray, values: np.ndarray) -> list[float]:
    """The coefficients of 0 or more [columns] with the smallest squared error. Columns that can't be told apart have equal
    shares of what they explain together; one of (nearly) zeros has none.

    The best ones are the plain least squares of the columns that are above 0 in them, so that all sets of these few columns are
    tried, on the triangle of their QR decomposition rather than on the rows."""
    largest = np.abs(features).max(axis=0)
    columns = [column for column in range(features.shape[1]) if largest[column] > NOTHING]
    result = [0.0] * features.shape[1]
    if not columns:
        return result
    scale = largest[columns]
    orthogonal, triangle = np.linalg.qr(features[:, columns] / scale)
    target, least, best = orthogonal.T @ values, float("inf"), np.zeros(len(columns))
    for kept in _subsets(len(columns)):
        found = np.zeros(len(columns))
        found[kept] = np.linalg.lstsq(triangle[:, kept], target, rcond=1e-9)[0] if kept else 0.0
        error = float(((triangle @ found - target) ** 2).sum())
        if (found >= 0).all() and error < least:
            least, best = error, found
            if len(kept) == len(columns):
                break  # none of them is better than all
    for place, column in enumerate(columns):
        result[column] = float(best[place] / scale[place])
    return result


def _subsets(count: int) -> Iterator[list[int]]:
    """Of so many columns, the largest sets first."""
    for size in range(count, -1, -1):
        yield from map(list, combinations(range(count), size))
