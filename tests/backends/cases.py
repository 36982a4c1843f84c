"""Ragged steps for every algorithm, drawn from a seed: the same in the test and in each of its rank processes.

Rollouts of one or two branches, in groups, some without a trained token; sampling log-probs near the model's own, so that
clips, weights and masks bind at some tokens and not at others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from telescope.algorithms.base import Algorithm
from telescope.backends.base import Job, TrainShard, World
from telescope.config.sections import ModelSettings, TrainerSettings
from telescope.maths.minibatches import denominators
from telescope.records import TrainItem
from tests.backends.shards import part
from tests.digits.batches import MAX_TOKENS, VARIANTS

VOCABULARY = 7
"""So few that log-probs are near -2, where float32 steps by 1e-7: their error is the relative error of a ratio."""
STEP = 5
TEMPERATURES = (0.8, 1.25)
"""Of the groups in turn, so that most rows have both: whatever is packed with whom, each is trained at its own."""
STEEP = 10.0
"""Makes the largest entry of an update about 1, the size of the largest weight: float32 then resolves 1e-7 of it."""
PLAIN = "plain"
"""One rank, one long row, no padding: what all other runs are compared with."""
TWO_MINIBATCHES = {f"{name}, 2 minibatches": name for name in ("sapo token mean, TIS", "gspo, masks of sequences")}
"""Extra cases, of algorithms that look back to the log-probs before the first update."""
WORLDS = (PLAIN, "1", "2", "3", "4")
SHARED_WORLDS = ("2c2", "4c2", "4c4")
"""`4c2`: four ranks, of which pairs share each row."""
SHARED_CASES = (
    "grpo clipped", "rloo TIS", "reinforce_pp", "dr_grpo token_sum_norm", "cispo TIS", "gspo, masks of sequences", "sapo",
    "grpo, penalties of all kinds", "gspo, masks of sequences, 2 minibatches",
)  # fmt: skip
"""What they train: every algorithm, each kind of sum over a sequence, the base model, and log-probs from before the step."""


def ranks_of(world: str) -> tuple[int, int]:
    """Its ranks, and how many of them share a row."""
    size, _, shared = ("1" if world == PLAIN else world).partition("c")
    return int(size), int(shared or 1)


@dataclass(frozen=True)
class Case:
    """One step of one algorithm."""

    name: str
    algorithm: Algorithm
    shard: TrainShard

    @property
    def rate(self) -> float:
        """Of SGD: 1 where the update is the gradient; less where a second minibatch starts from the moved weights."""
        return 1.0 if len(self.shard.denominators) == 1 else 0.01


def shards_without_logprobs() -> Iterator[tuple[str, TrainShard]]:
    for number, (name, algorithm) in enumerate(VARIANTS.items()):
        yield name, _draw(algorithm, np.random.default_rng(number))
    for number, name in TWO_MINIBATCHES.items():
        yield number, halved(_draw(VARIANTS[name], np.random.default_rng(99)))


def cases(logprobs: Path) -> list[Case]:
    """`logprobs`: the sampling log-probs of all of them, one after another, as `sample` wrote them."""
    known, found = np.load(logprobs), []
    for name, shard in shards_without_logprobs():
        here, known = np.split(known, [len(shard.ids)])
        found.append(Case(name, VARIANTS[TWO_MINIBATCHES.get(name, name)], replace(shard, logprobs=here)))
    return found


def sample(model: torch.nn.Module, logprobs: Path) -> None:
    """Write sampling log-probs near those of the plain model."""
    random = np.random.default_rng(77)
    found = []
    for _, shard in shards_without_logprobs():
        current = plain_logprobs(model, shard)[0]
        near = np.minimum(current + 0.15 * random.standard_normal(len(current)), 0.0)
        found.append(np.where(shard.mask == 1, near, np.nan).astype(np.float32))
    np.save(logprobs, np.concatenate(found))


@torch.no_grad()
def plain_logprobs(model: torch.nn.Module, shard: TrainShard) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies [T] by transformers alone, a trajectory at a time; 0 at the first token of each."""
    logprobs, entropies, end = [], [], 0
    for item in shard.items:
        start, end = end, end + item.length
        ids = torch.from_numpy(shard.ids[start:end].astype(np.int64))
        logp = (model(ids[None]).logits[0].float() / item.temperature).log_softmax(-1)[:-1]
        logprobs += [np.zeros(1), logp.gather(1, ids[1:, None]).squeeze(1).double().numpy()]
        entropies += [np.zeros(1), -(logp.exp() * logp).sum(-1).double().numpy()]
    return np.concatenate(logprobs), np.concatenate(entropies)


def halved(shard: TrainShard) -> TrainShard:
    """Its first group in one minibatch, the others in the next."""
    items = tuple(msgspec.structs.replace(item, minibatch=min(item.group_id, 1)) for item in shard.items)
    counts = []
    for number in (0, 1):
        own = {item.sequence: item for item in items if item.minibatch == number}.values()
        counts.append(denominators([item.sequence_tokens for item in own], [item.group_id for item in own]))
    return replace(shard, items=items, denominators=tuple(counts))


def job(model: str, algorithm: Algorithm, world: World, packing: str, seed: int) -> Job:
    random = np.random.default_rng((seed, *packing.encode()))
    rows = {"seq_len": 512, "pad_to_multiple_of": 1}
    if packing != PLAIN:
        rows = {"seq_len": int(random.choice([32, 48, 80])), "pad_to_multiple_of": int(random.choice([1, 8]))}
    if ranks_of(packing)[1] > 1:
        rows["pad_to_multiple_of"] = int(random.choice([4, 8]))
    return Job(
        algorithm=algorithm,
        model=ModelSettings(name=model),
        trainer=TrainerSettings(learning_rate=1.0, grad_clip=1e9, entropy_chunk_size=16, **rows),
        number_of_steps=STEP,
        temperature=TEMPERATURES[0],
        max_tokens=MAX_TOKENS,
        seed=0,
        world=world,
    )


def share(case: Case, packing: str, rank: int, seed: int) -> TrainShard:
    """A rank's trajectories in any order; branches of one rollout may go to different ranks, and a rank may get nothing.

    Ranks that share rows get the same.
    """
    size, shared = ranks_of(packing)
    world, rank = size // shared, rank // shared
    random = np.random.default_rng((seed, world))
    order = random.permutation(len(case.shard.items))
    owners = random.integers(0, world, len(order))
    return part(case.shard, [int(index) for index in order[owners == rank]])


def _draw(algorithm: Algorithm, random: np.random.Generator) -> TrainShard:
    groups = np.repeat(np.arange(3), random.integers(2, 5, 3))
    rewards = np.round(random.normal(size=len(groups)), 1)
    advantages = STEEP * algorithm.advantages(rewards, groups, group_size=8)
    owners = [rollout for rollout in range(len(groups)) for _ in range(2 if random.random() < 0.3 else 1)]
    masks = [_mask(random, trained=rollout != 1) for rollout in owners]
    trained = np.bincount(owners, weights=[mask.sum() for mask in masks]).astype(int)
    mask = np.concatenate(masks)
    items = tuple(
        TrainItem(
            rollout_id=100 + rollout,
            group_id=int(groups[rollout]),
            sequence=rollout,
            length=len(own),
            advantage=float(advantages[rollout]),
            sequence_tokens=int(trained[rollout]),
            temperature=TEMPERATURES[groups[rollout] % 2],
        )
        for rollout, own in zip(owners, masks, strict=True)
    )
    return TrainShard(
        step=STEP,
        items=items,
        ids=random.integers(0, VOCABULARY, len(mask)).astype(np.int32),
        mask=mask,
        logprobs=np.full(len(mask), np.nan, np.float32),
        versions=np.where(mask, STEP - 1 - random.integers(0, 3, len(mask)), -1).astype(np.int32),
        denominators=(denominators(trained.tolist(), groups.tolist()),),
    )


def _mask(random: np.random.Generator, *, trained: bool) -> np.ndarray:
    mask = (random.random(int(random.integers(2, 24))) < 0.7) & trained
    mask[0] = False
    return mask.astype(np.uint8)


class Found(msgspec.Struct):
    """What one run of all cases says of one: gradient and update lie beside it, as rows of two arrays."""

    name: str
    metrics: dict[str, float]
