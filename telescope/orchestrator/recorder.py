"""What the orchestrator writes down: rows of the run directory, the status file, the summary. Reads clocks, decides nothing.

Scored rollouts are put off until the loop has nothing better to do (`catch_up`), so that a burst of them does not stand between
free lanes and what is to be generated next. Whatever counts them catches up first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson

from telescope.config.eval_measure import EvalMeasure
from telescope.config.redaction import Redactor
from telescope.flow import commands
from telescope.flow.counts import Counts
from telescope.flow.limits import name_place
from telescope.maths.summaries import gini, group_mean, max_median_ratio
from telescope.orchestrator.batch import TrainBatch, place_turns
from telescope.orchestrator.best_checkpoint import BestCheckpoint
from telescope.orchestrator.cohorts import (
    Cohort,
    CohortEnds,
    CohortTally,
    Score,
    make_means,
    pool,
    summarize,
)
from telescope.orchestrator.eval_recorder import EvalRecorder
from telescope.orchestrator.eval_scores import EvalScoring
from telescope.orchestrator.failure_rates import FailureRates, count_failures
from telescope.orchestrator.reward_ranges import RewardRanges
from telescope.orchestrator.rollout_store import Rollout
from telescope.orchestrator.saved_state import SummaryCounters
from telescope.orchestrator.training_health import ParityCheck
from telescope.orchestrator.weight_update import WeightUpdate
from telescope.records import EnvironmentCard, FailureKind, RolloutOrder
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.runlog.wandb_mirror import WandbMirror
from telescope.runlog.writer import RunLog
from telescope.wire.messages import RowsLost, StepReport

log = logging.getLogger(__name__)

PACE_STEPS = 10


class Recorder:
    """The orchestrator's hand on the run directory."""

    def __init__(
        self,
        run: RunDirectory,
        log: RunLog,
        mirror: WandbMirror | None,
        number_of_steps: int,
        rewards: RewardRanges | None = None,
        *,
        group_size: int = 1,
        environments: Sequence[str] = (),
        token_groups: int = 0,
        parity: ParityCheck | None = None,
        redactor: Redactor | None = None,
        evals: Mapping[str, EvalScoring] = MappingProxyType({}),
        best: BestCheckpoint | None = None,
        stop_measure: EvalMeasure | None = None,
    ) -> None:
        self._redactor = redactor or Redactor()
        self._token_groups = token_groups
        self._parity = parity or ParityCheck()
        self._run, self._log, self._mirror, self._steps = run, log, mirror, number_of_steps
        self.rewards = rewards or RewardRanges()
        self._trained = frozenset(environments)
        self._group_size, self._each = group_size, len(environments) > 1
        self._labels = tuple(environments) if self._each else ()
        self.evals = EvalRecorder(log, mirror, evals, best, self._warn_of_evals)
        self._stop_measure = stop_measure
        self._cohorts = CohortTally(group_size)
        self._ends = CohortEnds()
        self._last_policy: dict[str, Any] = {}
        """Means of the last versions that have ended."""
        self._ended: list[Cohort] = []
        """Cohorts that have ended since the last step."""
        self._scored: Counter[str] = Counter()
        self._failed: Counter[tuple[str, str]] = Counter()
        """Since the last step: rollouts by environment, attempts without a score by environment and kind."""
        self.failure_rates = FailureRates()
        self._sampled_before = 0
        """Sampled tokens until the last step."""
        self._put_off: deque[tuple[Rollout, Callable[[], None]]] = deque()
        self._in_training: dict[int, TrainBatch] = {}
        self.history: list[dict[str, float]] = []
        self.updates_skipped = 0
        self._prompts: dict[str, dict[str, int]] = {}
        self.tokens: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self._trained_before_s = 0.0
        """In attempts that this one goes on from."""
        self._generating_since: float | None = None
        self._unwritable: set[Path] = set()
        self._step_ends: list[float] = []
        self._next_step: dict[str, float] = {}
        self._alerts = (0, "")
        """How many the terminal shall show, and the last of them."""
        self._rows_wait, self._rows_lost = False, 0
        self._rows_lost_elsewhere: dict[str, RowsLost] = {}
        """By the process that was to write them: the last that it said of this attempt."""
        self._lost_before = RowsLost(unlogged=0, dropped=0)
        """In attempts that this one goes on from."""
        self.restarts: Counter[str] = Counter()
        """How often each server has come back."""

    @property
    def last_row(self) -> int:
        """How far the run directory's rows have come."""
        self.catch_up()
        return self._log.last_row

    def make_counters(self) -> SummaryCounters:
        """What a checkpoint keeps of the summary."""
        self.catch_up()
        lost = self._count_lost_rows(waiting=False)
        return SummaryCounters(
            tokens=dict(self.tokens),
            seconds=self._count_seconds(),
            out_of_range=dict(self.rewards.outside),
            updates_skipped=self.updates_skipped,
            rows_dropped=lost.dropped,
            rows_unlogged=lost.unlogged,
            restarts=dict(self.restarts),
            failures=self.failure_rates.save(),
            cohorts=(*self._ended, *self._cohorts.save()),
            first_cohorts=tuple(self._ends.first),
            last_cohorts=tuple(self._ends.last),
            cohorts_ended=self._ends.count,
            evals=self.evals.save(),
        )

    def resume(self, counters: SummaryCounters, history: Sequence[Mapping[str, Any]]) -> None:
        """Go on where a checkpoint was made. `history`: the metrics of each step before it."""
        self.tokens.update(counters.tokens)
        self.seconds |= counters.seconds
        self._trained_before_s = counters.seconds.get("training", 0.0)
        self.rewards.outside.update(counters.out_of_range)
        self.updates_skipped = counters.updates_skipped
        self._lost_before = RowsLost(unlogged=counters.rows_unlogged, dropped=counters.rows_dropped)
        self.restarts.update(counters.restarts)
        self.failure_rates.restore(counters.failures)
        self.history = [{name: value for name, value in step.items() if value is not None} for step in history]
        self._cohorts.restore(counters.cohorts)
        self._ends = CohortEnds(list(counters.first_cohorts), list(counters.last_cohorts), counters.cohorts_ended)
        self._last_policy = pool(self._ends.choose()[1])
        self.evals.restore(counters.evals)
        self._sampled_before = self.tokens["completion"]

    def add_to_next_step(self, metrics: Mapping[str, float], *, instead_of: str = "") -> None:
        """To be reported with the step that is done next. `instead_of`: what was to be told of names that begin so is not, so
        that the parts of two weight updates are not mixed."""
        if instead_of:
            self._next_step = {name: value for name, value in self._next_step.items() if not name.startswith(instead_of)}
        self._next_step |= metrics

    def record_checkpoint(
        self, step: int, state: str, *, nbytes: int = 0, seconds: float = 0.0, stall_s: float = 0.0, cause: str = ""
    ) -> None:
        row = {"step": step, "state": state, "nbytes": nbytes, "seconds": seconds, "stall_s": stall_s, "cause": cause}
        self._log.append("checkpoints", row)
        if state == "complete":
            self.evals.note_checkpoint(step)

    def protect_checkpoints(self, completing: int) -> frozenset[int]:
        """Steps whose checkpoints are not to be deleted now that the one of `completing` will be complete."""
        return self.evals.protect_steps(completing)

    def start_clock(self) -> None:
        """Every worker and server is there: seconds of training and of the first step count from here, not from the start of
        the processes."""
        if self._generating_since is None:
            self._generating_since = time.monotonic()

    def record_environments(self, cards: Sequence[EnvironmentCard]) -> None:
        """What the workers loaded. Prompts that they left out are told once."""
        for card in cards:
            total = card.split_sizes.get("train", 0) + card.too_long
            if card.too_long and card.name not in self._prompts:
                sentence = (
                    f"{card.too_long} of {total} prompts of {card.name} are longer than inference.max_model_len - "
                    "rollout.max_tokens (or its own max_tokens) leaves for them: they are never drawn"
                )
                log.warning("%s", sentence)
                self.alert("warning", name_place(card.name, self._trained or (card.name,)), sentence)
            if card.in_training:
                sentence = (
                    f"{card.in_training} prompts that are evaluated are among those that are trained on: a score on them may "
                    "be memory; evaluate another environment, or hold prompts out (docs/evals.md)"
                )
                log.warning("%s", sentence)
                self.alert("warning", name_place(card.name, self._trained or (card.name,)), sentence)
            if card.name in self._trained or not self._trained:
                self._prompts[card.name] = {"kept": total - card.too_long, "too_long": card.too_long}

    # ---- rollouts and groups -----------------------------------------------------------------------------------------

    def record_rollout(self, rollout: Rollout, safe: Callable[[], None]) -> None:
        """A rollout to be written; `safe` runs on the event loop once it is on disk."""
        self._put_off.append((rollout, safe))

    @property
    def behind(self) -> bool:
        """Whether scored rollouts wait to be written."""
        return bool(self._put_off)

    def catch_up(self, most: int | None = None) -> None:
        """Write scored rollouts that wait for it, all or so many of them, in the order in which they came."""
        for _ in range(len(self._put_off) if most is None else min(most, len(self._put_off))):
            self._write_scored(*self._put_off.popleft())

    def _write_scored(self, rollout: Rollout, safe: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        if rollout.order.eval:
            self.evals.write_scored(rollout, make_rollout_row(rollout), lambda: _schedule(loop, safe))
            return
        if rollout.taken:
            label = rollout.order.prompt.environment
            self._scored[label] += 1
            self._warn_of_failures(label, self.failure_rates.note_score(label))
            score = Score.of(label, rollout.result, self.rewards.normalise(label, rollout.result.reward))
            self._cohorts.add(rollout.order.group_id, rollout.order.rollout_id, score)
            if sentence := self.rewards.note(label, rollout.result.reward):
                log.warning("%s", sentence)
                self.alert("warning", f"environments.{label}", sentence)
        self.tokens["prompt"] += rollout.result.prompt_tokens
        self.tokens["completion"] += rollout.result.completion_tokens
        row = {**make_rollout_row(rollout), "status": "scored" if rollout.taken else "ignored"}
        self._log.append("rollouts", row, lambda: _schedule(loop, safe))

    def record_failure(self, rollout: Rollout, cause: str, kind: FailureKind) -> None:
        row = {**make_order_row(rollout.order), "status": "cancelled", "cause": cause, "worker": rollout.worker}
        if rollout.order.eval:
            row |= {} if rollout.cancelled else {"status": "error", "failure": kind}
            self.evals.write_failed(rollout, row)
            return
        if not rollout.cancelled:
            label = rollout.order.prompt.environment
            self._failed[label, kind] += 1
            self._warn_of_failures(label, self.failure_rates.note_failure(label, cause))
            row |= {"status": "error", "failure": kind}
        self._log.append("rollouts", row)

    def end_eval(self, command: commands.EndEval) -> float | None:
        """With all its scores, those that were put off too. Gives the number by which the run may end early; None where it has
        none, or is not of that eval."""
        self.catch_up()
        row = self.evals.end(command, len(self.history))
        return self._stop_measure.read(row) if self._stop_measure is not None else None

    def _warn_of_evals(self, sentence: str) -> None:
        log.warning("%s", sentence)
        self.alert("warning", "evals", sentence)

    def _warn_of_failures(self, label: str, sentence: str) -> None:
        if sentence:
            log.warning("%s", sentence)
            self.alert("warning", f"environments.{label}", sentence)

    def record_group(self, command: commands.RecordGroupState) -> None:
        self._cohorts.note_group(command.group_id, command.state, command.reason, command.version)
        self._log.append(
            "groups",
            {
                "group_id": command.group_id,
                "state": command.state,
                "reason": command.reason,
                "version": command.version,
            },
        )

    def record_turn(self, row: Mapping[str, Any]) -> None:
        self._log.append("turns", row)

    def alert(self, level: str, source: str, message: str, *, shown: bool = True) -> None:
        """`shown`: on the launcher's terminal too; not what that says in words of its own."""
        self._log.append("alerts", {"level": level, "source": source, "message": message})
        if shown:
            self._alerts = (self._alerts[0] + 1, message)

    # ---- steps and weights -------------------------------------------------------------------------------------------

    def record_batch(self, batch: TrainBatch) -> None:
        """A batch has been cut."""
        self._in_training[batch.command.step] = batch
        self._log.append(
            "batches",
            {
                "step": batch.command.step,
                "group_ids": list(batch.command.group_ids),
                "baseline_group_ids": list(batch.command.baseline_group_ids),
                "rollout_ids": [rollout.order.rollout_id for rollout in batch.rollouts],
                "advantages": batch.advantages.tolist(),
                "turn_advantages": [] if batch.turns is None else [each.tolist() for each in batch.turns.by_rollout],
                "lag_versions": [batch.find_lag(rollout) for rollout in batch.rollouts],
                "tokens": sum(rollout.tokens for rollout in batch.rollouts),
                "trained_tokens": batch.trained_tokens,
                "filtered": {
                    str(rollout.order.rollout_id): list(why)
                    for rollout, why in zip(batch.rollouts, batch.filters, strict=True)
                    if why
                },
                "truncated": {str(rollout_id): list(lost) for rollout_id, lost in batch.truncated.items()},
            },
        )
        if batch.truncated:
            sentence = (
                f"step {batch.command.step}: of {len(batch.truncated)} rollouts longer than trainer.seq_len only the beginning "
                "is trained; raise trainer.seq_len to train them whole"
            )
            self.alert("warning", "trainer", sentence)
        for row in make_token_rows(batch, self._token_groups):
            self._log.append("tokens", row)

    def record_step(
        self, done: StepReport, counts: Counts, processor_s: Mapping[str, float] = MappingProxyType({})
    ) -> dict[str, float]:
        """All ranks are through with a step: its metrics, rank 0's already reduced over the ranks. `processor_s`: spent since
        the last one, by part of the run."""
        self.catch_up()
        batch, now = self._in_training.pop(done.step), time.monotonic()
        seconds = now - (self._step_ends[-1] if self._step_ends else self._generating_since or now)
        timings = _limit_first_wait(done.timings, seconds) if not self._step_ends else done.timings
        self._step_ends.append(now)
        metrics = self._report_policy(counts.version) | dict(done.metrics) | timings | self._next_step
        self._next_step = {}
        numbers = counts.as_fields().items()
        metrics |= {f"flow/{name}": float(value) for name, value in numbers if isinstance(value, int | float)}
        metrics |= _measure_groups(batch)
        metrics |= batch.compute_metrics()
        if len(batch.lags):
            metrics |= {"staleness_mean": float(batch.lags.mean()), "staleness_max": float(batch.lags.max())}
        metrics |= {f"processor_s/{part}": spent for part, spent in processor_s.items()}
        tokens = {"processed": sum(rollout.tokens for rollout in batch.rollouts), "trained": batch.trained_tokens}
        tokens["sampled"] = self.tokens["completion"] - self._sampled_before
        self._sampled_before = self.tokens["completion"]
        metrics |= {"timing_step_total": seconds, "tokens": float(tokens["processed"])}
        metrics |= {f"tokens_per_s/{what}": count / max(seconds, 1e-9) for what, count in tokens.items()}
        for name, value in timings.items():
            if not name.endswith("_mean"):
                self.seconds[name] = self.seconds.get(name, 0.0) + value
        if left_out := int(metrics.get("update_skipped", 0.0)):
            self.updates_skipped += left_out
            broken = int(metrics.get("updates_not_finite", left_out))
            self.alert("warning", "trainer", f"step {done.step}: {_describe_left_out(left_out, broken)}")
        if sentence := self._parity.judge(done.step, metrics):
            log.warning("%s", sentence)
            self.alert("warning", "trainer", sentence)
        self.history.append(metrics)
        self._log.append("step_metrics", {"step": done.step, "metrics": metrics})
        if self._mirror is not None:
            self._mirror.log(done.step, metrics)
        return metrics

    def _report_policy(self, version: int) -> dict[str, float]:
        """Metrics of the cohorts that have ended since the last step, at each of which a row is written. `version`: served."""
        self._end_cohorts(self._cohorts.take_ended(version))
        whole = [cohort for cohort in self._ended if not cohort.cut_off]
        self._ended = []
        metrics = summarize(whole, self._group_size, each=self._each)
        metrics["rollouts/scored"] = float(self._scored.total())
        metrics |= count_failures(self._failed, self._scored, each=self._each)
        self._scored.clear()
        self._failed.clear()
        return metrics

    def _end_cohorts(self, cohorts: Sequence[Cohort]) -> None:
        for cohort in cohorts:
            metrics = summarize([cohort], self._group_size, each=self._each)
            self._log.append("policy", {"version": cohort.version, "cut_off": cohort.cut_off, "metrics": metrics})
            self._ends.add(make_means(cohort, self._group_size, each=self._each))
        self._ended += cohorts
        if cohorts:
            self._last_policy = pool(self._ends.choose()[1])

    def end_cohorts(self) -> None:
        """At the run's end: what has not ended is cut off, and said to be."""
        self.catch_up()
        self._end_cohorts(self._cohorts.take_all())

    def record_weights(self, update: WeightUpdate, phase: str, server: str = "", pause_s: float = 0.0, cause: str = "") -> None:
        self._log.append(
            "weights",
            {
                "version": update.version,
                "server": server,
                "phase": phase,
                "ended_ns": time.time_ns(),
                "nbytes": update.manifest.nbytes if update.manifest else 0,
                "checksum": update.checksum,
                "pause_s": pause_s,
                "cause": cause or update.cause,
            },
        )

    # ---- status and summary ------------------------------------------------------------------------------------------

    def _watch_rows(self) -> None:
        """Rows that are not on disk are an alert at once, and those that are lost another."""
        if self._log.trouble and not self._rows_wait:
            self.alert("error", "run log", f"{self._log.trouble}: they wait in memory and are tried again")
        self._rows_wait = bool(self._log.trouble)
        if (lost := self._log.counters.unlogged) and not self._rows_lost:
            self.alert(
                "error", "run log", f"{lost} rows are lost so far, and more may be: {self._log.trouble or 'see the log'}"
            )
        self._rows_lost = lost

    def note_lost_rows(self, process: str, lost: RowsLost) -> None:
        """What another process has not written of its own rows: an alert at the first that no file will have."""
        known = self._rows_lost_elsewhere.get(process)
        self._rows_lost_elsewhere[process] = lost
        if lost.unlogged and not (known and known.unlogged):
            self.alert("error", "run log", f"{lost.unlogged} rows of {process} are lost so far, and more may be: see its log")

    def _count_lost_rows(self, *, waiting: bool = True) -> RowsLost:
        """Of all processes, and of the attempts before. `waiting`: with those that the disk has yet to take."""
        counters = self._log.counters
        own = RowsLost(counters.unlogged + (counters.waiting if waiting else 0), counters.dropped)
        known = (self._lost_before, own, *self._rows_lost_elsewhere.values())
        return RowsLost(unlogged=sum(one.unlogged for one in known), dropped=sum(one.dropped for one in known))

    def write_status(self, fields: Mapping[str, Any]) -> None:
        self._watch_rows()
        latest = self.history[-1] if self.history else {}
        status = {
            "steps": self._steps,
            "step": len(self.history),
            "reward": latest.get("reward/policy"),
            "reward_rollouts": latest.get("reward/policy/rollouts"),
            "exact": latest.get("sample/exact"),
            "exact_rollouts": latest.get("sample/exact/count"),
            "environments": {label: _pick_environment(latest, label) for label in self._labels},
            "reward_policy_last": self._last_policy.get("reward"),
            "policy_last": {name: self._last_policy[name] for name in ("versions", "rollouts") if self._last_policy},
            "sampled_tokens_per_s": latest.get("tokens_per_s/sampled"),
            "lag": latest.get("staleness_mean"),  # one quantity, docs/glossary.md
            **self.evals.status,
            "alerts": self._alerts[0],
            "alert": self._alerts[1],
            **fields,
        }
        self._write(self._run.status_json, orjson.dumps(status, option=orjson.OPT_SERIALIZE_NUMPY).decode(), durable=False)

    def estimate_eta_s(self) -> float | None:
        """Seconds to go at the pace of the last steps; None before the second step."""
        if len(self._step_ends) < 2:
            return None
        recent = self._step_ends[-PACE_STEPS:]
        return (recent[-1] - recent[0]) / (len(recent) - 1) * (self._steps - len(self.history))

    def _count_seconds(self) -> dict[str, float]:
        """By name, of this attempt and of those that it goes on from."""
        if not self._step_ends:
            return dict(self.seconds)
        training = self._step_ends[-1] - (self._generating_since or self._step_ends[0])
        return {**self.seconds, "training": self._trained_before_s + training}

    def write_summary(self, counts: Counts, fields: Mapping[str, Any]) -> None:
        """Write summary.json: what the run did, in one page. Called again, it replaces what it wrote."""
        first, last = map(pool, self._ends.choose())
        lost = self._count_lost_rows()
        summary = {
            "steps": len(self.history),
            "prompts": self._prompts,
            "rewards_out_of_range": dict(self.rewards.outside),
            "reward_policy_first": first.get("reward"),
            "reward_policy_last": last.get("reward"),
            "exact_first": first.get("metrics", {}).get("exact"),
            "exact_last": last.get("metrics", {}).get("exact"),
            "policy_first": first,
            "policy_last": last,
            **({"environments": self.failure_rates.measure(self._labels)} if self._labels else {}),
            **({"evals": evals} if (evals := self.evals.summary) else {}),
            **self.evals.best_checkpoint,
            "rollouts": {
                "generated": counts.rollouts_generated,
                "trained": counts.rollouts_trained,
                "discarded": counts.rollouts_discarded,
                "cancelled": counts.rollouts_cancelled,
                "failed": counts.rollouts_failed,
                "retried": counts.rollouts_retried,
            },
            "failures": counts.failures,
            "updates_skipped": self.updates_skipped,
            "restarts": dict(self.restarts),
            "groups": {state: number for state, number in counts.groups_by_state.items() if number},
            "reasons": counts.reasons,
            "age": {"mean": counts.age_mean, "max": counts.age_max},
            "tokens": {
                **self.tokens,
                "trained": counts.tokens_trained,
                "discarded": counts.tokens_discarded,
                "lost": counts.tokens_lost,
            },
            "seconds": {name: round(value, 3) for name, value in self._count_seconds().items()},
            "log": {"rows_dropped": lost.dropped, "rows_unlogged": lost.unlogged},
            **fields,
        }
        text = orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode()
        self._write(self._run.summary_json, text + "\n", durable=True)

    def _write(self, path: Path, text: str, *, durable: bool) -> None:
        """A disk that takes no status ends no run; it is said once a file."""
        try:
            write_atomically(path, self._redactor.json_line(text.encode()).decode(), durable=durable)
        except OSError as error:
            if path not in self._unwritable:
                log.error("%s cannot be written (%s): the run goes on without", path, error.strerror)
            self._unwritable.add(path)
        else:
            self._unwritable.discard(path)


def _pick_environment(metrics: Mapping[str, float], label: str) -> dict[str, float | None]:
    """Of the versions that a step tells of; None where they have none of it."""
    names = {"reward": "reward", "rollouts": "rollouts", "exact": "sample/exact", "exact_rollouts": "sample/exact/count"}
    return {name: metrics.get(f"env/{label}/{metric}") for name, metric in names.items()}


def _limit_first_wait(timings: Mapping[str, float], seconds: float) -> dict[str, float]:
    """A trainer waits from its own start on, and the first step's time begins when the last process is there: `seconds` ago."""
    most = max(0.0, seconds - timings.get("timing_step_active", 0.0))
    limited = {name: min(value, most) for name, value in timings.items() if name == "timing_waiting_for_data"}
    return dict(timings) | limited


def _describe_left_out(count: int, broken: int) -> str:
    """`1 update left out, as a gradient was not a finite number`: of `count` updates `broken` for that."""
    whys = ((broken, "a gradient was not a finite number"), (count - broken, "filters left nothing to train"))
    return "; ".join(f"{number} update{'s' * (number > 1)} left out, as {why}" for number, why in whys if number > 0)


def _schedule(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From the log's thread to the loop; a loop that has ended needs no more acknowledgements."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _measure_groups(batch: TrainBatch) -> dict[str, float]:
    """How unequal the trained groups are within themselves, in length and in reward."""
    groups = [rollout.order.group_id for rollout in batch.rollouts]
    rewards = [rollout.result.reward for rollout in batch.rollouts]
    lengths = [rollout.result.completion_tokens for rollout in batch.rollouts]
    measured = {
        "reward/trained/group_gini": group_mean(gini, rewards, groups),
        "group_length_gini_mean": group_mean(gini, lengths, groups),
        "group_length_max_median_ratio_mean": group_mean(max_median_ratio, lengths, groups),
    }
    return {
        "reward/trained": float(np.mean(rewards)),
        "reward/trained/rollouts": float(len(rewards)),
        "rollouts/trained_completion_tokens/mean": float(np.mean(lengths)),
        **{name: value for name, value in measured.items() if value is not None},
    }


def make_order_row(order: RolloutOrder) -> dict[str, Any]:
    """What was ordered, whatever came of it."""
    return {
        "rollout_id": order.rollout_id,
        "attempt": order.attempt,
        "group_id": order.group_id,
        "sample": order.sample,
        "environment": order.prompt.environment,
        "split": order.prompt.split,
        "index": order.prompt.index,
        "seed": order.seed,
    }


def make_rollout_row(rollout: Rollout) -> dict[str, Any]:
    """A scored rollout, without its arrays."""
    result, versions, logprobs = rollout.result, rollout.versions, rollout.logprobs
    return {
        **make_order_row(rollout.order),
        "reward": result.reward,
        "length_penalty": rollout.length_penalty,
        "metrics": result.metrics,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "turns": result.turns,
        "finish_reason": result.finish_reason,
        "version_first": int(versions.min(initial=np.iinfo(np.int32).max)) if len(versions) else None,
        "version_last": int(versions.max(initial=-1)) if len(versions) else None,
        "logprob_mean": float(logprobs.mean()) if len(logprobs) else None,
        "temperature": result.temperature,
        "worker": rollout.worker,
        "started_ns": result.started_ns,
        "generated_ns": result.generated_ns,
        "scored_ns": result.scored_ns,
        "prompt": result.prompt_text,
        "completion": result.completion_text,
        "golden_answers": list(result.golden_answers),
        "tags": list(result.tags),
        "info": _decode_info(result.info),
        "turn_rewards": list(result.turn_rewards or ()),
    }


def _decode_info(text: str) -> Any:
    """What a worker sent as JSON; other text stays text."""
    try:
        return orjson.loads(text) if text else {}
    except orjson.JSONDecodeError:
        return text


MAX_TOKENS = 200_000
"""Of one step; a rollout that would go beyond is left out."""


def make_token_rows(batch: TrainBatch, groups: int) -> Iterator[dict[str, Any]]:
    """One row a branch of each rollout of the step's first `groups` groups. `versions` and `logprobs` are those of the sampled
    tokens alone, in their order."""
    wanted, left = set(batch.command.group_ids[:groups]), MAX_TOKENS
    for place, rollout in enumerate(batch.rollouts):
        if rollout.order.group_id not in wanted or rollout.tokens > left:
            continue
        left -= rollout.tokens
        turns = place_turns(rollout, batch.turns, place)
        for number, (branch, own) in enumerate(zip(rollout.branches, turns, strict=True)):
            sampled = branch.mask.astype(bool)
            yield {
                "step": batch.command.step,
                "group_id": rollout.order.group_id,
                "rollout_id": rollout.order.rollout_id,
                "branch": number,
                "reward": rollout.result.reward,
                "advantage": float(batch.advantages[place]),
                "turns": [list(pair) for pair in own or ()],
                "filtered": list(batch.filters[place]),
                "temperature": rollout.result.temperature,
                "ids": branch.ids.tolist(),
                "mask": branch.mask.tolist(),
                "versions": branch.versions[sampled].tolist(),
                "logprobs": [round(value, 6) for value in branch.logprobs[sampled].tolist()],
            }
