"""What the trainer's benchmarks train: drawn samples, and a rank's shard of them as the backend takes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from telescope.backends.base import TrainShard
from telescope.maths.dealing import assign
from telescope.maths.minibatches import denominators
from telescope.records import TrainItem

PROMPT = 16
"""Tokens of each sample that are not trained, unless asked otherwise."""


@dataclass(frozen=True)
class Samples:
    """What all ranks train in a step."""

    lengths: tuple[int, ...]
    ids: tuple[np.ndarray, ...]
    prompt: int = PROMPT
    """First tokens of each, which are not trained and the same in a group."""
    group: int = 2
    """Samples of one prompt."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def context(self) -> float:
        """T of the MFU: the length of the sample that a token is in, on average."""
        return sum(length**2 for length in self.lengths) / self.tokens


def draw(
    count: int, mean: int, longest: int, vocabulary: int, *, even: bool = False, prompt: int = PROMPT, group: int = 2
) -> Samples:  # fmt: skip
    """Log-normal lengths around `mean`, none above `longest`; `even`: all of `mean` tokens. Prompts count in a length."""
    random = np.random.default_rng(0)
    spread = random.lognormal(np.log(mean) - 0.32, 0.8, count)
    lengths = [min(mean, longest)] * count if even else np.clip(spread, prompt + PROMPT, longest).astype(int).tolist()
    prompts = [random.integers(0, vocabulary, prompt) for _ in range(-(-count // group))]
    answers = [random.integers(0, vocabulary, length - prompt) for length in lengths]
    ids = tuple(np.concatenate([prompts[number // group], answer]) for number, answer in enumerate(answers))
    return Samples(tuple(lengths), ids, prompt, group)


def shard_of(samples: Samples, rank: int, size: int) -> TrainShard:
    """This rank's, dealt by length."""
    mine = assign([float(length) for length in samples.lengths], size)[rank]
    prompt, group = samples.prompt, samples.group
    trained = [length - prompt for length in samples.lengths]
    masks = [np.r_[np.zeros(prompt, np.uint8), np.ones(trained[i], np.uint8)] for i in mine]
    mask = np.concatenate(masks)
    items = tuple(
        TrainItem(
            rollout_id=i, group_id=i // group, sequence=i, length=samples.lengths[i], advantage=1.0 - 2.0 * (i % 2),
            sequence_tokens=trained[i], temperature=1.0,
        )
        for i in mine
    )  # fmt: skip
    return TrainShard(
        step=1,
        items=items,
        ids=np.concatenate([samples.ids[i] for i in mine]).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -12.0, np.nan).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        denominators=(denominators(trained, [i // group for i in range(len(trained))]),),
    )
