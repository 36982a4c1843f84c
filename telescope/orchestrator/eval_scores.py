"""What evals have scored so far, and the numbers of one that has ended. Pure: writes nothing.

A sample that was given up counts as not passed, and with the lowest reward there is: leaving it out would raise a score
wherever hard prompts are those that fail. How many there were stands beside each score, and so does the mean over the scored
ones alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from telescope.maths.evals import interval, pass_at_k, pass_power_k, share_interval, standard_error
from telescope.maths.summaries import mean
from telescope.orchestrator.rollout_store import Rollout
from telescope.records import Record
from telescope.runlog.eval_words import describe_reward


class SampleScore(Record):
    """One scored sample, as far as its eval's numbers follow from it. Versions are those of its tokens, -1 where there is
    none."""

    reward: float
    metrics: dict[str, float]
    completion_tokens: int
    truncated: bool
    version_first: int
    version_last: int

    @classmethod
    def of(cls, rollout: Rollout) -> SampleScore:
        result, versions = rollout.result, rollout.versions
        return cls(
            result.reward,
            result.metrics,
            result.completion_tokens,
            result.finish_reason == "length",
            int(versions.min()) if len(versions) else -1,
            int(versions.max()) if len(versions) else -1,
        )


class EvalProgress(msgspec.Struct, forbid_unknown_fields=True):
    """An eval under way, its scores by rollout. `first_rollout`: id of its first; the others follow, prompt by prompt."""

    eval: str
    step: int
    prompts: int
    samples: int
    first_rollout: int
    scores: dict[int, SampleScore] = msgspec.field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.prompts * self.samples

    def has(self, rollout_id: int) -> bool:
        return 0 <= rollout_id - self.first_rollout < self.size


@dataclass(frozen=True)
class EvalScoring:
    """How an eval is scored. `reward_min`, `reward_max`: of its environment, where they are known. `setup`: how it is played,
    for its row."""

    pass_at_k: tuple[int, ...]
    pass_above: float
    reward_min: float | None = None
    setup: Mapping[str, Any] = field(default_factory=dict)
    reward_max: float | None = None


class EvalTally:
    """The evals under way."""

    def __init__(self, measures: Mapping[str, EvalScoring]) -> None:
        self._measures = measures
        self._under_way: list[EvalProgress] = []

    def save(self) -> tuple[EvalProgress, ...]:
        """A copy: what is scored later does not change it."""
        return tuple(msgspec.structs.replace(one, scores=dict(one.scores)) for one in self._under_way)

    def restore(self, progress: Sequence[EvalProgress]) -> None:
        self._under_way = [msgspec.structs.replace(one, scores=dict(one.scores)) for one in progress]

    def begin(self, progress: EvalProgress) -> None:
        self._under_way.append(progress)

    def find(self, rollout_id: int) -> EvalProgress | None:
        """The eval under way that the sample is of."""
        return next((one for one in self._under_way if one.has(rollout_id)), None)

    def add(self, rollout: Rollout) -> None:
        """A sample has its score, which counts."""
        progress = self.find(rollout.order.rollout_id)
        if progress is not None:
            progress.scores[rollout.order.rollout_id] = SampleScore.of(rollout)

    @property
    def under_way(self) -> tuple[tuple[str, int], ...]:
        """(name, step) of each."""
        return tuple((one.eval, one.step) for one in self._under_way)

    @property
    def described(self) -> str:
        """`eval gsm8k of step 20: 31 of 64 samples`; empty where none is under way."""
        return "; ".join(
            f"eval {one.eval} of step {one.step}: {len(one.scores)} of {one.size} samples" for one in self._under_way
        )

    def end(self, name: str, step: int, state: str, failed: int, unfinished: int) -> dict[str, Any]:
        """The row of an eval that has ended, whose scores are forgotten."""
        progress = next((one for one in self._under_way if (one.eval, one.step) == (name, step)), None)
        row: dict[str, Any] = {"eval": name, "step": step, "state": state, "failed": failed, "unfinished": unfinished}
        if progress is None:
            return row | {"prompts": 0, "samples": 0, "scored": 0}
        self._under_way.remove(progress)
        row |= {"prompts": progress.prompts, "samples": progress.samples, "scored": len(progress.scores)}
        if state != "complete":
            return row
        rules = self._measures[name]
        return row | measure(progress, rules) | {"setup": dict(rules.setup)}


def measure(progress: EvalProgress, rules: EvalScoring) -> dict[str, Any]:
    """The numbers of a complete eval. Its scores are all there are: every other sample was given up. Where none was scored, and
    the environment does not say how low its rewards go, there is no reward."""
    scores = list(progress.scores.values())
    floor = 0.0 if rules.reward_min is None else rules.reward_min
    lowest = min(floor, *(score.reward for score in scores)) if scores else floor
    rewards, passed = _by_prompt(progress, lowest, rules.pass_above)
    means = [mean(each) for each in rewards] if scores or rules.reward_min is not None else []
    whole, error = (mean(means), standard_error(means)) if means else (None, None)
    low, high = _find_interval(rewards, whole, error, rules) if whole is not None and error is not None else (None, None)
    versions = [version for score in scores for version in (score.version_first, score.version_last) if version >= 0]
    samples = progress.samples
    return {
        "truncated": sum(score.truncated for score in scores),
        "reward": whole,
        "reward_error": error,
        "reward_low": low,
        "reward_high": high,
        "reward_scored": mean([score.reward for score in scores]) if scores else None,
        "pass_above": rules.pass_above,
        "pass_at": {str(k): mean([pass_at_k(samples, count, k) for count in passed]) for k in rules.pass_at_k},
        "pass_all": {str(k): mean([pass_power_k(samples, count, k) for count in passed]) for k in rules.pass_at_k},
        "metrics": _average_metrics(scores),
        "completion_tokens": mean([score.completion_tokens for score in scores]) if scores else None,
        "version_first": min(versions, default=None),
        "version_last": max(versions, default=None),
    }


def _find_interval(
    rewards: Sequence[Sequence[float]], whole: float, error: float, rules: EvalScoring
) -> tuple[float, float] | tuple[None, None]:
    """Of the mean over prompts, within what rewards can be (docs/evals.md). None where all prompts are alike and the ends of
    their rewards do not say how far others may be."""
    seen = [reward for each in rewards for reward in each]
    ends = (rules.reward_min, rules.reward_max)
    if rules.reward_min is not None and rules.reward_max is not None and set(seen) <= set(ends):
        bottom, width = rules.reward_min, rules.reward_max - rules.reward_min
        share = min(max((whole - bottom) / width, 0.0), 1.0)
        low, high = share_interval(share, error / width, len(rewards), len(rewards[0]))
        return bottom + width * low, bottom + width * high
    if error == 0.0:
        return None, None
    low, high = interval(whole, error, len(rewards))
    return (
        low if rules.reward_min is None else max(low, min(rules.reward_min, *seen)),
        high if rules.reward_max is None else min(high, max(rules.reward_max, *seen)),
    )


def _by_prompt(progress: EvalProgress, lowest: float, pass_above: float) -> tuple[list[list[float]], list[int]]:
    """Rewards of each prompt's samples, and how many of them passed."""
    rewards, passed = [], []
    for prompt in range(progress.prompts):
        first = progress.first_rollout + prompt * progress.samples
        known = [progress.scores.get(first + sample) for sample in range(progress.samples)]
        rewards.append([lowest if score is None else score.reward for score in known])
        passed.append(sum(score is not None and score.reward > pass_above for score in known))
    return rewards, passed


def _average_metrics(scores: Sequence[SampleScore]) -> dict[str, float]:
    names = sorted({name for score in scores for name in score.metrics})
    return {name: mean([score.metrics[name] for score in scores if name in score.metrics]) for name in names}


def name_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """A complete eval's numbers as charts call them: `eval/gsm8k/reward`, `eval/gsm8k/pass@4`, `eval/gsm8k/metrics/exact`."""
    place = f"eval/{row['eval']}"
    plain = (
        "reward",
        "reward_error",
        "reward_low",
        "reward_high",
        "scored",
        "failed",
        "truncated",
        "completion_tokens",
        "seconds",
    )
    named = {f"{place}/{name}": row.get(name) for name in plain}
    named |= {f"{place}/pass@{k}": value for k, value in row["pass_at"].items()}
    named |= {f"{place}/pass^{k}": value for k, value in row["pass_all"].items()}
    named |= {f"{place}/metrics/{name}": value for name, value in row["metrics"].items()}
    return {name: float(value) for name, value in named.items() if value is not None}


def describe(row: Mapping[str, Any]) -> str:
    """`eval gsm8k of step 20: reward 0.412 ± 0.021, pass@1 0.412, pass@4 0.610 (64 prompts x 4, 2 failed)`."""
    head = f"eval {row['eval']} of step {row['step']}"
    if row["state"] != "complete":
        return f"{head}: {row['state']}"
    passes = "".join(f", pass@{k} {value:.3f}" for k, value in row["pass_at"].items())
    failed = f", {row['failed']} failed" if row["failed"] else ""
    return f"{head}: reward {describe_reward(row)}{passes} ({row['prompts']} prompts x {row['samples']}{failed})"
