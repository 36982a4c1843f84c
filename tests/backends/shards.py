"""Made-up steps for the tests of backends: drawn from a seed, so that every process of a test makes the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np

from telescope.algorithms.base import Algorithm
from telescope.algorithms.grpo import GRPO
from telescope.backends.base import Job, TrainShard, World
from telescope.config.sections import ModelSettings, TrainerSettings
from telescope.maths.minibatches import denominators
from telescope.maths.routing import dtype_of, unrecorded
from telescope.records import Denominators, TrainItem

VOCABULARY = 128
LENGTHS = (5, 23, 11, 30, 7, 18, 40, 9)


def make_shard(
    step: int = 1, lengths: Sequence[int] = LENGTHS, seed: int = 0, logprob: float = -3.0,
    temperatures: Sequence[float] = (1.0,),
) -> TrainShard:  # fmt: skip
    """Trajectories of 4 prompt tokens and the rest sampled, two a group, advantages drawn; the whole update is this shard.
    `temperatures` go to the trajectories in turn."""
    random = np.random.default_rng(seed)
    masks = [np.r_[np.zeros(4, np.uint8), np.ones(length - 4, np.uint8)] for length in lengths]
    advantages = random.standard_normal(len(lengths))
    mask = np.concatenate(masks)
    items = tuple(
        TrainItem(
            rollout_id=100 + index,
            group_id=index // 2,
            sequence=index,
            length=length,
            advantage=float(advantages[index]),
            sequence_tokens=length - 4,
            temperature=temperatures[index % len(temperatures)],
        )
        for index, length in enumerate(lengths)
    )
    logprobs = np.where(mask, logprob + 0.1 * random.standard_normal(len(mask)), np.nan).astype(np.float32)
    return TrainShard(
        step=step,
        items=items,
        ids=random.integers(0, VOCABULARY, len(mask)).astype(np.int32),
        mask=mask,
        logprobs=logprobs,
        versions=np.where(mask, step - 1, -1).astype(np.int32),
        denominators=(Denominators(int(mask.sum()), len(lengths), (len(lengths) + 1) // 2),),
    )


def in_minibatches(shard: TrainShard, sizes: Sequence[int]) -> TrainShard:
    """The same trajectories, the first `sizes[0]` of them in the first minibatch, and so on."""
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    items = tuple(
        msgspec.structs.replace(item, minibatch=int(number)) for item, number in zip(shard.items, numbers, strict=True)
    )
    counts = tuple(
        denominators(
            [item.sequence_tokens for item in items if item.minibatch == number],
            [item.group_id for item in items if item.minibatch == number],
        )
        for number in range(len(sizes))
    )
    return replace(shard, items=items, denominators=counts)


def alone(shard: TrainShard, minibatch: int) -> TrainShard:
    """One minibatch as a step of its own."""
    picked = part(shard, [index for index, item in enumerate(shard.items) if item.minibatch == minibatch])
    items = tuple(msgspec.structs.replace(item, minibatch=0) for item in picked.items)
    return replace(picked, items=items, denominators=(shard.denominators[minibatch],))


def part(shard: TrainShard, indices: Sequence[int]) -> TrainShard:
    """One rank's share; the denominators stay those of the whole step."""
    ends = np.cumsum([item.length for item in shard.items])
    kept = np.array([place for i in indices for place in range(ends[i] - shard.items[i].length, ends[i])], int)
    arrays = (shard.ids[kept], shard.mask[kept], shard.logprobs[kept], shard.versions[kept])
    routed = None if shard.routed is None else shard.routed[kept]
    return TrainShard(shard.step, tuple(shard.items[i] for i in indices), *arrays, shard.denominators, routed)


def with_routing(shard: TrainShard, layers: int, experts: int, top_k: int, *, share: float = 0.8) -> TrainShard:
    """The same with a recorded choice of drawn experts for this share of its tokens."""
    random = np.random.default_rng(shard.step)
    orders = random.random((len(shard.ids), layers, experts)).argsort(-1)[..., :top_k]
    routed = orders.astype(dtype_of(experts))
    routed[random.random(len(shard.ids)) >= share] = unrecorded(routed.dtype)
    return replace(shard, routed=routed)


def make_job(
    *, model: str = "tiny", dtype: Literal["float32", "float16", "bfloat16"] = "float32", temperature: float = 1.0,
    world: World | None = None, algorithm: Algorithm | None = None, steps: int = 4, **trainer: Any,
) -> Job:  # fmt: skip
    settings: dict[str, Any] = {"learning_rate": 1e-3, "seq_len": 256, "grad_clip": 1e9, **trainer}
    return Job(
        algorithm=algorithm or GRPO(),
        model=ModelSettings(name=model, dtype=dtype),
        trainer=TrainerSettings(**settings),
        number_of_steps=steps,
        temperature=temperature,
        max_tokens=36,
        seed=0,
        world=world or World(rank=0, size=1, device="cpu"),
    )
