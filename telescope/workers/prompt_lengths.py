"""Which prompts of a split fit the model: the others are left out before the worker says hello, and counted.

Owns the measuring and its deadline. Refuses to cut a prompt short: a question without its end is another question.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from telescope.environments.base import LazyPrompts, Prompt
from telescope.environments.template import ChatTemplate
from telescope.workers.loading import SAMPLE, EnvironmentBroken, LoadedEnvironment, describe, sample_prompts

log = logging.getLogger(__name__)

SPLIT = "train"
"""The split that is drawn from, and therefore measured."""
CHUNK = 1_000
"""Prompts that are rendered and tokenised together."""
SAID_EVERY_S = 10.0


@dataclass(frozen=True)
class _Measure:
    """`longest` is the most tokens that a prompt may have; `deadline` is one of `time.monotonic`."""

    label: str
    template: ChatTemplate
    longest: int
    deadline_s: float
    deadline: float


def leave_out_too_long(loaded: LoadedEnvironment, template: ChatTemplate, longest: int, deadline_s: float) -> LoadedEnvironment:
    """The environment without the train prompts of more than `longest` tokens; its card says how many there were.

    A data set is measured whole. Of a split that is made by a formula (`LazyPrompts`) a sample is, and the rest only if one of
    the sample has more than half of `longest`: what is drawn later and is too long after all fails its rollout.
    Raises `EnvironmentBroken` where no prompt fits, one is rendered to nothing, or `deadline_s` has passed.
    """
    measure = _Measure(loaded.label, template, longest, deadline_s, time.monotonic() + deadline_s)
    prompts = loaded.prompts[SPLIT]
    sample = list(sample_prompts(prompts))
    lengths = _count_tokens(measure, sample)
    if isinstance(prompts, LazyPrompts) and len(prompts) > SAMPLE and 2 * max(lengths) <= longest:
        return loaded
    surplus = max(length - _count_bytes(prompt) for length, prompt in zip(lengths, sample, strict=True))
    fits = np.concatenate(list(_measure_prompts(measure, prompts, max(surplus, 0))))
    too_long = int((~fits).sum())
    if too_long == len(prompts):
        raise EnvironmentBroken(
            f"environments.{loaded.label}: each of its {too_long} train prompts is longer than the {longest} tokens that "
            f"inference.max_model_len - rollout.max_tokens leaves (shortest: {_find_shortest(measure, prompts)}): raise "
            "inference.max_model_len or lower rollout.max_tokens"
        )
    return _leave_out(loaded, np.flatnonzero(fits)) if too_long else loaded


def _leave_out(loaded: LoadedEnvironment, places: np.ndarray) -> LoadedEnvironment:
    card, prompts = loaded.card, loaded.prompts[SPLIT]
    digest = hashlib.sha256(card.digest.encode() + places.astype("<i8").tobytes()).hexdigest()[: len(card.digest)]
    sizes = {**card.split_sizes, SPLIT: len(places)}
    card = msgspec.structs.replace(card, split_sizes=sizes, digest=digest, too_long=len(prompts) - len(places))
    kept = LazyPrompts(len(places), lambda at: prompts[int(places[at])])  # in their order, numbered anew
    return replace(loaded, prompts={**loaded.prompts, SPLIT: kept}, card=card)


def _measure_prompts(measure: _Measure, prompts: Sequence[Prompt], surplus: int) -> Iterator[np.ndarray]:
    """Whether each prompt fits, chunk by chunk [chunk] bool. `surplus`: tokens that the template adds beyond a text's bytes."""
    size, said = len(prompts), time.monotonic()
    for start in range(0, size, CHUNK):
        now = time.monotonic()
        if now > measure.deadline:
            raise EnvironmentBroken(
                f"environments.{measure.label}: {start:,} of its {size:,} train prompts were measured in "
                f"{measure.deadline_s:g} s, half of cluster.placement_timeout_s: raise that"
            )
        if now - said > SAID_EVERY_S:
            said = now
            log.info("environments.%s: %d of %d train prompts measured", measure.label, start, size)
        yield _measure_chunk(measure, [prompts[index] for index in range(start, min(start + CHUNK, size))], surplus)


def _measure_chunk(measure: _Measure, chunk: Sequence[Prompt], surplus: int) -> np.ndarray:
    # No tokenizer in use makes two tokens of a byte, so most prompts need no rendering; what is near the limit is counted.
    fits = np.array([2 * (_count_bytes(prompt) + surplus) <= measure.longest for prompt in chunk])
    unsure = np.flatnonzero(~fits)
    if len(unsure):
        lengths = _count_tokens(measure, [chunk[place] for place in unsure])
        fits[unsure] = np.array(lengths) <= measure.longest
    return fits


def _count_tokens(measure: _Measure, prompts: Sequence[Prompt]) -> list[int]:
    """Tokens of each prompt as it is put to the model."""
    try:
        lengths = measure.template.lengths([prompt.turns for prompt in prompts])
    except Exception as error:
        raise EnvironmentBroken(
            f"environments.{measure.label}: its prompts can't be rendered for the model: {describe(error)}"
        ) from error
    if not all(lengths):
        raise EnvironmentBroken(
            f"environments.{measure.label}: a train prompt is rendered to 0 tokens: the chat template or the tokenizer of "
            "model.name leaves nothing of it"
        )
    return lengths


def _find_shortest(measure: _Measure, prompts: Sequence[Prompt]) -> int:
    return min(_count_tokens(measure, list(sample_prompts(prompts))))


def _count_bytes(prompt: Prompt) -> int:
    return sum(len(str(value).encode("utf-8", "replace")) for turn in prompt.turns for value in turn.values())
