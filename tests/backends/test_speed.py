"""Tokens a second and the share of the card's operations, of the step's own samples."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from telescope.algorithms.grpo import GRPO
from telescope.backends.common.model_work import peak_flops, training_work
from tests.backends.models import random_model, random_other
from tests.backends.shards import LENGTHS, in_minibatches, make_job, make_shard


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


@pytest.mark.parametrize(
    ("kind", "changes", "width"),
    [
        ("gemma4_text", {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 16, "global_head_dim": 32,
                         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}, 16 + 32),
        ("deepseek_v2", {"head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
                         "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 2}, 18 + 18),
    ],
    ids=["heads of two widths", "values narrower than keys"],
)  # fmt: skip
def test_each_layers_heads_count_by_their_own_width(tmp_path, kind, changes, width):
    """Two layers of 4 heads; 12 operations for each number of keys, half of them over the triangle: 6."""
    lm = AutoModelForCausalLM.from_pretrained(random_other(tmp_path / "model", kind, pad_token_id=0, **changes))
    assert training_work(lm).pair == 6.0 * 4 * width


def test_every_phase_of_every_row_is_a_span_in_its_place(build):
    """Two minibatches of which the second needs the log-probs from before, a reference, clipping and the optimiser's step."""
    job = make_job(algorithm=GRPO(use_tis=True, kl_ref_coef=0.1), seq_len=64)
    result = build(job).train_step(in_minibatches(make_shard(), (6, 2)))
    rows = {0: 2, 1: 1}
    phases = ("data_to_device", "compute_kl", "forward", "loss_computation", "backward")
    for minibatch, count in rows.items():
        for row in range(count):
            names = [span.name for span in result.spans if (span.minibatch, span.row) == (minibatch, row)]
            assert names == list(phases)
        names = [span.name for span in result.spans if (span.minibatch, span.row) == (minibatch, None)]
        assert names == ["clip", "optimizer"]
    rest = [(span.name, span.row) for span in result.spans if span.minibatch is None]
    assert rest == [("prepare_tensors", None), ("compute_old_logprobs", 0)]
    starts = [span.started_ns for span in result.spans]
    assert starts == sorted(starts)
    for name in (*phases, "clip", "optimizer"):
        total = sum(span.seconds for span in result.spans if span.name == name)
        assert result.timings[f"timing_{name}_total"] == pytest.approx(total)
    assert result.timings["timing_forward_microbatch_mean"] == pytest.approx(result.timings["timing_forward_total"] / 3)
    assert sum(span.seconds for span in result.spans) <= result.timings["timing_step_active"]
