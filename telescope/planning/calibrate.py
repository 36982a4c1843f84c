"""Latencies from a run that was: its journal, turns and weight updates become a `flow.latency.Load`. Reads; decides nothing.

    journal   Run → first TurnStarted, TurnDone → next TurnStarted or RolloutDone, Train → StepDone, Update → UpdateDone, fates
    turns     what each request took on its server, and how many ran beside it
    weights   pauses of the servers
    step_metrics   which part of a train step grows with its tokens

docs/planning.md says how each number is fitted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.latency import EngineTimes, Load, Spread, constant, empirical
from telescope.flow.replay import JournalDamaged, decode_line, decode_opening
from telescope.flow.settings import FlowSettings
from telescope.runlog.journal import journal_lines
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows

WARM_UP_STEPS = 2
"""Left out where more than twice as many follow: the first ones load kernels and grow buffers."""
TOKEN_SPANS = ("forward", "backward", "loss_computation", "compute_old_logprobs", "compute_kl", "data_to_device")
"""Parts of a train step that grow with its tokens, as `timing_<name>_total` of the step metrics."""
SHARE_LIMIT = 0.9


class Uncalibratable(ValueError):
    """The run directory does not say enough; the message says what is missing."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What a run says about itself."""

    load: Load
    settings: FlowSettings
    step_s: float
    """Median of its step times, to compare with a simulation of the same configuration."""
    steps: int
    turns: int
    error: float
    """Mean absolute error of the fitted time of a request, as a share of the mean time."""


class _Job(msgspec.Struct, frozen=True):
    """Something a worker did: from when it could, to when it was seen."""

    since: float
    done: float
    scores: bool


@dataclass
class _Journal:
    """Times (seconds of the core's clock) and facts, by what they are about."""

    runs: dict[tuple[int, int], tuple[float, str]] = field(default_factory=dict)
    started: set[tuple[int, int]] = field(default_factory=set)
    placed: dict[str, float] = field(default_factory=dict)
    turn_ends: dict[int, float] = field(default_factory=dict)
    between_s: list[float] = field(default_factory=list)
    jobs: dict[str, list[_Job]] = field(default_factory=dict)
    prompts: list[int] = field(default_factory=list)
    turns: dict[int, int] = field(default_factory=dict)
    turns_of_scored: list[int] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    trains: dict[int, tuple[float, int]] = field(default_factory=dict)
    trained: dict[int, float] = field(default_factory=dict)
    updates: dict[int, float] = field(default_factory=dict)
    synced: list[float] = field(default_factory=list)
    complete: int = 0
    discarded: int = 0
    generation_began: float = 0.0

    def take(self, now: float, event: seen.AnyEvent, ordered: Iterable[do.AnyCommand]) -> None:
        match event:
            case seen.WorkerJoined() | seen.ServerJoined():
                self.generation_began = now
            case seen.TurnStarted(rollout_id=rollout_id, attempt=attempt, turn=0):
                self._worked(now, (rollout_id, attempt), None)
            case seen.TurnStarted(rollout_id=rollout_id) if rollout_id in self.turn_ends:
                self.between_s.append(now - self.turn_ends[rollout_id])
            case seen.TurnDone(rollout_id=rollout_id):
                self.turn_ends[rollout_id] = now
                self.turns[rollout_id] = self.turns.get(rollout_id, 0) + 1
            case seen.RolloutDone(rollout_id=rollout_id, attempt=attempt, prompt_tokens=prompt, completion_tokens=completion):
                self.tokens[rollout_id] = prompt + completion
                self.prompts.append(prompt)
                self.turns_of_scored.append(self.turns.pop(rollout_id, 1))
                self._worked(now, (rollout_id, attempt), self.turn_ends.pop(rollout_id, None))
            case seen.StepDone(step=step):
                self.trained.setdefault(step, now)
            case seen.UpdateDone(version=version) if version in self.updates:
                self.synced.append(now - self.updates.pop(version))
        for command in ordered:
            self._take_command(now, command)

    def _worked(self, now: float, key: tuple[int, int], since: float | None) -> None:
        """A start (since the order), or a score since the last token. The first of each counts."""
        known = self.runs.get(key)
        if known is not None and (since is not None or key not in self.started):
            self.started.add(key)
            self.jobs.setdefault(known[1], []).append(_Job(known[0] if since is None else since, now, since is not None))

    def _take_command(self, now: float, command: do.AnyCommand) -> None:
        match command:
            case do.Run(worker=worker, order=order):
                self.runs[order.rollout_id, order.attempt] = now, worker
            case do.Place(request_id=request_id):
                self.placed[request_id] = now
            case do.Train(step=step, rollout_ids=groups):
                self.trains[step] = now, sum(self.tokens.get(rollout_id, 0) for group in groups for rollout_id in group)
            case do.Update(version=version):
                self.updates.setdefault(version, now)
            case do.GroupState(state="complete"):
                self.complete += 1
            case do.GroupState(state="discarded"):
                self.discarded += 1


def calibrate(
    run: RunDirectory, *, ranks: int, epochs: int = 1, kv_tokens: float = float("inf"), max_seqs: int = 1_000_000
) -> Calibration:
    """Fit a run's latencies. `ranks` and `epochs` (a batch): of its trainer; `kv_tokens`, `max_seqs`: what one of its servers
    holds.

    Raises `Uncalibratable` with a sentence, or OSError where the directory can't be read.
    """
    settings, journal = _read(run)
    turns = [row for row in rows(run, "turns") if row.get("completion_tokens") and row["finish_reason"] != "abort"]
    pauses = [row for row in rows(run, "weights") if row["phase"] == "committed"]
    if not turns or len(journal.trained) < 2:
        raise Uncalibratable(
            f"{run.path} holds {len(turns)} finished requests and {len(journal.trained)} trained steps: a calibration needs "
            "requests and two steps at least; let the run go on for longer"
        )
    times, shared, error = _engine(turns, pauses, journal, kv_tokens, max_seqs)
    train_step_s, train_token_s = _training(journal, rows(run, "step_metrics"), ranks)
    start_s, score_s, dispatch_s, handed_in_s = _working(journal.jobs)
    pause_s = fmean(row["pause_s"] for row in pauses) if pauses else 0.0
    sync_s = median(journal.synced) if journal.synced else 0.0
    answers = [(row["done_ns"] - row["placed_ns"]) / 1e9 - row["queued_s"] - row["generated_s"] for row in turns]
    load = Load(
        prompt_tokens=empirical(journal.prompts or [row["prompt_tokens"] for row in turns]),
        completion_tokens=empirical([row["completion_tokens"] for row in turns]),
        turns=empirical(journal.turns_of_scored) if journal.turns_of_scored else constant(1),
        engine=times,
        dispatch_s=constant(dispatch_s),
        start_s=start_s,
        request_s=max(0.0, median(answers)),
        environment_s=empirical(journal.between_s) if journal.between_s else constant(0),
        reward_s=_rewards(run, handed_in_s),
        score_s=score_s,
        train_step_s=train_step_s,
        train_token_s=train_token_s / epochs,
        sync_s=sync_s,
        pause_s=min(pause_s, sync_s),
        shared_share=shared,
        equal_share=min(journal.discarded / max(journal.complete, 1), 0.95),
    )
    return Calibration(
        load=load, settings=settings, step_s=_step_s(journal), steps=len(journal.trained), turns=len(turns), error=error
    )


def _read(run: RunDirectory) -> tuple[FlowSettings, _Journal]:
    lines = journal_lines(run.journal)
    opening = next(lines, None)
    if opening is None:
        raise Uncalibratable(f"{run.journal} is empty: the run ended before it decided anything")
    journal = _Journal()
    try:
        settings = decode_opening(opening)
        for number, text in enumerate(lines, start=2):
            line = decode_line(text, number)
            journal.take(line.now, line.event, line.commands)
    except JournalDamaged as error:
        raise Uncalibratable(f"{run.journal}: {error}") from error
    return settings, journal


def _step_s(journal: _Journal) -> float:
    ends = [journal.generation_began, *(journal.trained[step] for step in sorted(journal.trained))]
    return median(b - a for a, b in pairwise(ends))


# ---- workers


def _rewards(run: RunDirectory, handed_in_s: float) -> Spread:
    """What the environment took from the last token to the reward, by the worker's clock: lines of waiting are not in it. And
    what else lies between the two, `handed_in_s` with the reward's own time: the way there and back."""
    took = [
        (row["scored_ns"] - row["generated_ns"]) / 1e9
        for row in rows(run, "rollouts")
        if row["status"] == "scored" and row.get("generated_ns")
    ]
    if not took:
        return constant(handed_in_s)
    way_s = max(0.0, handed_in_s - median(took))
    return empirical([max(0.0, seconds) + way_s for seconds in took])


def _working(jobs: Mapping[str, list[_Job]]) -> tuple[float, float, float, float]:
    """A worker's own seconds to start and to score a rollout, and what else each takes: from order to request, from last token
    to the rollout's end.

    The own time is seen where work had piled up: the mean distance of what came out one after another. What is left
    when that line is played again is the rest (its median: most of it is one and the same wait for a busy machine).
    """
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for line in jobs.values():
        line.sort(key=lambda job: job.done)
        for before, job in pairwise(line):
            if job.since < before.done:
                gaps[job.scores].append(job.done - before.done)
    own = {scores: fmean(found) if found else 0.0 for scores, found in gaps.items()}
    rest: dict[bool, list[float]] = {False: [], True: []}
    for line in jobs.values():
        free = 0.0
        for job in sorted(line, key=lambda job: job.since):
            free = max(free, job.since) + own[job.scores]
            rest[job.scores].append(max(0.0, job.done - free))
    middle = {scores: median(found) if found else 0.0 for scores, found in rest.items()}
    return own[False], own[True], middle[False], middle[True]


# ---- servers


class _Sum:
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


def _engine(
    turns: Sequence[Mapping[str, Any]],
    pauses: Sequence[Mapping[str, Any]],
    journal: _Journal,
    kv_tokens: float,
    max_seqs: int,
) -> tuple[EngineTimes, float, float]:
    """Least squares over the requests, no coefficient below 0: what a request took against its tokens, alone and times the
    sequences and the cached tokens beside it, the prompts that its server read meanwhile, and the trainer's work beside it."""
    origin = min(row["placed_ns"] for row in turns)

    def ends(row: Mapping[str, Any]) -> tuple[float, float]:
        end = (row["done_ns"] - origin) / 1e9
        return max(0.0, end - row["generated_s"]), end

    trainer = _Sum(_training_intervals(journal, turns, origin))
    features: list[list[float]] = []
    took: list[float] = []
    for name in sorted({row["server"] for row in turns}):
        mine = [row for row in turns if row["server"] == name]
        beside = _Sum([(*ends(row), 1.0) for row in mine])
        cached = _Sum([(*ends(row), row["prompt_tokens"] + row["completion_tokens"] / 2) for row in mine])
        still = _Sum([_pause(row, origin) for row in pauses if row["server"] == name])
        read = sorted((ends(row)[0], max(1, row["prompt_tokens"] - row["cached_tokens"])) for row in mine)
        starts, prompts = [at for at, _ in read], np.cumsum([0, *(tokens for _, tokens in read)])
        for row in mine:
            start, end = ends(row)
            tokens = float(row["completion_tokens"])
            reads = float(prompts[bisect_right(starts, end)] - prompts[bisect_right(starts, start - 1e-6)])
            took.append(max(0.0, row["generated_s"] - still.over(start, end) * (end - start)))
            features.append(
                [tokens, tokens * beside.over(start, end), tokens * cached.over(start, end), reads,
                 tokens * min(1.0, trainer.over(start, end))]
            )  # fmt: skip
    found = _least_squares(np.array(features), np.array(took))
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
    return times, shared, float(np.abs(fitted - took).mean() / max(np.mean(took), 1e-12))


def _pause(row: Mapping[str, Any], origin: int) -> tuple[float, float, float]:
    end = (row["ended_ns"] - origin) / 1e9
    return end - row["pause_s"], end, 1.0


def _training_intervals(journal: _Journal, turns: Sequence[Mapping[str, Any]], origin: int) -> list[tuple[float, float, float]]:
    """When the trainer worked, on the wall clock of the turns: the journal's clock began at another moment."""
    # relay and core handle a Place at the same moment, so any turn tells the distance; the last is past any correction
    last = turns[-1]
    placed = journal.placed.get(last["request_id"])
    if placed is None:
        return []
    distance = (last["placed_ns"] - origin) / 1e9 - placed
    return [
        (begun + distance, journal.trained[step] + distance, 1.0)
        for step, (begun, _) in journal.trains.items()
        if step in journal.trained
    ]


def _least_squares(features: np.ndarray, values: np.ndarray) -> list[float]:
    """Coefficients of 0 or more [columns]: columns that would need a negative one are left out, the worst first."""
    kept = [column for column in range(features.shape[1]) if features[:, column].any()]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    while kept:
        found = np.linalg.lstsq(features[:, kept] / scale[kept], values, rcond=1e-9)[0]
        if (found >= 0).all():
            break
        del kept[int(np.argmin(found))]
    result = [0.0] * features.shape[1]
    for place, column in enumerate(kept):
        result[column] = float(found[place] / scale[column])
    return result


# ---- the trainer


def _training(journal: _Journal, metrics: Sequence[Mapping[str, Any]], ranks: int) -> tuple[float, float]:
    """Fixed seconds of a train step, and seconds a token of a rank's share.

    Where the backend reports its spans, those of `TOKEN_SPANS` grow with the tokens and the rest is fixed; where it does not,
    a straight line decides, and what no slope can be seen in is fixed.
    """
    steps = sorted(set(journal.trains) & set(journal.trained))
    steps = steps[WARM_UP_STEPS:] if len(steps) > 3 * WARM_UP_STEPS else steps
    seconds = np.array([journal.trained[step] - journal.trains[step][0] for step in steps])
    tokens = np.array([journal.trains[step][1] for step in steps]) / ranks
    by_step = {row["step"]: row["metrics"] for row in metrics}
    spans = [_spans(by_step.get(step, {})) for step in steps]
    known = [index for index, span in enumerate(spans) if span > 0]
    if known:
        token_s = median(spans[index] / max(tokens[index], 1) for index in known)
        return max(0.0, float(np.median(seconds - token_s * tokens))), float(token_s)
    return _line(tokens, seconds)


def _spans(metrics: Mapping[str, float]) -> float:
    return sum(metrics.get(f"timing_{name}_total") or 0.0 for name in TOKEN_SPANS)


def _line(tokens: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    middle, spread = tokens.mean(), ((tokens - tokens.mean()) ** 2).sum()
    if len(tokens) < 4 or spread == 0:
        return float(np.median(seconds)), 0.0
    slope = float(((tokens - middle) * (seconds - seconds.mean())).sum() / spread)
    rest = seconds - seconds.mean() - slope * (tokens - middle)
    error = float(np.sqrt((rest**2).sum() / (len(tokens) - 2) / spread))
    if slope < 2 * error:
        return float(np.median(seconds)), 0.0
    return max(0.0, float(np.median(seconds - slope * tokens))), slope
