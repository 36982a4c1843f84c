"""The frozen base model and the entropy bonus, on the real backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from telescope.algorithms.grpo import GRPO
from telescope.config.models import model_source
from tests.backends.shards import make_job, make_shard
from tests.backends.test_minibatches import logprobs, pieces, same
from tests.backends.watching import distance

PENALISED = GRPO(kl_ref_coef=0.5)


def base_model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_source("tiny"), attn_implementation="eager")


def test_the_first_step_is_at_the_base_model_exactly_so_k3_pulls_nowhere(build):
    plain = build(make_job(algorithm=GRPO()))
    plain.train_step(make_shard())
    gradients = plain.gradients
    penalised = build(make_job(algorithm=PENALISED))
    result = penalised.train_step(make_shard())
    assert result.metrics["kl_ref"] == 0.0
    assert same(gradients, penalised.gradients)
    assert "timing_compute_kl_total" in result.timings


def test_in_half_precision_the_frozen_copy_still_agrees_to_the_bit(build):
    backend = build(make_job(algorithm=PENALISED), mixed_precision_dtype="bfloat16")
    assert backend.train_step(make_shard()).metrics["kl_ref"] == 0.0
    assert {parameter.dtype for parameter in backend._reference.parameters()} == {torch.bfloat16}
    assert backend.train_step(make_shard(2)).metrics["kl_ref"] > 0.0


def test_later_steps_are_measured_from_the_base_model_and_pulled_back_to_it(build):
    backend = build(make_job(algorithm=PENALISED, learning_rate=0.1), optimizer="sgd")
    backend.train_step(make_shard(1, seed=1))
    moved = base_model()
    moved.load_state_dict(dict(backend.weights()), strict=False)
    moved.tie_weights()
    shard = make_shard(2, seed=2)
    result = backend.train_step(shard)
    base, loss, divergences = base_model(), torch.zeros(()), []
    for item, ids, _ in pieces(shard):
        current = logprobs(moved, ids)
        gap = current - logprobs(base, ids).detach()
        divergence = (-gap).exp() - 1 + gap
        loss = loss + (-current * item.advantage + 0.5 * divergence).sum() / shard.denominators[0].tokens
        divergences.append(divergence.detach())
    loss.backward()
    assert result.metrics["kl_ref"] == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-3)
    assert result.metrics["kl_ref"] > 0.01
    assert distance({f"lm.{name}": p.grad for name, p in moved.named_parameters()}, backend.gradients) < 1e-4


def test_no_copy_is_kept_where_nothing_reads_it_and_none_is_published(build):
    assert build(make_job())._reference is None
    names = [name for name, _ in build(make_job()).weights()]
    assert [name for name, _ in build(make_job(algorithm=PENALISED)).weights()] == names


def test_the_entropy_bonus_has_the_gradient_of_the_mean_entropy(build):
    """Advantages of 0 leave nothing else."""
    shard = make_shard()
    items = tuple(type(i)(**{**{f: getattr(i, f) for f in i.__struct_fields__}, "advantage": 0.0}) for i in shard.items)
    shard = type(shard)(1, items, shard.ids, shard.mask, shard.logprobs, shard.versions, shard.denominators)
    backend = build(make_job(algorithm=GRPO(entropy_coef=0.3)))
    result = backend.train_step(shard)
    model, entropies = base_model(), []
    for _, ids, _ in pieces(shard):
        logp = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, 3:-1].log_softmax(-1)
        entropies.append(-(logp.exp() * logp).sum(-1))
    mean = torch.cat(entropies).mean()
    (-0.3 * mean).backward()
    assert result.metrics["loss"] == pytest.approx(-0.3 * mean.item(), rel=1e-5)
    assert distance({f"lm.{name}": p.grad for name, p in model.named_parameters()}, backend.gradients) < 1e-5
