"""What the numbers of a step say: the scores since the last batch, their expected ranges, and whether the run still trains.

Pure: reads rewards and metrics, writes nothing. Refuses to end the run, and to find a cause: `telescope replay --step` looks
for one in the batches that are kept; a gap between trainer and servers is for people to judge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from telescope.config.precision import parity_limit
from telescope.config.run import RunConfig
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


def count_broken_steps(history: Sequence[Mapping[str, float]]) -> int:
    """How many of the latest steps moved no weight, as a gradient of theirs was not a finite number; `history`: each step's
    metrics, the latest last. A step that filters have emptied is none of them."""
    count = 0
    for metrics in reversed(history):
        left_out, broken = metrics.get("update_skipped", 0.0), metrics.get("updates_not_finite", 0.0)
        if not broken or left_out < metrics.get("updates", 1.0):
            break
        count += 1
    return count


def find_end_reason(history: Sequence[Mapping[str, float]], limit: int, step: int) -> str:
    """The sentence with which a run ends whose steps up to `step` train nothing any more; empty while it may go on."""
    count = count_broken_steps(history)
    if count < limit:
        return ""
    since = step - count
    moved = f"since step {since}" if since else "from the beginning"
    return (
        f"trainer.max_broken_steps={limit}: no gradient of the last {count} steps was a finite number, so the weights have not "
        f"moved {moved}: `telescope replay RUN_DIR --step {step}` looks for the cause; then begin anew, or at a checkpoint "
        "before it (checkpoint.resume=STEP), with a lower trainer.learning_rate, say"
    )


MOVED_NATS = 0.1
"""With several minibatches the later ones are of a policy that the earlier ones have moved: less than this is not a sign."""


class ParityCheck:
    """`limit_nats`: of the mean |sampler - trainer|; None: one of them has no model, and nothing is judged."""

    def __init__(self, limit_nats: float | None = None) -> None:
        self._limit, self._told = limit_nats, False

    @classmethod
    def from_config(cls, config: RunConfig, device: str) -> ParityCheck:
        """`device`: gpu or cpu, where the run's servers are."""
        if config.inference.engine == "fake" or config.backend_name == "fake":
            return cls()
        limit = parity_limit(config, device)
        return cls(limit if config.trainer.number_of_minibatches == 1 else max(limit, MOVED_NATS))

    def judge(self, step: int, metrics: Mapping[str, float]) -> str:
        """A sentence, at most once, if the step's tokens were all sampled by the very version that it trains and the two sides
        say other log-probs of them; else empty."""
        apart = metrics.get("logprob_difference")
        if self._limit is None or self._told or apart is None or metrics.get("staleness_max") != 0:
            return ""
        if apart <= self._limit:
            return ""
        self._told = True
        return (
            f"step {step}: the servers' log-probs of tokens that they sampled from the very weights in training are "
            f"{apart:.3g} nats from the trainer's (mean of |difference|; {self._limit:g} is expected at most), so they may "
            "compute another model than the trainer: compare them with `python -m telescope.doctor logprobs` and this run's "
            "overrides"
        )
