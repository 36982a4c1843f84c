"""How many prompts of an eval are among those that are trained on: said before anything is trained, since such a score may be
memory. Looks at no more than `LOOKED_AT` prompts of a split, at equal distances.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from telescope.config.evals import Eval
from telescope.environments.base import Prompt
from telescope.environments.identity import identify
from telescope.flow.limits import EVAL_SPLIT
from telescope.workers.loading import LoadedEnvironment

LOOKED_AT = 20_000
"""Of a split: some seconds."""
TRAIN = "train"


def count_shared(
    loaded: Mapping[str, LoadedEnvironment], evals: Sequence[Eval], trained: Sequence[str]
) -> dict[str, LoadedEnvironment]:
    """The environments, with what evals share with training on the card of each that an eval plays. `trained`: labels."""
    played = {one.label for one in evals}
    if not played:
        return dict(loaded)
    train = {identify(prompt) for label in trained for prompt in _spread(loaded[label].prompts[TRAIN])}
    counted = dict(loaded)
    for label in sorted(played):
        most = max((one.num_prompts or len(loaded[label].prompts[EVAL_SPLIT])) for one in evals if one.label == label)
        shared = sum(identify(prompt) in train for prompt in _spread(loaded[label].prompts[EVAL_SPLIT], most))
        counted[label] = replace(
            loaded[label], card=msgspec.structs.replace(loaded[label].card, in_training=shared or msgspec.UNSET)
        )
    return counted


def _spread(prompts: Sequence[Prompt], most: int | None = None) -> Iterator[Prompt]:
    """The first `most`, or as many of them as are looked at."""
    size = len(prompts) if most is None else min(most, len(prompts))
    step = max(1, -(-size // LOOKED_AT))
    return (prompts[at] for at in range(0, size, step))
