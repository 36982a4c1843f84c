"""From a TrainOnBatch command to one TrainStep a rank: advantages, minibatches, counts, shards. Pure: arrays in, messages
out."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from msgspec import UNSET, UnsetType

from telescope.algorithms.base import Algorithm, AlgorithmRaised, named
from telescope.flow.commands import TrainOnBatch
from telescope.flow.prompt_sampler import Permutation, keyed_hash
from telescope.maths import dealing, minibatches, packing, routing, turn_credit
from telescope.maths.summaries import summary
from telescope.orchestrator.reward_ranges import RewardRanges
from telescope.orchestrator.rollout_store import Rollout, RolloutStore
from telescope.records import Denominators, TrainItem
from telescope.wire.codec import MAX_FRAME_BYTES
from telescope.wire.messages import TrainStep


class BatchUnusable(ValueError):
    """The batch cannot be trained on; the sentence says why."""


@dataclass(frozen=True)
class Recipe:
    """What of the configuration decides how a batch is cut."""

    algorithm: Algorithm
    group_size: int
    max_tokens: int
    """Of the run; `own_max_tokens` has those of environments that set their own."""
    minibatches: int = 1
    epochs: int = 1
    seq_len: int = 100_000_000
    truncates: bool = False
    """A trajectory longer than `seq_len` is trained up to there; else it makes the batch unusable."""
    seed: int = 0
    ranks_a_shard: int = 1
    """Neighbouring trainer ranks that train the same trajectories together."""
    rewards: RewardRanges = field(default_factory=RewardRanges)
    own_max_tokens: Mapping[str, int] = field(default_factory=dict)

    def fit_to_row(self, rollout: Rollout) -> Rollout:
        """With branches of at most `seq_len` tokens: itself, or a shortened copy. Raises `BatchUnusable` where they are longer
        and may not be cut."""
        longest = max(len(branch.ids) for branch in rollout.branches)
        if longest <= self.seq_len:
            return rollout
        if not self.truncates:
            raise BatchUnusable(
                f"rollout {rollout.order.rollout_id} has {longest} tokens, and a packed row trainer.seq_len={self.seq_len}: "
                f"raise trainer.seq_len, lower inference.max_model_len to {self.seq_len}, or set trainer.overlong=truncate"
            )
        return replace(rollout, branches=tuple(branch.first(self.seq_len) for branch in rollout.branches))

    def shape_reward(self, rollout: Rollout) -> None:
        """Note its reward for training and what its length costs."""
        label = rollout.order.prompt.environment
        max_tokens = self.own_max_tokens.get(label, self.max_tokens)
        with named(self.algorithm, "length_penalty", f"rollout {rollout.order.rollout_id}"):
            rollout.length_penalty = self.algorithm.length_penalty(rollout.trained_tokens, max_tokens=max_tokens)
        rollout.normalised = self.rewards.choose(label, rollout.result.reward)
        rollout.turn_returns = self.find_turn_returns(rollout)

    def find_turn_returns(self, rollout: Rollout) -> tuple[float, ...]:
        """By what the algorithm compares the rollout's turns; empty where it compares whole rollouts. What shapes the reward
        beyond the environment's numbers is the last turn's."""
        result = rollout.result
        rewards = turn_credit.shape_rewards(
            result.turn_rewards or (),
            rollout.turns,
            rollout.reward,
            scale=self.rewards.find_scale(rollout.order.prompt.environment),
        )
        with named(self.algorithm, "turn_returns", f"rollout {rollout.order.rollout_id}"):
            given = self.algorithm.turn_returns(rewards)
            returns = () if given is None else tuple(map(float, given))
        if given is not None and (len(returns) != len(rewards) or not all(map(math.isfinite, returns))):
            whose = f"{type(self.algorithm).__name__}.turn_returns"
            raise AlgorithmRaised(
                f"rollout {rollout.order.rollout_id}: {whose} gave {reprlib.repr(returns)}: it must give "
                f"one finite number for each of the rollout's turns, {len(rewards)}"
            )
        return returns

    def find_filters(self, rollouts: Sequence[Rollout], step: int) -> tuple[tuple[str, ...], ...]:
        """Of each rollout the rules by which it leaves the loss."""
        try:
            with named(self.algorithm, "filters_out", f"step {step}"):
                return tuple(self.algorithm.filters_out(rollout.sampled) for rollout in rollouts)
        except AlgorithmRaised as error:
            raise BatchUnusable(str(error)) from error


@dataclass(frozen=True)
class Shard:
    """What one trainer rank gets. `arrays`: ids, mask, logprobs, versions, each [T] over the shard's trajectories."""

    step: TrainStep
    arrays: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class TurnAdvantages:
    """The advantages of a step's turns, by rollout."""

    by_rollout: tuple[np.ndarray, ...]  # one a rollout, each [turns] float64
    lone: float
    """Share of turns that no other rollout of their group has come to."""

    def average(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """[rollouts] float64, means over trained tokens; exactly the one advantage where there is one turn."""
        return np.array([_average_turns(*pair) for pair in zip(self.by_rollout, rollouts, strict=True)], np.float64)


@dataclass(frozen=True)
class TrainBatch:
    """A step's rollouts. Those with an entry in `filters` have an advantage and are not trained."""

    command: TrainOnBatch
    rollouts: tuple[Rollout, ...]
    advantages: np.ndarray  # [rollouts] float64; where turns have their own, the mean over the rollout's trained tokens
    filters: tuple[tuple[str, ...], ...]  # by rollout: the rules by which it left the loss
    denominators: tuple[Denominators, ...]  # one an update: the minibatches of each epoch, one epoch after another
    shards: tuple[Shard, ...]  # one a trainer rank; ranks that share rows have the same
    turns: TurnAdvantages | None = None
    """Where the algorithm credits turns."""
    truncated: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By rollout id: how many tokens each of its branches lost beyond trainer.seq_len, where one did."""

    @property
    def trained(self) -> tuple[Rollout, ...]:
        """The rollouts in the loss."""
        return tuple(rollout for rollout, why in zip(self.rollouts, self.filters, strict=True) if not why)

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens in the loss, each counted once."""
        return sum(rollout.trained_tokens for rollout in self.trained)

    @property
    def lags(self) -> np.ndarray:
        """Versions between each sampled token and the weights it trains [trained tokens]."""
        sampled_by = [rollout.versions for rollout in self.trained]
        lags: np.ndarray = self.command.step - 1 - np.concatenate([np.zeros(0, np.int32), *sampled_by])
        return lags

    def compute_metrics(self) -> dict[str, float]:
        """Shares of the batch's rollouts that were cut off and that left the loss, by rule, what lengths cost, and their
        advantages."""
        count = len(self.rollouts)
        each = self.advantages if self.turns is None else np.concatenate(self.turns.by_rollout)
        rules = {rule: sum(rule in why for why in self.filters) for rule in ("overlong", "repetition")}
        return {
            "truncated_fraction": sum(rollout.sampled.truncated for rollout in self.rollouts) / count,
            "filtered_fraction": sum(bool(why) for why in self.filters) / count,
            **{f"{rule}_filtered_fraction": number / count for rule, number in rules.items()},
            "overlong_samples": float(sum(lost > 0 for branches in self.truncated.values() for lost in branches)),
            "truncated_tokens": float(sum(map(sum, self.truncated.values()))),
            "length_penalty_mean": float(np.mean([rollout.length_penalty for rollout in self.rollouts])),
            **{f"advantage/{name}": value for name, value in summary(each).items()},
            "advantage/count": float(len(each)),
            **({} if self.turns is None else {"advantage/lone_turn_fraction": self.turns.lone}),
        }

    def find_lag(self, rollout: Rollout) -> int | None:
        """Versions between the rollout's oldest sampled token and the weights it trains; None without such a token."""
        versions = rollout.versions
        return self.command.step - 1 - int(versions.min()) if len(versions) else None


def make_batch(
    command: TrainOnBatch,
    store: RolloutStore,
    recipe: Recipe,
    *,
    ranks: int,
    attention_length: float = packing.ATTENTION_LENGTH,
) -> TrainBatch:
    """Advantages over the batch (discarded groups count in its statistics), then whole groups to minibatches, in an order drawn
    from the seed, and the rollouts of each minibatch to ranks by cost. What the algorithm's filters take out counts in the
    statistics alone; of what is longer than a row the beginning is trained, where the recipe says so.

    Raises `BatchUnusable` where rollouts have not one finite advantage each, a method of the algorithm raises, a trajectory is
    too long, or a rank's part is more than may travel.
    """
    groups = tuple(store.take(rollout_ids) for rollout_ids in command.rollout_ids)
    whole = tuple(rollout for group in groups for rollout in group)
    kept = tuple(recipe.fit_to_row(rollout) for rollout in whole)
    baseline = tuple(rollout for rollout_ids in command.baseline_rollout_ids for rollout in store.take(rollout_ids))
    rewards = np.array([rollout.reward for rollout in kept + baseline], dtype=np.float64)
    numbers = np.array([rollout.order.group_id for rollout in kept + baseline], dtype=np.int64)
    turns = _credit_turns(recipe, kept, baseline, numbers, command.step)
    advantages = (
        turns.average(kept) if turns is not None else _compute_advantages(recipe, rewards, numbers, command.step)[: len(kept)]
    )
    filters = recipe.find_filters(whole, command.step)
    places = np.split(np.arange(len(kept)), np.cumsum([len(group) for group in groups])[:-1])
    parts = [
        [place for group in part for place in group.tolist() if not filters[place]]
        for epoch in range(recipe.epochs)
        for part in minibatches.cut(_shuffle_groups(places, recipe, command.step, epoch), recipe.minibatches)
    ]
    counts = tuple(_count_denominators([kept[place] for place in part]) for part in parts)
    different = ranks // recipe.ranks_a_shard
    shares = [_deal(kept, part, different, recipe.seq_len, attention_length) for part in parts]
    dealt = [
        _make_shard(command.step, kept, advantages, turns, counts, [share[rank] for share in shares])
        for rank in range(different)
    ]
    shards = tuple(shard for shard in dealt for _ in range(recipe.ranks_a_shard))
    _check_size(shards, command.step, recipe.epochs)
    return TrainBatch(command, kept, advantages, filters, counts, shards, turns, _count_truncated(whole, kept))


def _check_size(shards: Sequence[Shard], step: int, epochs: int) -> None:
    """Raises `BatchUnusable` where an array of a rank's part is more than one message may carry."""
    largest = max((array for shard in shards for array in shard.arrays), key=lambda array: array.nbytes)
    if largest.nbytes <= MAX_FRAME_BYTES:
        return
    routed = largest.ndim == 3
    what = "the routing that servers recorded with trainer.router_replay=true" if routed else "an array"
    raise BatchUnusable(
        f"step {step}: {what} of {largest.nbytes:,} bytes for one trainer rank is more than the {MAX_FRAME_BYTES:,} "
        "that may travel: lower orchestrator.prompts_batch_size_for_trainer or "
        f"trainer.epochs_per_batch={epochs} (each epoch is sent), or raise cluster.trainer_num_workers"
    )


def _credit_turns(
    recipe: Recipe, kept: Sequence[Rollout], baseline: Sequence[Rollout], groups: np.ndarray, step: int
) -> TurnAdvantages | None:
    """The advantages of the turns of `kept`, each compared with the same turn of its group; None where the algorithm compares
    whole rollouts. Raises `BatchUnusable`."""
    try:
        returns = [recipe.find_turn_returns(rollout) for rollout in (*kept, *baseline)]
    except AlgorithmRaised as error:
        raise BatchUnusable(str(error)) from error
    if not any(returns):
        return None
    if not all(returns):
        raise BatchUnusable(
            f"step {step}: {type(recipe.algorithm).__name__}.turn_returns gave None for some rollouts and numbers for others: "
            "turns are compared in all rollouts of a batch or in none"
        )
    turns = np.array([len(each) for each in returns], np.int64)
    numbers = turn_credit.number_turns(groups, turns)
    compared = np.concatenate([np.array(each, np.float64) for each in returns])
    found = _compute_advantages(recipe, compared, numbers, step, each="turn")
    parts = np.split(found, np.cumsum(turns)[:-1])[: len(kept)]
    return TurnAdvantages(tuple(parts), turn_credit.lone_share(numbers[: turns[: len(kept)].sum()]))


def _average_turns(advantages: np.ndarray, rollout: Rollout) -> float:
    """The mean over trained tokens of `advantages` [turns]."""
    if len(advantages) == 1:
        return float(advantages[0])
    placed = [pair for branch in rollout.trained_turns for pair in branch]
    tokens = sum(count for _, count in placed)
    return math.fsum(advantages[turn] * count for turn, count in placed) / tokens if tokens else 0.0


def _compute_advantages(
    recipe: Recipe, rewards: np.ndarray, groups: np.ndarray, step: int, each: Literal["rollout", "turn"] = "rollout"
) -> np.ndarray:
    """[N] float64, by the algorithm, which may be the user's own; `each`: what N counts. Raises `BatchUnusable`."""
    whose = f"{type(recipe.algorithm).__name__}.advantages"
    compared = "rewards" if each == "rollout" else "returns of turns"
    try:
        with named(recipe.algorithm, "advantages", f"step {step}"):
            given = np.asarray(recipe.algorithm.advantages(rewards.copy(), groups, group_size=recipe.group_size))
    except AlgorithmRaised as error:
        raise BatchUnusable(str(error)) from error
    if given.shape != rewards.shape or given.dtype.kind not in "fiu":
        raise BatchUnusable(
            f"step {step}: {whose} gave {given.dtype} of shape {list(given.shape)}: it must give one number for each of the "
            f"{len(rewards)} {each}s"
        )
    if not np.isfinite(given).all():
        raise BatchUnusable(
            f"step {step}: the {compared} of its batch, from {rewards.min():g} to {rewards.max():g}, give advantages "
            f"that are not finite numbers: keep rewards within a few thousand, or mend {whose}"
        )
    return given.astype(np.float64, copy=False)


def _shuffle_groups(groups: Sequence[np.ndarray], recipe: Recipe, step: int, epoch: int) -> Sequence[np.ndarray]:
    """The groups as an epoch takes them, shuffled. In order of their ids those begun long ago, which took long because
    they are long, would all come into the first minibatch. Lengths play no part in it."""
    if recipe.minibatches == 1:
        return groups
    shuffled = Permutation(len(groups), keyed_hash("minibatches", recipe.seed, step, epoch))
    return [groups[shuffled[place]] for place in range(len(groups))]


def _count_truncated(whole: Sequence[Rollout], fitted: Sequence[Rollout]) -> dict[int, tuple[int, ...]]:
    return {
        before.order.rollout_id: tuple(
            len(long.ids) - len(short.ids) for long, short in zip(before.branches, after.branches, strict=True)
        )
        for before, after in zip(whole, fitted, strict=True)
        if before is not after
    }


def _count_denominators(rollouts: Sequence[Rollout]) -> Denominators:
    return minibatches.denominators(
        [rollout.trained_tokens for rollout in rollouts], [rollout.order.group_id for rollout in rollouts]
    )


def _deal(
    rollouts: Sequence[Rollout], part: Sequence[int], ranks: int, seq_len: int, attention_length: float
) -> list[list[int]]:
    """The rollouts of one minibatch that each rank gets."""
    lengths = [[len(branch.ids) for branch in rollouts[place].branches] for place in part]
    shares = dealing.deal(lengths, ranks, seq_len=seq_len, attention_length=attention_length)
    return [[part[index] for index in share] for share in shares]


def _make_shard(
    step: int,
    rollouts: Sequence[Rollout],
    advantages: np.ndarray,
    turns: TurnAdvantages | None,
    counts: tuple[Denominators, ...],
    shares: Sequence[Sequence[int]],
) -> Shard:
    """One rank's items, update after update; `shares`: its rollouts of each. Those of several epochs are sent once for each."""
    items = []
    pieces = []
    routed = []
    for minibatch, sequence in ((minibatch, sequence) for minibatch, share in enumerate(shares) for sequence in share):
        rollout = rollouts[sequence]
        by_branch = place_turns(rollout, turns, sequence)
        for branch, own in zip(rollout.branches, by_branch, strict=True):
            items.append(
                TrainItem(
                    rollout_id=rollout.order.rollout_id,
                    group_id=rollout.order.group_id,
                    sequence=sequence,
                    length=len(branch.ids),
                    advantage=float(advantages[sequence]),
                    sequence_tokens=rollout.trained_tokens,
                    temperature=rollout.result.temperature,
                    minibatch=minibatch,
                    turns=own,
                )
            )
            pieces.append((branch.ids, branch.mask, branch.logprobs, branch.versions))
            routed.append(branch.routed)
    arrays = tuple(np.concatenate(column) for column in zip(*pieces, strict=True)) if pieces else _make_empty_arrays()
    of_experts = routing.joined(routed, [item.length for item in items])
    if of_experts is not None:
        arrays = (*arrays, of_experts)
    return Shard(TrainStep(step=step, items=tuple(items), denominators=counts), arrays)


def place_turns(
    rollout: Rollout, turns: TurnAdvantages | None, sequence: int
) -> Sequence[tuple[tuple[int, float], ...] | UnsetType]:
    """Of each branch (sampled tokens, advantage) of its turns; unset where all tokens of the rollout share one."""
    if turns is None or len(turns.by_rollout[sequence]) == 1:
        return (UNSET,) * len(rollout.branches)
    own = turns.by_rollout[sequence]
    return [tuple((tokens, float(own[turn])) for turn, tokens in branch if tokens) for branch in rollout.trained_turns]


def _make_empty_arrays() -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(0, dtype) for dtype in (np.int32, np.uint8, np.float32, np.int32))
