"""What the rows and files of a run directory say, as numbers: all that `telescope show` prints and its rules rest on.

Works on a run that goes on, has ended, failed or is damaged: what can't be used is named in `damaged`, and what it would have
said is missing. Reads `NEWEST` rows of the large streams at most. Refuses to judge (advice.py does).
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np

from telescope.cli.show.curves import NumberCurve, bound, make_curve
from telescope.config.models import embedded_models
from telescope.config.redacted_output import hide_variables
from telescope.config.secrets import find_references
from telescope.flow.group_lifecycle import OFF_POLICY
from telescope.flow.groups import GroupState
from telescope.runlog import checkpoints
from telescope.runlog.eval_words import describe_reward
from telescope.runlog.files import DamagedFile, read_bytes, read_json
from telescope.runlog.layout import RunDirectory
from telescope.runlog.opening import RunLook, look, read_or_note
from telescope.runlog.reader import newest_rows

NEWEST = 200_000
"""Rows read of `rollouts`, `turns` and `groups`, the newest ones: a large run has millions."""
SAMPLED_FROM = 2_000
"""Newest scored rollouts among which answers are chosen."""
WARM_UP_STEPS = 1
"""Left out of the times where more than three times as many follow: kernels are loaded and buffers grow."""
FORMAT_METRICS = ("valid_format", "format", "well_formed", "parsed")
"""Names under which environments tell the share of answers that could be parsed."""
LONGEST_COMMAND = 128 << 10
"""Characters of a command line that is read."""
TEXT_CHARACTERS = 4_000
"""Kept of a prompt and of an answer, at its end."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What rules ask of the configuration, by the settings' own names; None where config.json does not say it."""

    model: str = ""
    """`model.name`"""
    embedded: bool = False
    """It ships with Telescope, and is small enough for any machine's CPU."""
    number_of_steps: int | None = None
    learning_rate: float | None = None
    group_size: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    max_model_len: int | None = None
    seq_len: int | None = None
    max_async_rollout: int | None = None
    max_off_policy_steps: int | None = None
    max_concurrent_prompts_per_server: int | None = None
    prompts_batch_size_for_trainer: int | None = None
    env_num_workers: int | None = None
    kl_ref_coef: float | None = None
    discard_group_zero_advantage: bool = True
    pass_above: float = 0.5
    """An answer whose reward is above it is right (`eval.pass_above`)."""
    fake: bool = False
    """Servers or trainer have no model: their log-probs need not agree."""
    environments: tuple[str, ...] = ()
    environment_names: dict[str, str] = {}
    """What each label plays."""
    environment_max_tokens: dict[str, int] = {}
    """By label, of the environments that have a limit of their own."""
    checkpoint_dir: str | None = None


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of training prompts, by what became of them."""

    begun: int = 0
    complete: int = 0
    discarded: int = 0
    """All of their rewards were equal."""
    discarded_all_zero: int = 0
    discarded_reward: float | None = None
    """Mean reward of these, where it is known."""
    too_old: int = 0
    failed: int = 0
    reasons: tuple[tuple[str, int], ...] = ()
    """Why groups failed or were cancelled for another reason, the commonest first."""

    @property
    def equal_share(self) -> float:
        """Of the groups that were scored to the end."""
        return self.discarded / self.complete if self.complete else 0.0


class EnvironmentFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts at one environment's rollouts that have ended, of the newest rows."""

    label: str
    scored: int
    failed: int
    reward: float | None
    """Mean of those that were scored."""
    best_reward: float | None = None
    """The highest of these."""
    truncated: int
    """Scored answers that ended at the limit on tokens."""
    causes: tuple[tuple[str, int], ...] = ()
    """Of failures, the commonest first, as `failure: cause`."""
    equal_groups: int = 0
    """Whose rewards were all equal."""
    equal_all_zero: int = 0
    equal_reward: float | None = None
    """Mean reward of these."""
    form: NumberCurve | None = None
    """Share of answers that could be parsed, by version; None where it says none."""

    @property
    def failed_share(self) -> float:
        return self.failed / max(1, self.failed + self.scored)


class EvalFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One eval over the run."""

    name: str
    reward: NumberCurve
    steps: tuple[int, ...]
    error: float | None
    """Standard error of the last reward."""
    words: str
    """The last reward with how sure it is, as at the end of a run (`eval_words`)."""
    prompts: int | None = None
    """Of the last."""


class ShownSample(msgspec.Struct, frozen=True, kw_only=True):
    """A scored rollout with its text; the ends of prompt and answer where these are long."""

    rollout_id: int
    environment: str
    reward: float
    finish_reason: str
    prompt: str
    answer: str
    golden_answers: tuple[str, ...]


class RepeatedAlert(msgspec.Struct, frozen=True, kw_only=True):
    """Alerts of one source that differ in numbers alone: how many, and the latest of them."""

    source: str
    level: str
    count: int
    message: str


class TimeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of the steps went; shares are of it. None where no row says it."""

    steps: int
    step_s: float
    """Median."""
    trainer_works: float
    trainer_waits: float
    """For a batch: the trainer had no order."""
    checkpoint_stall: float
    other: float
    """What is left: weights on their way, bookkeeping."""
    weight_update_s: float | None
    """Median, from the order to publish until the last server serves the version."""
    pause_share: float | None
    """That engines sampled nothing, for new weights."""
    servers: int
    servers_generate: float | None
    """Share of the time in which a server has a request, the mean over servers."""
    requests_at_once: float | None
    """Of a server, while it has any."""
    queued_s: float | None
    """Mean wait of a request on its server."""
    generating_s: float | None
    scoring_s: float | None
    """Means of a rollout: from its start to its last token, and from there to its reward."""
    slowest_ratio: float | None
    """A rollout's time from start to reward: its 95th percentile by its median."""

    @property
    def servers_idle(self) -> float | None:
        return None if self.servers_generate is None else max(0.0, 1 - self.servers_generate)


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    run_dir: str
    state: str = ""
    step: int = 0
    reason: str = ""
    not_ready: tuple[str, ...] = ()
    """Processes that the run waits for, or waited for at its end, before anything is generated."""
    settings: RunSettings = RunSettings()
    arguments: tuple[str, ...] | None = ()
    """Of the command line that began the run; None where it is not known, or was one that went on with it."""
    checkpoints: tuple[int, ...] = ()
    """Steps that the run can go on from."""
    saved: tuple[int, ...] = ()
    """Steps whose weights are saved, with what a run needs to go on or without."""
    best_version: int | None = None
    """Of the weights, in the middle of where the reward was best."""
    curves: tuple[NumberCurve, ...] = ()
    reward_unfinished: int = 0
    """Rollouts that count in no reward: cancelled, failed, or under way at the end."""
    groups: GroupFigures = GroupFigures()
    environments: tuple[EnvironmentFigures, ...] = ()
    evals: tuple[EvalFigures, ...] = ()
    wrong: tuple[ShownSample, ...] = ()
    right: tuple[ShownSample, ...] = ()
    samples_from: int = 0
    """How many rollouts these were chosen from."""
    alerts: tuple[RepeatedAlert, ...] = ()
    time: TimeFigures | None = None
    updates_skipped: int = 0
    updates: int = 0
    cut: tuple[str, ...] = ()
    """Streams of which the newest `NEWEST` rows alone were read, as they have more."""
    damaged: tuple[str, ...] = ()

    def find(self, name: str) -> NumberCurve | None:
        """The curve of that name."""
        return next((curve for curve in self.curves if curve.name == name), None)


def read_figures(run: RunDirectory, state: str, samples: int) -> RunFigures:
    """`state`: as `telescope runs list` calls it; `samples`: of wrong and of right answers. Raises nothing for what lies in the
    directory."""
    seen = look(run)
    damaged: list[DamagedFile] = list(seen.damaged)
    settings = read_run_settings(run, damaged)
    steps = _by_number(newest_rows(run, "step_metrics", damaged), "step")
    policy = _by_number(newest_rows(run, "policy", damaged), "version")
    rollouts, newest = _RolloutTally(), _NewestRows(run, damaged)
    groups = _read_groups(newest, rollouts)
    times = read_times(newest, list(steps.values()), rollouts)
    wrong, right, chosen_from = read_samples(run, damaged, settings.pass_above, samples)
    metrics = [_metrics_of(row) for row in steps.values()]
    whole_rows = [row for row in policy.values() if not row.get("cut_off")] or [*policy.values()]
    whole = [*map(_metrics_of, whole_rows)]
    curves = tuple(make_curves(metrics, whole, settings.environments))
    return RunFigures(
        run_dir=str(run.path),
        state=state,
        step=max([seen.status.step or 0, *steps]),
        reason=" ".join(seen.reason.split()) if state in ("failed", "stopped") else "",
        not_ready=seen.status.missing if seen.status.state == "starting" else (),
        settings=settings,
        arguments=read_arguments(run, seen, damaged),
        checkpoints=tuple(_list_checkpoints(run, settings, checkpoints.steps_with_state)),
        saved=tuple(_list_checkpoints(run, settings, checkpoints.steps)),
        best_version=_find_best_version(curves, whole_rows),
        curves=curves,
        reward_unfinished=int(sum(one.get("reward/policy/unfinished", 0) for one in map(_metrics_of, policy.values()))),
        groups=groups,
        environments=tuple(
            msgspec.structs.replace(one, form=_make_form(one.label, whole)) for one in rollouts.list_environments()
        ),
        evals=tuple(read_evals(run, damaged)),
        wrong=wrong,
        right=right,
        samples_from=chosen_from,
        alerts=read_alerts(newest),
        time=times,
        updates_skipped=int(sum(one.get("update_skipped", 0) for one in metrics)),
        updates=int(sum(one.get("updates", 0) for one in metrics)),
        cut=tuple(newest.cut),
        damaged=tuple(dict.fromkeys(map(str, damaged))),
    )


# ---- files


def read_run_settings(run: RunDirectory, damaged: list[DamagedFile]) -> RunSettings:
    """A configuration that was edited is read as it is: nothing is computed with it."""
    nothing: dict[str, Any] = {}
    held = read_or_note(lambda: read_json(run.config_json, dict[str, Any]), damaged, nothing)
    hide_variables(find_references(held))

    def section(name: str) -> Mapping[str, Any]:
        found = held.get(name)
        return found if isinstance(found, dict) else {}

    rollout, trainer, inference, flow = map(section, ("rollout", "trainer", "inference", "orchestrator"))
    place = section("checkpoint").get("dir")
    fake = "fake" in (inference.get("engine"), section("backend").get("name"))
    environments = {label: own for label, own in section("environments").items() if isinstance(own, dict)}
    model = section("model").get("name")
    return RunSettings(
        model=model if isinstance(model, str) else "",
        embedded=model in embedded_models(),
        number_of_steps=_whole(held, "number_of_steps"),
        learning_rate=_number(trainer, "learning_rate"),
        group_size=_whole(rollout, "group_size"),
        temperature=_number(rollout, "temperature"),
        max_tokens=_whole(rollout, "max_tokens"),
        max_model_len=_whole(inference, "max_model_len"),
        seq_len=_whole(trainer, "seq_len"),
        max_async_rollout=_whole(flow, "max_async_rollout"),
        max_off_policy_steps=_whole(flow, "max_off_policy_steps"),
        max_concurrent_prompts_per_server=_whole(flow, "max_concurrent_prompts_per_server"),
        prompts_batch_size_for_trainer=_whole(flow, "prompts_batch_size_for_trainer"),
        env_num_workers=_whole(section("cluster"), "env_num_workers"),
        kl_ref_coef=_number(section("algorithm"), "kl_ref_coef"),
        discard_group_zero_advantage=flow.get("discard_group_zero_advantage") is not False,
        pass_above=_number(section("eval"), "pass_above", 0.5) or 0.0,
        fake=fake,
        environments=tuple(environments),
        environment_names={label: str(own.get("name", label)) for label, own in environments.items()},
        environment_max_tokens={
            label: limit for label, own in environments.items() if (limit := _whole(own, "max_tokens")) is not None
        },
        checkpoint_dir=place if isinstance(place, str) else None,
    )


def read_arguments(run: RunDirectory, seen: RunLook, damaged: list[DamagedFile]) -> tuple[str, ...] | None:
    """Of cmdline.txt, without `run_dir`, which no other run can have; None, too, of one that is too long to be typed."""
    text = read_or_note(lambda: read_bytes(run.cmdline).decode("utf-8", "replace"), damaged, "")
    if len(text) > LONGEST_COMMAND:  # to take 16 MB apart would take half a minute
        return None
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    place = words.index("telescope.run") + 1 if "telescope.run" in words else None
    if place is None or len(seen.attempts) > 1 or any(word.startswith("checkpoint.resume=") for word in words):
        return None
    return tuple(word for word in words[place:] if not word.startswith("run_dir="))


def _list_checkpoints(run: RunDirectory, settings: RunSettings, which: Callable[[Path], list[int]]) -> list[int]:
    """By the folders themselves: rows tell also of what was deleted since."""
    try:
        return which(checkpoints.root(run, settings.checkpoint_dir))
    except OSError:  # advice does without
        return []


# ---- curves


def make_curves(
    steps: Sequence[Mapping[str, float]],
    policy: Sequence[Mapping[str, float]],
    environments: Sequence[str],
) -> Iterator[NumberCurve]:
    """Of the metrics of steps and of versions, in the order in which they are shown. What the rows do not have is left out."""
    kl = next((name for name in ("kl_ref", "kl_rollout") if any(name in one for one in steps)), "kl_divergence_inference")
    form = next((name for name in FORMAT_METRICS if any(f"sample/{name}" in one for one in policy)), FORMAT_METRICS[0])
    known = sorted({*environments, *(name.split("/")[1] for one in policy for name in one if name.startswith("env/"))})
    rollouts = [one.get("reward/policy/rollouts", 1.0) for one in policy]
    of_policy: list[tuple[str, Iterable[float | None], Sequence[float]]] = [
        ("reward/policy", _column(policy, "reward/policy"), rollouts),
        ("exact", _column(policy, "sample/exact"), rollouts),
        *(
            (
                f"reward {label}",
                _column(policy, f"env/{label}/reward"),
                [one.get(f"env/{label}/rollouts", 1.0) for one in policy],
            )
            for label in known
            if len(known) > 1
        ),
        ("format", _column(policy, f"sample/{form}"), rollouts),
        ("answer tokens", _column(policy, "rollouts/completion_tokens/mean"), rollouts),
        ("cut off %", _column(policy, "rollouts/stop_reason_length_pct"), rollouts),
        ("equal groups %", map(_equal_pct, policy), rollouts),
    ]
    of_steps: list[tuple[str, Iterable[float | None]]] = [
        ("failed %", _failed_pct(steps)),
        ("entropy", _column(steps, "entropy")),
        ("kl", _column(steps, kl)),
        ("gradient", _column(steps, "grad_norm")),
        ("clipped %", (None if one is None else 100 * one for one in _column(steps, "clip_fraction"))),
        ("staleness", _column(steps, "staleness_mean")),
        ("logprob gap", _column(steps, "logprob_difference")),
    ]
    for name, values, weights in of_policy:
        pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
        if curve := make_curve(name, [value for value, _ in pairs], [weight for _, weight in pairs]):
            yield curve
    for name, values in of_steps:
        if curve := make_curve(name, [value for value in values if value is not None]):
            yield curve


def _find_best_version(curves: Iterable[NumberCurve], rows: Sequence[Mapping[str, Any]]) -> int | None:
    """`rows`: of versions, those that the curve of the reward is made of."""
    reward = next((curve for curve in curves if curve.name == "reward/policy"), None)
    known = [row["version"] for row in rows if "reward/policy" in _metrics_of(row)]
    return known[reward.best_at] if reward is not None and reward.count == len(known) else None


def _make_form(label: str, policy: Sequence[Mapping[str, float]]) -> NumberCurve | None:
    """The share of an environment's answers that could be parsed."""
    names = (f"env/{label}/sample/{name}" for name in FORMAT_METRICS)
    form = next((name for name in names if any(name in one for one in policy)), "")
    known = [one for one in policy if form in one]
    return make_curve(f"format {label}", [one[form] for one in known], [one.get(f"{form}/count", 1.0) for one in known])


def _column(rows: Iterable[Mapping[str, float]], name: str) -> Iterator[float | None]:
    return (row.get(name) for row in rows)


def _equal_pct(metrics: Mapping[str, float]) -> float | None:
    begun, equal = metrics.get("groups/begun"), metrics.get("groups/discarded")
    return None if not begun or equal is None else 100 * equal / begun


def _failed_pct(steps: Iterable[Mapping[str, float]]) -> Iterator[float]:
    """Of the attempts that ended in a step; nothing in a run without a failure."""
    counts = [
        (sum(value for name, value in one.items() if name.startswith("rollouts/failed/")), one.get("rollouts/scored", 0.0))
        for one in steps
    ]
    if any(failed for failed, _ in counts):
        yield from (100 * failed / (failed + scored) for failed, scored in counts if failed + scored)


# ---- groups and rollouts


@dataclass
class _RolloutTally:
    """Attempts by environment, and the times of those that were scored."""

    scored: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    causes: dict[str, Counter[str]] = field(default_factory=dict)
    equal: dict[str, dict[int, float]] = field(default_factory=dict)
    """The reward of each group whose rewards were all equal."""
    generating_s: list[float] = field(default_factory=list)
    scoring_s: list[float] = field(default_factory=list)

    def add(self, row: Mapping[str, Any]) -> None:
        label = str(row.get("environment", ""))
        match row.get("status"):
            case "error":
                self.failed[label] += 1
                cause = f"{row.get('failure', 'failure')}: {' '.join(str(row.get('cause', '')).split())}"
                self.causes.setdefault(label, Counter())[cause[:300]] += 1
            case "scored":
                self.scored[label] += 1
                self.truncated[label] += row.get("finish_reason") == "length"
                reward = _number(row, "reward") or 0.0
                self.rewards[label] = self.rewards.get(label, 0.0) + reward
                self.best[label] = max(self.best.get(label, reward), reward)
                started, generated, scored = (_number(row, f"{name}_ns") for name in ("started", "generated", "scored"))
                if started and generated and scored:
                    self.generating_s.append(max(0.0, generated - started) / 1e9)
                    self.scoring_s.append(max(0.0, scored - generated) / 1e9)

    def list_environments(self) -> tuple[EnvironmentFigures, ...]:
        return tuple(
            EnvironmentFigures(
                label=label,
                scored=self.scored[label],
                failed=self.failed[label],
                reward=self.rewards[label] / self.scored[label] if self.scored[label] else None,
                best_reward=self.best.get(label),
                truncated=self.truncated[label],
                causes=tuple(self.causes.get(label, Counter()).most_common(5)),
                equal_groups=len(equal := self.equal.get(label, {})),
                equal_all_zero=sum(reward == 0 for reward in equal.values()),
                equal_reward=fmean(equal.values()) if equal else None,
            )
            for label in sorted({*self.scored, *self.failed})
        )


def _read_groups(newest: _NewestRows, rollouts: _RolloutTally) -> GroupFigures:
    """Counts of groups; fills `rollouts` on the way, which tell what equal groups got."""
    begun: set[int] = set()
    states: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    discarded: set[int] = set()
    for row in newest.read("groups", ("group_id", "state", "reason")):
        group, state, reason = row.get("group_id"), row.get("state"), str(row.get("reason", ""))
        if not isinstance(group, int):
            continue
        begun.add(group)
        if state == GroupState.DISCARDED:
            discarded.add(group)
        too_old = state == GroupState.CANCELLED and reason == OFF_POLICY
        states["too old" if too_old else str(state)] += 1
        if state in (GroupState.CANCELLED, GroupState.FAILED) and not too_old:
            reasons[f"{state}: {' '.join(reason.split())[:300]}"] += 1
    wanted = ("environment", "status", "failure", "cause", "reward", "finish_reason", "group_id")
    for row in newest.read("rollouts", (*wanted, "started_ns", "generated_ns", "scored_ns")):
        rollouts.add(row)
        reward = _number(row, "reward")
        if row.get("status") == "scored" and row.get("group_id") in discarded and reward is not None:
            rollouts.equal.setdefault(str(row.get("environment", "")), {})[row["group_id"]] = reward
    equal = [reward for own in rollouts.equal.values() for reward in own.values()]
    return GroupFigures(
        begun=len(begun),
        complete=states[GroupState.COMPLETE],
        discarded=len(discarded),
        discarded_all_zero=sum(reward == 0 for reward in equal),
        discarded_reward=fmean(equal) if equal else None,
        too_old=states["too old"],
        failed=states[GroupState.FAILED],
        reasons=tuple(reasons.most_common(5)),
    )


def read_samples(
    run: RunDirectory, damaged: list[DamagedFile], pass_above: float, count: int
) -> tuple[tuple[ShownSample, ...], tuple[ShownSample, ...], int]:
    """Wrong and right answers among the newest scored rollouts, `count` of each at most and of as many prompts and environments
    as there are; and how many rollouts they were chosen from. Where all are right, or none is, the other side is empty."""
    wrong: dict[tuple[str, Any], ShownSample] = {}
    right: dict[tuple[str, Any], ShownSample] = {}
    looked = 0
    wanted = ("environment", "index", "rollout_id", "status", "reward", "finish_reason", "prompt", "completion")
    for row in newest_rows(run, "rollouts", damaged, (*wanted, "golden_answers") if count else ("status",)):
        reward = _number(row, "reward")
        if row.get("status") != "scored" or reward is None:
            continue
        looked += 1
        side = right if reward > pass_above else wrong
        side.setdefault((str(row.get("environment", "")), row.get("index")), _make_sample(row, reward))
        if looked >= SAMPLED_FROM or not count:
            break
    return _choose(wrong.values(), count), _choose(right.values(), count), looked


def _choose(samples: Iterable[ShownSample], count: int) -> tuple[ShownSample, ...]:
    """The newest ones, from each environment in turn."""
    ordered = sorted(samples, key=lambda one: one.environment)  # stable: the newest first within each
    turns = [list(found) for _, found in groupby(ordered, key=lambda one: one.environment)]
    longest = max(map(len, turns), default=0)
    return tuple([found[place] for place in range(longest) for found in turns if place < len(found)][:count])


def _make_sample(row: Mapping[str, Any], reward: float) -> ShownSample:
    golden = row.get("golden_answers")
    return ShownSample(
        rollout_id=int(row.get("rollout_id", -1)),
        environment=str(row.get("environment", "")),
        reward=reward,
        finish_reason=str(row.get("finish_reason", "")),
        prompt=str(row.get("prompt", ""))[-TEXT_CHARACTERS:],
        answer=str(row.get("completion", ""))[-TEXT_CHARACTERS:],
        golden_answers=tuple(map(str, golden)) if isinstance(golden, list) else (),
    )


# ---- evals and alerts


def read_evals(run: RunDirectory, damaged: list[DamagedFile]) -> Iterator[EvalFigures]:
    """Of those that were played to the end."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in newest_rows(run, "evals", damaged):
        if row.get("state") == "complete" and isinstance(row.get("step"), int) and _number(row, "reward") is not None:
            found.setdefault(str(row.get("eval")), {}).setdefault(row["step"], row)
    for name, by_step in sorted(found.items()):
        steps = tuple(sorted(by_step))
        curve = make_curve(name, [_number(by_step[step], "reward") or 0.0 for step in steps])
        if curve is not None:
            last = by_step[steps[-1]]
            error, prompts = _number(last, "reward_error"), _whole(last, "prompts")
            yield EvalFigures(name=name, reward=curve, steps=steps, error=error, prompts=prompts, words=describe_reward(last))


def read_alerts(newest: _NewestRows) -> tuple[RepeatedAlert, ...]:
    """By source and message, numbers apart; the commonest first."""
    counts: Counter[tuple[str, str]] = Counter()
    latest: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in newest.read("alerts"):
        key = str(row.get("source", "")), re.sub(r"\d+", "#", str(row.get("message", "")))
        counts[key] += 1
        latest.setdefault(key, row)
    return tuple(
        RepeatedAlert(
            source=key[0],
            level=str(latest[key].get("level", "")),
            count=count,
            message=" ".join(str(latest[key].get("message", "")).split()),
        )
        for key, count in counts.most_common()
    )


# ---- times


def read_times(newest: _NewestRows, steps: Sequence[Mapping[str, Any]], rollouts: _RolloutTally) -> TimeFigures | None:
    """None without a step. `steps`: rows of step_metrics, by step."""
    steps = steps[WARM_UP_STEPS:] if len(steps) > 4 * WARM_UP_STEPS else steps
    metrics = [_metrics_of(row) for row in steps]
    took = [one.get("timing_step_total", 0.0) for one in metrics]
    total = sum(took)
    if not total:
        return None

    def share(name: str) -> float:
        return min(1.0, sum(one.get(name, 0.0) for one in metrics) / total)

    works, waits, stall = share("timing_step_active"), share("timing_waiting_for_data"), share("timing_checkpoint_stall")
    updates = [one["timing_weight_sync/total"] for one in metrics if "timing_weight_sync/total" in one]
    windows = [
        (row["time_ns"] / 1e9 - seconds, row["time_ns"] / 1e9)
        for row, seconds in zip(steps, took, strict=True)
        if isinstance(row.get("time_ns"), int)
    ]
    requests, queued = _read_requests(newest)
    busy = [measure_overlap(found, windows) for found in requests.values()]
    whole = [sum(pair) for pair in zip(rollouts.generating_s, rollouts.scoring_s, strict=True)]
    return TimeFigures(
        steps=len(steps),
        step_s=median(took),
        trainer_works=works,
        trainer_waits=waits,
        checkpoint_stall=stall,
        other=max(0.0, 1 - works - waits - stall),
        weight_update_s=median(updates) if updates else None,
        pause_share=share("timing_weight_sync/pause/max") if updates else None,
        servers=len(requests),
        servers_generate=fmean(covered for covered, _ in busy) if busy else None,
        requests_at_once=fmean(at_once for _, at_once in busy) if busy else None,
        queued_s=fmean(queued) if queued else None,
        generating_s=fmean(rollouts.generating_s) if rollouts.generating_s else None,
        scoring_s=fmean(rollouts.scoring_s) if rollouts.scoring_s else None,
        slowest_ratio=float(np.quantile(whole, 0.95)) / max(median(whole), 1e-9) if whole else None,
    )


def _read_requests(newest: _NewestRows) -> tuple[dict[str, list[tuple[float, float]]], list[float]]:
    """When each server worked on a request, in seconds of the wall clock; and how long requests waited there."""
    requests: dict[str, list[tuple[float, float]]] = {}
    queued: list[float] = []
    for row in newest.read("turns", ("server", "done_ns", "queued_s", "generated_s")):
        done, generated = _number(row, "done_ns"), _number(row, "generated_s")
        if done is None or generated is None:
            continue
        requests.setdefault(str(row.get("server", "")), []).append((done / 1e9 - generated, done / 1e9))
        queued.append(_number(row, "queued_s") or 0.0)
    return requests, queued


def measure_overlap(requests: Sequence[tuple[float, float]], windows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Which share of the windows some request covers, and how many there are at once, on average, where one is. Windows that
    begin before the first request are taken from there on.

    Requests (0, 2) and (1, 3) in the window (0, 4): 0.75, and 4/3 at once."""
    first = min((begin for begin, _ in requests), default=0.0)
    windows = [(max(begin, first), end) for begin, end in windows if end > first]
    length = sum(end - begin for begin, end in windows)
    if not requests or length <= 0:
        return 0.0, 0.0
    covered = summed = 0.0
    edges = np.array(sorted([(begin, 1) for begin, _ in requests] + [(end, -1) for _, end in requests]))
    at, running = edges[:, 0], np.cumsum(edges[:, 1])
    for begin, end in windows:
        low, high = np.searchsorted(at, begin, side="right"), np.searchsorted(at, end, side="left")
        times = np.concatenate([[begin], at[low:high], [end]])
        counts = np.concatenate([[running[low - 1] if low else 0], running[low:high]])
        spans = np.diff(times)
        covered += float(spans[counts > 0].sum())
        summed += float((spans * counts).sum())
    return min(1.0, covered / length), summed / covered if covered else 0.0


# ---- rows


@dataclass
class _NewestRows:
    """Reads large streams. `cut`: those that have more than `NEWEST` rows."""

    run: RunDirectory
    damaged: list[DamagedFile]
    cut: list[str] = field(default_factory=list)

    def read(self, stream: str, columns: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
        for place, row in enumerate(newest_rows(self.run, stream, self.damaged, columns)):
            if place == NEWEST:
                self.cut.append(stream)
                return
            yield row


def _by_number(found: Iterator[dict[str, Any]], name: str) -> dict[int, dict[str, Any]]:
    """By step or version, in that order; the newest row of each."""
    rows: dict[int, dict[str, Any]] = {}
    for row in found:
        if isinstance(row.get(name), int):
            rows.setdefault(row[name], row)
    return dict(sorted(rows.items()))


def _metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Those that are numbers."""
    metrics = row.get("metrics")
    found = metrics if isinstance(metrics, dict) else {}
    return {name: number for name in found if (number := _number(found, name)) is not None}


def _number(row: Mapping[str, Any], name: str, otherwise: float | None = None) -> float | None:
    """Within what can be computed with (`bound`)."""
    value = row.get(name)
    return (
        bound(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) else otherwise
    )


def _whole(row: Mapping[str, Any], name: str) -> int | None:
    value = row.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
