"""A run's own times: its journal, requests, weight updates and metrics become `Latencies`. Reads; decides nothing.

    journal        DispatchRollout → first TurnStarted, TurnDone → next TurnStarted or RolloutDone, TrainOnBatch → StepDone,
                   UpdateWeights → UpdateDone, ends of groups
    turns          what each request took on its server, and how many ran beside it: the times of an engine's steps
    weights        pauses of the servers
    step_metrics   which part of a train step grows with its tokens; processor seconds of the processes

docs/planning.md says how each number is found.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import comb
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.evals import EVAL_IDS
from telescope.flow.replay import JournalDamaged, decode_line, decode_opening
from telescope.flow.settings import FlowSettings
from telescope.planning.latencies import Distribution, EngineTimes, Latencies, constant, empirical
from telescope.planning.simulator import SimulatedStep
from telescope.runlog.journal import journal_lines
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows

WARM_UP_STEPS = 2
"""Left out where more than twice as many follow: the first ones load kernels and grow buffers."""
TOKEN_SPANS = ("forward", "backward", "loss_computation", "compute_old_logprobs", "compute_kl", "data_to_device")
"""Parts of a train step that grow with its tokens, as `timing_<name>_total` of the step metrics."""


PROCESSES = ("orchestrator", "workers", "servers", "engines", "trainers")
EQUAL_LIMIT = 0.95
"""Of groups that are discarded: a simulation of more would hardly come to a batch."""


class Uncalibratable(ValueError):
    """The run directory does not say enough; the message says what is missing."""


class HostCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Processor seconds of a run's processes by what they do. Small models are bound by them, and where processes share one
    host's cores, the wall clock says more about what else runs there.

    Nothing is fitted to them: they are what the calibrated run spent in all, over what it did. An engine's step is taken to
    cost the processor what it takes by the clock where it runs nearly alone (`EngineTimes.step_s`); tokens have the rest."""

    rollout_s: float
    """Of orchestrator, workers and servers, for each rollout that is scored."""
    engine_step_s: float
    """Of an engine's step, whatever it serves."""
    engine_token_s: float
    """More for each token that it samples."""
    training_share: float
    """Of all trainers, for each second that one of their steps takes."""

    def estimate_step_s(self, steps: Sequence[SimulatedStep]) -> float:
        """Median over the steps of a simulated run, all processes together."""
        before: list[SimulatedStep | None] = [None, *steps[:-1]]
        return median(self._between(one, other) for one, other in zip(before, steps, strict=True))

    def _between(self, before: SimulatedStep | None, step: SimulatedStep) -> float:
        """What lies between the ends of two train steps; `before`: none for the first."""
        scores, engine_steps, sampled = step.scores, step.engine_steps, step.sampled
        if before is not None:
            scores, engine_steps = scores - before.scores, engine_steps - before.engine_steps
            sampled -= before.sampled
        engines = self.engine_step_s * engine_steps + self.engine_token_s * sampled
        return self.rollout_s * scores + engines + self.training_share * (step.done_s - step.begun_s)


def processor_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of a step by kind of process, from its row in `step_metrics`; empty where they were not known."""
    found = {part: metrics.get(f"processor_s/{part}") for part in PROCESSES}
    return {part: seconds for part, seconds in found.items() if seconds is not None} if None not in found.values() else {}


def measure_processor_step_s(metrics: Sequence[Mapping[str, float]]) -> float | None:
    """Median of a run's own steps, to compare with; None where a step does not say it."""
    found = [processor_seconds(row) for row in metrics]
    return median(sum(row.values()) for row in found) if found and all(found) else None


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What a run says about itself."""

    latencies: Latencies
    settings: FlowSettings
    step_s: float
    """Median of its step times, to compare with a simulation of the same configuration."""
    steps: int
    turns: int
    error: float
    """Mean absolute error of the fitted time of a request, as a share of the mean time."""
    equal_shares: tuple[float, ...]
    """Of groups of 2, 3 … samples, up to one more than its own: the share whose rewards are all equal. Empty where none was
    discarded."""
    host_costs: HostCosts | None
    """None where the run did not say its processor seconds (several hosts)."""
    processor_step_s: float | None
    """Median of what a step took of them, all processes together."""


class _WorkerJob(msgspec.Struct, frozen=True):
    """Something a worker did: from when it could, to when it was seen."""

    since: float
    done: float
    scores: bool


@dataclass
class _JournalFacts:
    """Times (seconds of the core's clock) and facts, by what they are about."""

    runs: dict[tuple[int, int], tuple[float, str]] = field(default_factory=dict)
    started: set[tuple[int, int]] = field(default_factory=set)
    placed: dict[str, float] = field(default_factory=dict)
    answered: dict[str, tuple[float, int]] = field(default_factory=dict)
    """When, and with how many tokens."""
    scored: list[float] = field(default_factory=list)
    turn_ends: dict[int, float] = field(default_factory=dict)
    between_s: list[float] = field(default_factory=list)
    jobs: dict[str, list[_WorkerJob]] = field(default_factory=dict)
    prompts: list[int] = field(default_factory=list)
    turns: dict[int, int] = field(default_factory=dict)
    turns_of_scored: list[int] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    trains: dict[int, tuple[float, int]] = field(default_factory=dict)
    trained: dict[int, float] = field(default_factory=dict)
    updates: dict[int, float] = field(default_factory=dict)
    synced: list[float] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    discarded: int = 0
    generation_began: float = 0.0

    def take(self, now: float, event: seen.AnyEvent, ordered: Iterable[do.AnyCommand]) -> None:
        match event:
            case seen.WorkerJoined() | seen.ServerJoined():
                self.generation_began = now
            case seen.TurnStarted(rollout_id=rollout_id, attempt=attempt, turn=0):
                self._note_work(now, (rollout_id, attempt), None)
            case seen.TurnStarted(rollout_id=rollout_id) if rollout_id in self.turn_ends:
                self.between_s.append(now - self.turn_ends[rollout_id])
            case seen.TurnDone(rollout_id=rollout_id, request_id=request_id, completion_tokens=tokens):
                self.answered[request_id] = now, tokens
                self.turn_ends[rollout_id] = now
                self.turns[rollout_id] = self.turns.get(rollout_id, 0) + 1
            case seen.RolloutDone(rollout_id=rollout_id) if rollout_id >= EVAL_IDS:
                pass  # an eval's: what is simulated is training
            case seen.RolloutDone(rollout_id=rollout_id, attempt=attempt, prompt_tokens=prompt, completion_tokens=completion):
                self.rewards[rollout_id] = event.reward
                self.tokens[rollout_id] = prompt + completion
                self.prompts.append(prompt)
                self.scored.append(now)
                self.turns_of_scored.append(self.turns.pop(rollout_id, 1))
                self._note_work(now, (rollout_id, attempt), self.turn_ends.pop(rollout_id, None))
            case seen.StepDone(step=step):
                self.trained.setdefault(step, now)
            case seen.UpdateDone(version=version) if version in self.updates:
                self.synced.append(now - self.updates.pop(version))
        for command in ordered:
            self._take_command(now, command)

    def _note_work(self, now: float, key: tuple[int, int], since: float | None) -> None:
        """A start (since the order), or a score since the last token. The first of each counts."""
        known = self.runs.get(key)
        if known is not None and (since is not None or key not in self.started):
            self.started.add(key)
            self.jobs.setdefault(known[1], []).append(_WorkerJob(known[0] if since is None else since, now, since is not None))

    def _take_command(self, now: float, command: do.AnyCommand) -> None:
        match command:
            case do.DispatchRollout(worker=worker, order=order):
                self.runs[order.rollout_id, order.attempt] = now, worker
            case do.PlaceRequest(request_id=request_id):
                self.placed[request_id] = now
            case do.TrainOnBatch(step=step, rollout_ids=groups):
                self.trains[step] = now, sum(self.tokens.get(rollout_id, 0) for group in groups for rollout_id in group)
            case do.UpdateWeights(version=version):
                self.updates.setdefault(version, now)
            case do.RecordGroupState(state="complete", group_id=group_id):
                self.complete.add(group_id)
            case do.RecordGroupState(state="discarded"):
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
    fitted = fit_engine(turns, pauses, _find_training(journal, turns), kv_tokens=kv_tokens, max_seqs=max_seqs)
    metrics = {row["step"]: row["metrics"] for row in rows(run, "step_metrics")}
    train_step_s, train_token_s = _fit_training(journal, metrics, ranks)
    start_s, score_s, dispatch_s, handed_in_s = _fit_workers(journal.jobs)
    pause_s = fmean(row["pause_s"] for row in pauses) if pauses else 0.0
    sync_s = median(journal.synced) if journal.synced else 0.0
    answers = [(row["done_ns"] - row["placed_ns"]) / 1e9 - row["queued_s"] - row["generated_s"] for row in turns]
    latencies = Latencies(
        prompt_tokens=empirical(journal.prompts or [row["prompt_tokens"] for row in turns]),
        completion_tokens=empirical([row["completion_tokens"] for row in turns if row["rollout_id"] < EVAL_IDS]),
        turns=empirical(journal.turns_of_scored) if journal.turns_of_scored else constant(1),
        engine=fitted.times,
        dispatch_s=constant(dispatch_s),
        start_s=start_s,
        request_s=max(0.0, median(answers)),
        environment_s=empirical(journal.between_s) if journal.between_s else constant(0),
        reward_s=_fit_rewards(run, handed_in_s),
        score_s=score_s,
        train_step_s=train_step_s,
        train_token_s=train_token_s / epochs,
        sync_s=sync_s,
        pause_s=min(pause_s, sync_s),
        shared_share=fitted.shared_share,
        equal_share=min(journal.discarded / max(len(journal.complete), 1), EQUAL_LIMIT),
    )
    return Calibration(
        latencies=latencies,
        settings=settings,
        step_s=_step_s(journal),
        steps=len(journal.trained),
        turns=len(turns),
        error=fitted.error,
        equal_shares=_count_equal_shares(journal, settings.group_size) if journal.discarded else (),
        host_costs=_find_host_costs(journal, metrics, fitted),
        processor_step_s=measure_processor_step_s([metrics[step] for step in sorted(metrics)]),
    )


def _read(run: RunDirectory) -> tuple[FlowSettings, _JournalFacts]:
    lines = journal_lines(run.journal)
    opening = next(lines, None)
    if opening is None:
        raise Uncalibratable(f"{run.journal} is empty: the run ended before it decided anything")
    journal = _JournalFacts()
    try:
        settings = decode_opening(opening)
        for number, text in enumerate(lines, start=2):
            line = decode_line(text, number)
            journal.take(line.now, line.event, line.commands)
    except JournalDamaged as error:
        raise Uncalibratable(f"{run.journal}: {error}") from error
    return settings, journal


def _step_s(journal: _JournalFacts) -> float:
    ends = [journal.generation_began, *(journal.trained[step] for step in sorted(journal.trained))]
    return median(b - a for a, b in pairwise(ends))


def _count_equal_shares(journal: _JournalFacts, group_size: int) -> tuple[float, ...]:
    """For each size up to the run's, the chance that so many of a group's samples have one reward: over complete groups, the
    mean of Σ C(samples of a reward, size) / C(samples, size). The last one, for a sample more, goes on as the two before it."""
    shares: list[float] = []
    groups = [
        [
            journal.rewards[rollout]
            for rollout in range(group * group_size, (group + 1) * group_size)
            if rollout in journal.rewards
        ]
        for group in journal.complete
    ]
    for size in range(2, group_size + 1):
        chances = [
            sum(comb(count, size) for count in Counter(rewards).values()) / comb(len(rewards), size)
            for rewards in groups
            if len(rewards) >= size
        ]
        shares.append(fmean(chances) if chances else shares[-1])
    if len(shares) > 1 and shares[-2]:
        shares.append(shares[-1] * shares[-1] / shares[-2])
    return tuple(min(share, EQUAL_LIMIT) for share in shares)


# ---- workers


def _fit_rewards(run: RunDirectory, handed_in_s: float) -> Distribution:
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


def _fit_workers(jobs: Mapping[str, list[_WorkerJob]]) -> tuple[float, float, float, float]:
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


# ---- the trainer


def _find_training(journal: _JournalFacts, turns: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    """When the trainer worked, since the first request was placed: the journal's clock began at another moment."""
    origin = min(row["placed_ns"] for row in turns)
    # relay and core handle a PlaceRequest at the same moment, so any turn tells the distance; the last is past any correction
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


def _fit_training(journal: _JournalFacts, by_step: Mapping[int, Mapping[str, float]], ranks: int) -> tuple[float, float]:
    """Fixed seconds of a train step, and seconds a token of a rank's share.

    Where the backend reports its spans, those of `TOKEN_SPANS` grow with the tokens and the rest is fixed; where it does not,
    a straight line decides, and what no slope can be seen in is fixed.
    """
    steps = sorted(set(journal.trains) & set(journal.trained))
    steps = steps[WARM_UP_STEPS:] if len(steps) > 3 * WARM_UP_STEPS else steps
    seconds = np.array([journal.trained[step] - journal.trains[step][0] for step in steps])
    tokens = np.array([journal.trains[step][1] for step in steps]) / ranks
    spans = [_sum_spans(by_step.get(step, {})) for step in steps]
    known = [index for index, span in enumerate(spans) if span > 0]
    if known:
        token_s = median(spans[index] / max(tokens[index], 1) for index in known)
        return max(0.0, float(np.median(seconds - token_s * tokens))), float(token_s)
    return _fit_line(tokens, seconds)


def _find_host_costs(
    journal: _JournalFacts, by_step: Mapping[int, Mapping[str, float]], fitted: FittedEngine
) -> HostCosts | None:
    """Processor seconds over what was done between the end of the last step for warming up and that of the run's last step."""
    steps = sorted(set(journal.trained) & set(by_step))
    warm = steps[WARM_UP_STEPS:] if len(steps) > 2 * WARM_UP_STEPS else steps[1:]
    rows = [processor_seconds(by_step[step]) for step in warm]
    if not rows or not all(rows):
        return None
    start, end = journal.trained[warm[0] - 1], journal.trained[warm[-1]]
    spent = {part: sum(row[part] for row in rows) for part in PROCESSES}
    answered = {key: tokens for key, (at, tokens) in journal.answered.items() if start < at <= end}
    engine_steps = sum(fitted.steps.get(key, 0.0) for key in answered)
    engine_step_s = min(fitted.times.step_s, spent["engines"] / max(engine_steps, NOTHING))
    scored = sum(start < at <= end for at in journal.scored)
    training_s = sum(journal.trained[step] - journal.trains[step][0] for step in warm)
    return HostCosts(
        rollout_s=(spent["orchestrator"] + spent["workers"] + spent["servers"]) / max(scored, 1),
        engine_step_s=engine_step_s,
        engine_token_s=max(0.0, spent["engines"] - engine_step_s * engine_steps) / max(sum(answered.values()), 1),
        training_share=spent["trainers"] / max(training_s, NOTHING),
    )


def _sum_spans(metrics: Mapping[str, float]) -> float:
    return sum(metrics.get(f"timing_{name}_total") or 0.0 for name in TOKEN_SPANS)


def _fit_line(tokens: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    middle, spread = tokens.mean(), ((tokens - tokens.mean()) ** 2).sum()
    if len(tokens) < 4 or spread == 0:
        return float(np.median(seconds)), 0.0
    slope = float(((tokens - middle) * (seconds - seconds.mean())).sum() / spread)
    rest = seconds - seconds.mean() - slope * (tokens - middle)
    error = float(np.sqrt((rest**2).sum() / (len(tokens) - 2) / spread))
    if slope < 2 * error:
        return float(np.median(seconds)), 0.0
    return max(0.0, float(np.median(seconds - slope * tokens))), slope


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
        still = TimeOverlap([_pause_of(row, origin) for row in pauses if row["server"] == name])
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
    found = _fit_times(np.array(features), np.array(took))
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


def _pause_of(row: Mapping[str, Any], origin: int) -> tuple[float, float, float]:
    end = (row["ended_ns"] - origin) / 1e9
    return end - row["pause_s"], end, 1.0


def _fit_times(features: np.ndarray, took: np.ndarray) -> list[float]:
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
    for kept in _list_subsets(len(columns)):
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


def _list_subsets(count: int) -> Iterator[list[int]]:
    """Of so many columns, the largest sets first."""
    for size in range(count, -1, -1):
        yield from map(list, combinations(range(count), size))
