"""Which prompts of a split fit the model: the others are left out before the worker says hello, and counted.

Owns the measuring and its deadline. Refuses to cut a prompt short: a question without its end is another question.
"""

from __future__ import annotations

import hashlib
import logging
import math
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
_NO_DIGITS = str.maketrans("", "", "0123456789")
WORD_BYTES = 12
"""Of words and the space behind each, on average at most, in what is taken for plain text."""
RATED_BYTES, RATED = 400, 32
"""A prompt of so many bytes tells the tokens of a byte, where so many prompts of the sample do."""
FRAMED = 4
"""Prompts of the sample that tell the tokens of tools: their schemas are the same for all."""
LOOKED_AT = 16
"""Characters for each token of `longest`: what follows them decides nothing where these are too many tokens already."""


@dataclass(frozen=True)
class _Measure:
    """`longest` is the most tokens that a prompt may have; `deadline` is one of `time.monotonic`."""

    label: str
    template: ChatTemplate
    longest: int
    deadline_s: float
    deadline: float
    surplus: int = 0
    """Tokens that the template adds beyond a text's bytes."""
    rate: float = math.inf
    """Most tokens of a byte of plain text, in the sample."""


def leave_out_too_long(loaded: LoadedEnvironment, template: ChatTemplate, longest: int, deadline_s: float) -> LoadedEnvironment:
    """The environment without the train prompts of more than `longest` tokens, the schemas of its tools included; its card
    says how many there were.

    Only what is near the limit is tokenised. What is far below it by its bytes, or as plain text by twice the most tokens of a
    byte in a sample, stays; what is far above it is left out by its words. Of a split that is made by a formula (`LazyPrompts`)
    nothing is measured but the sample, if none of it has more than half of `longest`. What is drawn and is too long after all
    is never sent: it fails its rollout. The outcome follows from prompts and tokenizer alone, never from the time it takes.
    Raises `EnvironmentBroken` where no prompt fits, one is rendered to nothing, or `deadline_s` has passed.
    """
    prompts = loaded.prompts[SPLIT]
    sample = list(sample_prompts(prompts))
    told = _count_beside(loaded, template, sample[:FRAMED])
    longest -= told
    if longest <= 0:
        raise EnvironmentBroken(
            f"{loaded.place}: the schemas of its tools alone have {told} tokens, and inference.max_model_len - "
            f"{loaded.max_tokens_setting} leaves a prompt {longest + told}: raise inference.max_model_len, lower "
            f"{loaded.max_tokens_setting} or offer fewer tools"
        )
    measure = _Measure(loaded.label, template, longest, deadline_s, time.monotonic() + deadline_s)
    lengths = _measure_sample(measure, sample)
    if isinstance(prompts, LazyPrompts) and len(prompts) > SAMPLE and 2 * max(lengths) <= longest:
        return loaded
    fits = np.concatenate(list(_measure_prompts(_rated(measure, sample, lengths), prompts)))
    too_long = int((~fits).sum())
    if too_long == len(prompts):
        raise EnvironmentBroken(
            f"environments.{loaded.label}: each of its {too_long} train prompts is longer than the {longest} tokens that "
            f"inference.max_model_len - {loaded.max_tokens_setting} leaves{_say_beside(told)} "
            f"(shortest: {_find_shortest(measure, sample)}): raise inference.max_model_len or lower {loaded.max_tokens_setting}"
        )
    return _leave_out(loaded, np.flatnonzero(fits)) if too_long else loaded


def _count_beside(loaded: LoadedEnvironment, template: ChatTemplate, prompts: Sequence[Prompt]) -> int:
    """Tokens that the environment puts into its first request beside a prompt's own turns: the schemas of its tools."""
    try:
        asked = [(prompt.turns, loaded.environment.first_request(prompt, template)) for prompt in prompts]
        pairs = [
            (len(template.render(turns, tools).ids), len(template.render(own).ids))
            for own, (turns, tools) in asked
            if tools or turns is not own
        ]
    except Exception as error:
        raise EnvironmentBroken(
            f"environments.{loaded.label}: its prompts can't be rendered for the model: {describe(error)}"
        ) from error
    return max((whole - own for whole, own in pairs), default=0)


def _say_beside(told: int) -> str:
    return f" beside the {told} tokens of its tools' schemas" if told > 0 else ""


def _leave_out(loaded: LoadedEnvironment, places: np.ndarray) -> LoadedEnvironment:
    card, prompts = loaded.card, loaded.prompts[SPLIT]
    digest = hashlib.sha256(card.digest.encode() + places.astype("<i8").tobytes()).hexdigest()[: len(card.digest)]
    sizes = {**card.split_sizes, SPLIT: len(places)}
    card = msgspec.structs.replace(card, split_sizes=sizes, digest=digest, too_long=len(prompts) - len(places))
    kept = LazyPrompts(len(places), lambda at: prompts[int(places[at])])  # in their order, numbered anew
    return replace(loaded, prompts={**loaded.prompts, SPLIT: kept}, card=card)


def _measure_sample(measure: _Measure, sample: Sequence[Prompt]) -> list[int]:
    """Tokens of each; of what is far above the limit a number above it."""
    far = [_is_far_above(measure, prompt) for prompt in sample]
    counted = iter(_count_tokens(measure, [prompt for prompt, above in zip(sample, far, strict=True) if not above]))
    return [measure.longest + 1 if above else next(counted) for above in far]


def _rated(measure: _Measure, sample: Sequence[Prompt], lengths: Sequence[int]) -> _Measure:
    """With what the sample tells of the template and the tokenizer."""
    sizes = [_count_bytes(prompt) for prompt in sample]
    surplus = max(length - size for length, size in zip(lengths, sizes, strict=True))
    rates = [
        length / size
        for prompt, length, size in zip(sample, lengths, sizes, strict=True)
        if RATED_BYTES <= size <= LOOKED_AT * measure.longest and _is_plain(prompt)
    ]
    return replace(measure, surplus=max(surplus, 0), rate=max(rates) if len(rates) >= RATED else math.inf)


def _measure_prompts(measure: _Measure, prompts: Sequence[Prompt]) -> Iterator[np.ndarray]:
    """Whether each prompt fits, chunk by chunk [chunk] bool."""
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
        yield _measure_chunk(measure, [prompts[index] for index in range(start, min(start + CHUNK, size))])


def _measure_chunk(measure: _Measure, chunk: Sequence[Prompt]) -> np.ndarray:
    fits = np.array([_is_far_below(measure, prompt) for prompt in chunk])
    unsure = [place for place in np.flatnonzero(~fits) if not _is_far_above(measure, chunk[place])]
    if unsure:
        lengths = _count_tokens(measure, [chunk[place] for place in unsure])
        fits[unsure] = np.array(lengths) <= measure.longest
    return fits


def _is_far_below(measure: _Measure, prompt: Prompt) -> bool:
    """No tokenizer in use makes two tokens of a byte; nor, of plain text, twice the tokens that a sample of it has."""
    size = _count_bytes(prompt)
    if 2 * (size + measure.surplus) <= measure.longest:
        return True
    return 2 * measure.rate * max(size, RATED_BYTES) <= measure.longest and _is_plain(prompt)


def _is_far_above(measure: _Measure, prompt: Prompt) -> bool:
    """By the words of plain text, of which no tokenizer in use makes a token of two."""
    looked_at = LOOKED_AT * measure.longest
    for turn in prompt.turns:
        text = turn.get("content")
        if isinstance(text, str) and len(text) > 2 * measure.longest:
            begin = text[:looked_at]
            if begin.count(" ") > 2 * measure.longest and begin.isascii() and "  " not in begin:
                return True
    return False


def _is_plain(prompt: Prompt) -> bool:
    """Words in ASCII with spaces between them: no Chinese, no base64, no code without a space, no table of numbers."""
    return all(isinstance(value, str) and _is_plain_text(value) for turn in prompt.turns for value in turn.values())


def _is_plain_text(text: str) -> bool:
    if not text.isascii() or WORD_BYTES * (text.count(" ") + 1) < len(text) or "  " in text:
        return False
    return 10 * (len(text) - len(text.translate(_NO_DIGITS))) <= len(text)


def _count_tokens(measure: _Measure, prompts: Sequence[Prompt]) -> list[int]:
    """Tokens of each prompt as it is put to the model; of a very long one a number above `longest`, if its begin has twice as
    many."""
    try:
        lengths = measure.template.lengths([prompt.turns for prompt in prompts], 2 * measure.longest, LOOKED_AT // 2)
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


def _find_shortest(measure: _Measure, sample: Sequence[Prompt]) -> int:
    """Tokens of the prompt that has the fewest bytes."""
    return measure.template.lengths([min(sample, key=_count_bytes).turns])[0]


def _count_bytes(prompt: Prompt) -> int:
    return sum(_count_bytes_of(value) for turn in prompt.turns for value in turn.values())


def _count_bytes_of(value: object) -> int:
    text = str(value)
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
