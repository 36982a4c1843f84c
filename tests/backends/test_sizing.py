"""What a rank of `backend=fsdp` says at its start of rows that are too short for its card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from telescope.backends.base import Job, World
from telescope.backends.common import attention
from telescope.backends.fsdp import FSDP, sizing
from telescope.backends.fsdp.sizing import remark
from telescope.config.sections import LoraSettings, ModelSettings
from tests.backends.shards import make_job

GIB = 2**30
SMALL = {
    "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip
"""Qwen3-0.6B."""


def on_a_card(**other: Any) -> Job:
    job = make_job(seq_len=4096, world=World(rank=0, size=1, device="cuda:0"))
    return replace(job, **{"rollouts": 128, "max_tokens": 3700} | other)


def said(job: Job, *, settings: FSDP | None = None, peak: float | None = 989e12, gib: float = 140) -> str | None:
    settings = settings or FSDP(compile=True, gradient_checkpointing=False, recompute_pointwise=False)
    return remark(settings, job, SMALL, peak, int(gib * GIB))


def longest(sentence: str | None) -> int:
    assert sentence is not None
    return int(sentence.split("trainer.seq_len=")[2].partition(",")[0])


def test_the_first_rank_says_it_with_what_fits_on_its_own_card() -> None:
    """Samples of 0.4 · 3,700 + 200 tokens, 128 an update; the longest row by the memory that there is."""
    job = on_a_card()
    assert [longest(said(job, gib=gib)) for gib in (140, 79, 24)] == [65_536, 32_768, 8192]
    shared = World(rank=0, size=1, device="cuda:0", memory_share=0.3)  # 42 GiB, and the version for the server
    assert longest(said(replace(job, world=shared))) == 16_384
    assert longest(said(replace(job, rollouts=8))) == 16_384  # 13,440 tokens
    lora = replace(job, model=ModelSettings(lora=LoraSettings(rank=16), dtype="bfloat16"))
    assert longest(said(lora)) == 65_536
    leaner = FSDP(compile=True, gradient_checkpointing=False)  # pointwise results are made again: a seventh less memory
    assert longest(said(job, settings=leaner)) == 131_072


def test_samples_are_as_long_as_prompt_and_answer_together_may_be() -> None:
    """As `plan` counts them: those of 4,096 tokens are parts of attention, whose results are there twice (1.8 GiB of them)."""
    assert longest(said(on_a_card(), gib=34)) == 16_384
    assert longest(said(on_a_card(max_model_len=4096), gib=34)) == 8192
    assert longest(said(on_a_card(max_model_len=4095), gib=34)) == 16_384


def test_of_two_ranks_each_has_half_of_an_updates_tokens() -> None:
    assert longest(said(on_a_card(rollouts=8, world=World(rank=0, size=2, device="cuda:0")))) == 8192


@pytest.mark.parametrize(
    "other",
    [
        {"rollouts": 0},  # as of a step that is run again
        {"rollouts": 2},  # one row has them
        {"world": World(rank=1, size=2, device="cuda:1")},
        {"world": World(rank=0, size=1, device="cpu")},
    ],
)
def test_nobody_else_says_it(other: dict[str, Any]) -> None:
    assert said(on_a_card(**other)) is None


def test_nothing_is_said_of_a_card_or_a_model_that_is_not_known() -> None:
    assert said(on_a_card(), peak=None) is None
    assert said(on_a_card(), gib=10) is None  # nothing longer fits
    assert remark(FSDP(), on_a_card(), {**SMALL, "num_experts": 64}, 989e12, 140 * GIB) is None


def test_a_sample_is_as_long_for_the_estimate_as_for_attention() -> None:
    assert sizing.LONG == attention.LONG
