"""Adapters in training: they alone move and are published, and what they compute is what peft's file says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from telescope.backends.base import Job
from telescope.backends.fsdp.policy import UnfitModel
from telescope.config.models import model_folder, model_source
from telescope.config.sections import LoraSettings
from telescope.inference.vllm.adapters import expected_tensors
from telescope.inference.vllm.model_tensors import checkpoint_tensors
from tests.backends.models import random_model
from tests.backends.shards import make_job, make_shard
from tests.backends.test_fsdp import draw, logprobs_of, row_of

LORA = LoraSettings(rank=4, alpha=8)


def lora_job(lora: LoraSettings = LORA, **settings: object) -> Job:
    job = make_job(**settings)
    return replace(job, model=job.model.model_copy(update={"lora": lora}))


def test_before_the_first_step_the_adapters_change_nothing(build):
    row = row_of(draw(21, 50))
    plain = logprobs_of(build(make_job()), row)
    assert torch.equal(logprobs_of(build(lora_job()), row), plain)


def test_a_version_is_the_adapters_alone_and_holds_all_that_the_server_expects(build):
    weights = dict(build(lora_job()).weights())
    expected = expected_tensors(LORA, checkpoint_tensors(model_folder("tiny")))
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert all((tensor == 0).all() == (".lora_B." in name) for name, tensor in weights.items())


def test_a_step_moves_adapters_and_nothing_else_and_what_is_published_merged_gives_the_trained_log_probs(build):
    backend = build(lora_job(), mixed_precision_dtype=None)
    base = {n: p.detach().full_tensor().clone() for n, p in backend._policy.named_parameters() if not p.requires_grad}
    row, before = row_of(draw(40)), {name: tensor.clone() for name, tensor in backend.weights()}
    start = logprobs_of(backend, row)
    for step in (1, 2, 3):
        metrics = backend.train_step(make_shard(step)).metrics
    assert metrics["grad_norm"] > 0
    after = dict(backend.weights())
    assert all(not torch.equal(before[name], after[name]) for name in after)
    for name, parameter in backend._policy.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter.detach().full_tensor(), base[name])

    merged = AutoModelForCausalLM.from_pretrained(model_source("tiny"), attn_implementation="eager").eval()
    state = merged.state_dict()
    for name in [name for name in after if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        update = after[name.replace("lora_A", "lora_B")] @ after[name]
        state[f"{module}.weight"] += update * LORA.alpha / LORA.rank
    sample = torch.from_numpy(draw(40)[0])
    with torch.no_grad():
        expected = merged(sample[None]).logits[0, :-1].log_softmax(-1).gather(1, sample[1:, None])[:, 0]
    trained = logprobs_of(backend, row)
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-4)
    assert (trained - start).abs().max() > 1e-3


def test_the_optimiser_holds_state_for_adapters_alone(build):
    backend = build(lora_job())
    backend.train_step(make_shard())
    held = sum(state["exp_avg"].numel() for state in backend._updater.optimizer.state.values())
    assert held == sum(tensor.numel() for _, tensor in backend.weights())


def test_adapters_are_float32_in_a_bfloat16_model_and_small_steps_count(build):
    backend = build(lora_job(dtype="bfloat16", learning_rate=1e-6))
    backend.train_step(make_shard())
    weights = dict(backend.weights())
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    first = next(tensor for name, tensor in weights.items() if ".lora_B." in name)
    np.testing.assert_allclose(first.abs().max().item(), 1e-6, rtol=0.1)


def test_a_target_that_the_model_does_not_have_is_told_with_those_it_has(build):
    with pytest.raises(UnfitModel, match=r"target_modules names qkv_proj, which Qwen\w+ForCausalLM does not have; .*q_proj"):
        build(lora_job(LoraSettings(target_modules=("qkv_proj", "o_proj"))))


def test_an_adapter_of_the_head_is_refused_as_it_would_never_be_trained(build, tmp_path):
    model = random_model(tmp_path / "model", tie_word_embeddings=False)
    with pytest.raises(UnfitModel, match=r"target_modules names lm_head, the head of Qwen3ForCausalLM: .* leave it out"):
        build(lora_job(LoraSettings(target_modules=("q_proj", "lm_head")), model=model))


def test_a_reference_beside_is_the_model_without_adapters(build):
    from telescope.algorithms.grpo import GRPO

    backend = build(lora_job(algorithm=GRPO(kl_ref_coef=0.1)))
    first = backend.train_step(make_shard(1)).metrics
    second = backend.train_step(make_shard(2)).metrics
    assert first["kl_ref"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl_ref"] > 1e-6
