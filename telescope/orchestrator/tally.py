"""What was scored since the last batch closed, as metrics: adds up, writes nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from telescope.maths.summaries import mean, summary
from telescope.wire.messages import RolloutDone

TAGS_CHARTED = 50
"""Of the tags of one step, the commonest are charted."""


@dataclass
class Tally:
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

    def add(self, done: RolloutDone, normalised: float | None = None) -> None:
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

    def metrics_of_all(self) -> dict[str, float]:
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
