"""The scores since the last batch as metrics, and the ranges that rewards are expected in. Pure: writes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from telescope.maths.summaries import mean, summary
from telescope.wire.messages import RolloutResult

TAGS_CHARTED = 50
"""Of the tags of one step, the commonest are charted."""


@dataclass
class ScoreTally:
    """Rollouts scored since the last batch closed: the unbiased view of the policy (equal-reward groups included)."""

    rewards: list[float] = field(default_factory=list)
    normalised: list[float] = field(default_factory=list)
    """Rewards within their environment's range, of the environments that give one."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: list[int] = field(default_factory=list)
    truncated: int = 0
    tags: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    """Attempts without a score, by kind."""
    rollout_ids: list[int] = field(default_factory=list)

    def add(self, done: RolloutResult, normalised: float | None = None) -> None:
        self.rollout_ids.append(done.rollout_id)
        self.rewards.append(done.reward)
        if normalised is not None:
            self.normalised.append(normalised)
        for name, value in done.metrics.items():
            self.metrics.setdefault(name, []).append(value)
        self.prompt_tokens += done.prompt_tokens
        self.completion_tokens.append(done.completion_tokens)
        self.truncated += done.finish_reason == "length"
        self.tags.update(set(done.tags))

    def summarize(self) -> dict[str, float]:
        """Metrics `reward/…`, `sample/…` and `rollouts/…` of the tally; empty where nothing was scored."""
        if not self.rewards:
            return {}
        metrics = {f"reward/{name}": value for name, value in summary(self.rewards).items()}
        if self.normalised:
            metrics["reward/normalized_mean"] = mean(self.normalised)
            metrics["reward/out_of_range"] = float(sum(not 0 <= value <= 1 for value in self.normalised))
        for name, values in self.metrics.items():
            metrics[f"sample/{name}"] = mean(values)
        metrics |= {f"rollouts/completion_tokens/{name}": value for name, value in summary(self.completion_tokens).items()}
        metrics["rollouts/prompt_tokens/mean"] = self.prompt_tokens / len(self.rewards)
        metrics["rollouts/stop_reason_length_pct"] = 100.0 * self.truncated / len(self.rewards)
        metrics["rollouts/scored"] = float(len(self.rewards))
        metrics |= {f"rollouts/failed/{kind}": float(count) for kind, count in self.failures.items()}
        for tag, count in self.tags.most_common(TAGS_CHARTED):
            metrics[f"tag/{tag}"] = count / len(self.rewards)
        return metrics


@dataclass
class RewardRanges:
    """`ranges`: the two ends by label, of the environments that give both. Rewards outside are counted, never clipped."""

    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    normalize: bool = False
    """Whether training takes the normalised reward too."""
    outside: Counter[str] = field(default_factory=Counter)

    def normalise(self, label: str, reward: float) -> float | None:
        """(r - min) / (max - min), e.g. 0.5 for 1.0 in [-1, 3]; None where the environment gives no range."""
        ends = self.ranges.get(label)
        return None if ends is None else (reward - ends[0]) / (ends[1] - ends[0])

    def choose(self, label: str, reward: float) -> float:
        """The reward that advantages are made of."""
        normalised = self.normalise(label, reward) if self.normalize else None
        return reward if normalised is None else normalised

    def note(self, label: str, reward: float) -> str:
        """Count the reward if it is outside its range. A sentence at the first of an environment, else empty."""
        ends = self.ranges.get(label)
        if ends is None or ends[0] <= reward <= ends[1]:
            return ""
        self.outside[label] += 1
        if self.outside[label] > 1:
            return ""
        return (
            f"a reward of environments.{label} is {reward:g}, outside [reward_min={ends[0]:g}, reward_max={ends[1]:g}]: it is "
            "used as it is; summary.json counts them all"
        )
