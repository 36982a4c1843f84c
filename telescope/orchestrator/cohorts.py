"""What a policy scores: all groups that began at one version of the weights, once every one of them has ended.

What has finished first is short, so its mean says little of the policy. A version's scores therefore wait until nothing of it
plays any more. Groups that training drops are among them, and what never got a score is counted beside them. Pure: writes
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from telescope.flow.groups import GroupState
from telescope.maths.summaries import gini, mean, pool_means, summary
from telescope.records import Record
from telescope.wire.messages import RolloutResult

TAGS_CHARTED = 50
"""Of the tags of one report, the commonest are charted."""
COHORTS_AT_EACH_END = 5
"""Whose means a run's summary compares; fewer where a run is so short that one would stand on both sides."""
RUN_ENDED = "the run ended"
_PLAY = frozenset({GroupState.QUEUED, GroupState.GENERATING, GroupState.ENV, GroupState.SCORING})
_ENDS_OF_PLAY = frozenset({GroupState.COMPLETE, GroupState.CANCELLED, GroupState.FAILED})


class Score(Record):
    """A scored rollout, as far as its policy is judged by it. `normalised`: the reward within its environment's range."""

    environment: str
    reward: float
    normalised: float | None
    metrics: dict[str, float]
    prompt_tokens: int
    completion_tokens: int
    truncated: bool
    tags: tuple[str, ...]

    @classmethod
    def of(cls, environment: str, result: RolloutResult, normalised: float | None) -> Score:
        return cls(
            environment,
            result.reward,
            normalised,
            result.metrics,
            result.prompt_tokens,
            result.completion_tokens,
            result.finish_reason == "length",
            tuple(sorted(set(result.tags))),
        )


class GroupScores(msgspec.Struct):
    """The scores of one group by rollout, and how it ended: empty while it plays."""

    state: str = ""
    reason: str = ""
    scores: dict[int, Score] = msgspec.field(default_factory=dict)


class Cohort(Record):
    """The groups that began at `version`, by id. `lacks_groups`: of some that still played at a checkpoint; they were played
    anew after it, and began at another version."""

    version: int
    groups: dict[int, GroupScores]
    lacks_groups: bool = False

    @property
    def cut_off(self) -> bool:
        """Whether the end of the run, or of an attempt at it, came before that of one of its groups: what was scored is the
        shorter part."""
        return self.lacks_groups or any(group.reason == RUN_ENDED for group in self.groups.values())


class Mean(Record):
    value: float
    count: int


class ScoreMeans(Record):
    """Of the reward and of each metric, with their counts."""

    reward: Mean
    metrics: dict[str, Mean]


class CohortMeans(Record):
    """What stays of a cohort: its version, how many rollouts were scored and how many were not, and their means; `pooled` is
    None without a score. `environments` is empty where a run has one alone."""

    version: int
    rollouts: int
    unfinished: int
    cut_off: bool
    pooled: ScoreMeans | None
    environments: dict[str, ScoreMeans]


@dataclass
class CohortTally:
    """The cohorts that still play. `group_size`: rollouts a group, which `unfinished` follows from."""

    group_size: int
    _playing: dict[int, dict[int, GroupScores]] = field(default_factory=dict)
    _versions: dict[int, int] = field(default_factory=dict)
    """The version that each group of `_playing` began at."""
    _lacking: set[int] = field(default_factory=set)
    """Versions some of whose groups a checkpoint has left out."""

    def note_group(self, group_id: int, state: str, reason: str, version: int) -> None:
        """A group has come to a state; `version`: the one it began at, -1 before."""
        group = self._find(group_id)
        if group is None:
            if version >= 0 and state in _PLAY:
                self._versions[group_id] = version
                self._playing.setdefault(version, {})[group_id] = GroupScores()
        elif (state in _ENDS_OF_PLAY and not group.state) or state == GroupState.DISCARDED:
            group.state, group.reason = str(state), reason

    def add(self, group_id: int, rollout_id: int, score: Score) -> None:
        """A rollout got its score, which counts."""
        group = self._find(group_id)
        if group is not None:
            group.scores[rollout_id] = score

    def take_ended(self, before: int) -> list[Cohort]:
        """Those of versions below `before` of which nothing plays any more, oldest first. `before`: the version that is served,
        so that no group begins below it."""
        return self._take(
            version
            for version, groups in self._playing.items()
            if version < before and all(group.state for group in groups.values())
        )

    def take_all(self) -> list[Cohort]:
        """What is left at the end of a run."""
        return self._take(self._playing)

    def save(self) -> tuple[Cohort, ...]:
        """What a checkpoint keeps: groups that play are left out, and a version that has no other with them."""
        kept = []
        for version, groups in sorted(self._playing.items()):
            ended = {group_id: group for group_id, group in groups.items() if group.state}
            if ended:
                kept.append(Cohort(version, ended, version in self._lacking or len(ended) < len(groups)))
        return tuple(kept)

    def restore(self, cohorts: Iterable[Cohort]) -> None:
        for cohort in cohorts:
            self._playing[cohort.version] = dict(cohort.groups)
            self._versions |= dict.fromkeys(cohort.groups, cohort.version)
            if cohort.lacks_groups:
                self._lacking.add(cohort.version)

    def _find(self, group_id: int) -> GroupScores | None:
        version = self._versions.get(group_id)
        return None if version is None else self._playing[version][group_id]

    def _take(self, versions: Iterable[int]) -> list[Cohort]:
        taken = [Cohort(version, self._playing.pop(version), version in self._lacking) for version in sorted(versions)]
        for cohort in taken:
            for group_id in cohort.groups:
                del self._versions[group_id]
        return taken


def summarize(cohorts: Sequence[Cohort], group_size: int, *, each: bool = False) -> dict[str, float]:
    """Metrics `reward/policy…`, `sample/…`, `rollouts/…`, `groups/…` and `tag/…` over the rollouts of all the cohorts together;
    with `each`, those of every environment beside them, as `env/<label>/…`. Empty without a cohort."""
    if not cohorts:
        return {}
    groups = [group for cohort in cohorts for _, group in sorted(cohort.groups.items())]
    scores = [score for group in groups for score in group.scores.values()]
    metrics = {
        "reward/policy/version": float(cohorts[-1].version),
        "reward/policy/rollouts": float(len(scores)),
        "reward/policy/unfinished": float(group_size * len(groups) - len(scores)),
        **_count_groups(groups),
    }
    if scores:
        metrics |= _summarize_scores(groups, scores)
    if each:
        for label in sorted({score.environment for score in scores}):
            metrics |= {f"env/{label}/{name}": value for name, value in _summarize_environment(label, groups).items()}
    return metrics


def make_means(cohort: Cohort, group_size: int, *, each: bool = False) -> CohortMeans:
    """What stays of it; with `each`, of every environment too."""
    scores = [score for group in cohort.groups.values() for score in group.scores.values()]
    labels = sorted({score.environment for score in scores}) if each else []
    return CohortMeans(
        version=cohort.version,
        rollouts=len(scores),
        unfinished=group_size * len(cohort.groups) - len(scores),
        cut_off=cohort.cut_off,
        pooled=_find_means(scores) if scores else None,
        environments={label: _find_means([one for one in scores if one.environment == label]) for label in labels},
    )


def pool(cohorts: Sequence[CohortMeans]) -> dict[str, Any]:
    """Means over several cohorts, weighted by rollouts; `{}` without a cohort.

    Two cohorts of 1 and 3 rollouts with rewards of 0 and 1 have a reward of 0.75.
    """
    if not cohorts:
        return {}
    labels = sorted({label for one in cohorts for label in one.environments})
    return {
        "versions": [cohorts[0].version, cohorts[-1].version],
        "rollouts": sum(one.rollouts for one in cohorts),
        "unfinished": sum(one.unfinished for one in cohorts),
        **_pool_means([one.pooled for one in cohorts if one.pooled is not None]),
        **({"environments": {label: _pool_means(_of_environment(label, cohorts)) for label in labels}} if labels else {}),
    }


@dataclass
class CohortEnds:
    """The first and the last versions of a run that have ended, for its summary; a straggler may hold one back."""

    first: list[CohortMeans] = field(default_factory=list)
    last: list[CohortMeans] = field(default_factory=list)
    count: int = 0

    def add(self, one: CohortMeans) -> None:
        """One that has a score and was not cut off counts; one that was, only where there is no other."""
        if not one.rollouts or (one.cut_off and self.count):
            return
        if self.first and self.first[0].cut_off:
            self.first, self.last, self.count = [], [], 0
        self.count += 1
        self.first = sorted([*self.first, one], key=_by_version)[:COHORTS_AT_EACH_END]
        self.last = sorted([*self.last, one], key=_by_version)[-COHORTS_AT_EACH_END:]

    def choose(self) -> tuple[list[CohortMeans], list[CohortMeans]]:
        """Those at the beginning and at the end; none is on both sides."""
        each = min(COHORTS_AT_EACH_END, self.count // 2)
        return self.first[:each], self.last[-max(each, 1) :]


def _by_version(one: CohortMeans) -> int:
    return one.version


def _summarize_scores(groups: Sequence[GroupScores], scores: Sequence[Score]) -> dict[str, float]:
    metrics = _spread("reward/policy", [score.reward for score in scores])
    metrics |= _group_gini("reward/policy", [[score.reward for score in group.scores.values()] for group in groups])
    normalised = [score.normalised for score in scores if score.normalised is not None]
    if normalised:
        metrics["reward/policy/normalized"] = mean(normalised)
        metrics["reward/out_of_range"] = float(sum(not 0 <= value <= 1 for value in normalised))
    for name in sorted({name for score in scores for name in score.metrics}):
        members = [[score.metrics[name] for score in group.scores.values() if name in score.metrics] for group in groups]
        values = [value for group in members for value in group]
        metrics |= _spread(f"sample/{name}", values) | _group_gini(f"sample/{name}", members)
        metrics[f"sample/{name}/count"] = float(len(values))
    sizes = {
        "prompt": [score.prompt_tokens for score in scores],
        "completion": [score.completion_tokens for score in scores],
        "total": [score.prompt_tokens + score.completion_tokens for score in scores],
    }
    metrics |= {
        f"rollouts/{what}_tokens/{name}": value for what, values in sizes.items() for name, value in summary(values).items()
    }
    metrics["rollouts/stop_reason_length_pct"] = 100.0 * sum(score.truncated for score in scores) / len(scores)
    tags = Counter(tag for score in scores for tag in score.tags)
    return metrics | {f"tag/{tag}": count / len(scores) for tag, count in tags.most_common(TAGS_CHARTED)}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean under the name itself, the rest below it."""
    return {name if key == "mean" else f"{name}/{key}": value for key, value in summary(values).items()}


def _group_gini(name: str, members: Sequence[Sequence[float]]) -> dict[str, float]:
    """How unequal groups of two and more are within themselves; nothing without such a group."""
    measured = [gini(values) for values in members if len(values) > 1]
    return {f"{name}/group_gini": mean(measured)} if measured else {}


def _count_groups(groups: Sequence[GroupScores]) -> dict[str, float]:
    """How groups ended; of those whose rewards are equal, how many got 0, and their mean reward."""
    states = Counter(group.state for group in groups)
    discarded = [group.scores for group in groups if group.state == GroupState.DISCARDED and group.scores]
    equal = [next(iter(scores.values())).reward for scores in discarded]
    counts = {
        "groups/begun": len(groups),
        "groups/cancelled": states[GroupState.CANCELLED],
        "groups/failed": states[GroupState.FAILED],
        "groups/discarded": states[GroupState.DISCARDED],
        "groups/discarded/all_zero": sum(reward == 0 for reward in equal),
    }
    reward = {"groups/discarded/reward": mean(equal)} if equal else {}
    return {name: float(count) for name, count in counts.items()} | reward


def _summarize_environment(label: str, groups: Sequence[GroupScores]) -> dict[str, float]:
    own = [group for group in groups if any(score.environment == label for score in group.scores.values())]
    scores = [score for group in own for score in group.scores.values()]
    names = sorted({name for score in scores for name in score.metrics})
    return {
        "reward": mean([score.reward for score in scores]),
        "rollouts": float(len(scores)),
        **{f"sample/{name}": mean([one.metrics[name] for one in scores if name in one.metrics]) for name in names},
        "completion_tokens": mean([score.completion_tokens for score in scores]),
        "stop_reason_length_pct": 100.0 * sum(score.truncated for score in scores) / len(scores),
        "groups": float(len(own)),
        "discarded": float(sum(group.state == GroupState.DISCARDED for group in own)),
    }


def _find_means(scores: Sequence[Score]) -> ScoreMeans:
    metrics = {}
    for name in sorted({name for score in scores for name in score.metrics}):
        values = [score.metrics[name] for score in scores if name in score.metrics]
        metrics[name] = Mean(mean(values), len(values))
    return ScoreMeans(Mean(mean([score.reward for score in scores]), len(scores)), metrics)


def _of_environment(label: str, cohorts: Sequence[CohortMeans]) -> list[ScoreMeans]:
    return [one.environments[label] for one in cohorts if label in one.environments]


def _pool_means(several: Sequence[ScoreMeans]) -> dict[str, Any]:
    names = sorted({name for one in several for name in one.metrics})
    metrics = {name: _weigh([one.metrics[name] for one in several if name in one.metrics]) for name in names}
    return {"reward": _weigh([one.reward for one in several]), "metrics": metrics}


def _weigh(means: Sequence[Mean]) -> float:
    return pool_means([one.value for one in means], [one.count for one in means])
