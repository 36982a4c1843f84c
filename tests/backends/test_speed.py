"""Tokens a second and the share of the card's operations, of the step's own samples."""

from __future__ import annotations

import pytest

from telescope.backends.common.work import peak_flops, training_work
from tests.backends.models import random_model
from tests.backends.shards import LENGTHS, make_job, make_shard


def test_a_cpu_has_no_mfu_unless_its_peak_is_given(build):
    """tiny: squares of the samples' lengths, not of the row's that holds them all."""
    result = build(make_job()).train_step(make_shard())
    assert "mfu" not in result.metrics
    assert "squared_tokens" not in result.metrics
    seconds = result.timings["timing_step_active"]
    assert result.metrics["trainer_tokens_per_s"] == pytest.approx(sum(LENGTHS) / seconds)
    backend = build(make_job(peak_flops=1e9))
    result = backend.train_step(make_shard())
    operations = backend._work.operations(sum(LENGTHS), sum(length * length for length in LENGTHS))
    assert result.metrics["mfu"] == pytest.approx(operations / result.timings["timing_step_active"] / 1e9)
    assert peak_flops("cpu", None) is None


def test_an_embedding_that_is_only_looked_up_does_not_count(build, tmp_path):
    """hidden 32, vocabulary 128: the model without its embedding."""
    untied = random_model(tmp_path / "untied", tie_word_embeddings=False)
    lm = build(make_job(model=untied))._policy.lm
    everything = sum(parameter.numel() for parameter in lm.parameters())
    looked_up = lm.get_input_embeddings().weight.numel()
    assert training_work(lm).token == 6.0 * (everything - looked_up)
