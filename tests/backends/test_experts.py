"""Models with experts: trained as transformers trains them, router included, and published as their files have them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from telescope.backends.common import names
from tests.backends.models import random_experts
from tests.backends.shards import make_job, make_shard
from tests.backends.test_fsdp import draw, logprobs_of, row_of
from tests.backends.watching import distance

KINDS = ("qwen3_moe", "mixtral")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("experts")
    return {kind: random_experts(folder / kind, kind) for kind in KINDS}


def plain(folder: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_a_model_with_experts_is_that_of_the_loss_over_plain_samples(build, models, kind):
    """By transformers alone, a sample at a time, an expert at a time. Routers and experts have a gradient of their own."""
    shard = make_shard()
    backend = build(make_job(model=models[kind], seq_len=64))
    result = backend.train_step(shard)
    lm = plain(models[kind])
    loss, end = torch.zeros(()), 0
    for item in shard.items:
        start, end = end, end + item.length
        ids = torch.from_numpy(shard.ids[start:end].astype(np.int64))
        logp = lm(ids[None]).logits[0, 3:-1].log_softmax(-1).gather(1, ids[4:, None])
        loss = loss - logp.sum() * item.advantage / shard.denominators[0].tokens
    loss.backward()
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    expected = {f"lm.{name}": parameter.grad for name, parameter in lm.named_parameters()}
    assert all(float(expected[name].norm()) > 0 for name in expected if "experts" in name or "gate" in name)
    assert distance(expected, backend.gradients) < 1e-4


@pytest.mark.parametrize("width", [22, 24])
@pytest.mark.parametrize("computing", ["float32", "bfloat16"])
def test_experts_whose_rows_the_grouped_product_does_not_take_are_trained_one_by_one(build, tmp_path, caplog, width, computing):
    """22 numbers are 88 bytes in float32, no multiple of 16; 24 of them are 96, and 48 in bfloat16."""
    folder = random_experts(tmp_path / "model", "qwen3_moe", moe_intermediate_size=width)
    with caplog.at_level("WARNING", logger="telescope.backends.fsdp.experts"):
        backend = build(make_job(model=folder), mixed_precision_dtype=computing)
    assert ("rows of 22" in caplog.text) == (width == 22)
    assert (f"no multiple of 16 bytes in {computing}" in caplog.text) == (width == 22)
    result = backend.train_step(make_shard())
    if computing == "float32":
        samples = draw(30)
        with torch.no_grad():
            logp = plain(folder)(torch.from_numpy(samples[0])[None]).logits[0].log_softmax(-1)
        expected = logp[:-1].gather(1, torch.from_numpy(samples[0])[1:, None]).squeeze(1)
        found = logprobs_of(build(make_job(model=folder)), row_of(samples))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert result.metrics["grad_norm"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_published_one_by_one_under_the_names_of_the_models_files(build, models, kind, tmp_path):
    backend = build(make_job(model=models[kind]))
    backend.train_step(make_shard())
    weights = dict(backend.weights())
    with (Path(models[kind]) / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    assert {name: list(tensor.shape) for name, tensor in weights.items()} == shapes
    assert sum(".experts." in name for name in weights) == 2 * 4 * 3
    assert [kind.name for kind in backend.layout()] == list(weights)

    from safetensors.torch import save_file

    for file in Path(models[kind]).glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    moved = dict(plain(str(tmp_path)).named_parameters())
    trained = {name.removeprefix("lm."): p.detach().full_tensor() for name, p in backend._policy.named_parameters()}
    assert moved.keys() == trained.keys()
    assert all(torch.equal(moved[name].detach(), trained[name]) for name in trained)


def test_what_a_router_adds_to_scores_is_published_as_it_is_though_no_step_changes_it(build, tmp_path):
    """A buffer to transformers, a weight to servers: without it they would refuse the version, and rounded to the wire's
    bfloat16 it would choose other experts."""
    folder = random_experts(tmp_path / "glm4_moe", "glm4_moe")
    backend = build(make_job(model=folder))
    backend.train_step(make_shard())
    stored = load_file(Path(folder) / "model.safetensors")
    published = dict(backend.weights("bfloat16"))
    assert published.keys() == stored.keys()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(published[name], stored[name])
    assert {tensor.dtype for key, tensor in published.items() if key != name} == {torch.bfloat16}
    assert [kind.name for kind in backend.layout() if kind.exact] == [name]


def test_the_matrices_of_experts_are_published_by_all_ranks_in_turn(models):
    """Of four experts two ranks have two each: 0 and 2 come first, then 1 and 3; a gate and its up stay together."""
    lm = plain(models["qwen3_moe"])
    parameters = dict(lm.named_parameters())
    found = names.in_turn(names.table(lm, parameters), parameters, shards=2)
    own = [name.removeprefix("model.layers.0.mlp.experts.") for name in found if name.startswith("model.layers.0.mlp.experts")]
    assert own == [
        *(f"{expert}.{which}_proj.weight" for expert in (0, 2, 1, 3) for which in ("gate", "up")),
        *(f"{expert}.down_proj.weight" for expert in (0, 2, 1, 3)),
    ]
    assert found["model.layers.0.mlp.experts.2.up_proj.weight"] == names.Rows(
        "model.layers.0.mlp.experts.gate_up_proj", 2 * 48 + 24, (24, 32), depth=2
    )


def test_a_conversion_that_is_more_than_a_choice_of_rows_is_refused(models):
    from transformers.core_model_loading import Transpose, WeightConverter

    lm = plain(models["qwen3_moe"])
    lm._weight_conversions = [
        WeightConverter(
            source_patterns="mlp.experts.gate_up_proj", target_patterns="mlp.experts.gate_up_proj", operations=[Transpose(0, 1)]
        )
    ]
    with pytest.raises(names.Unpublishable, match=r"experts\.gate_up_proj is more than a stack of"):
        names.table(lm, dict(lm.named_parameters()))


def test_a_router_that_trains_with_noise_does_without(build, tmp_path):
    """A log-prob must not depend on chance."""
    row = row_of(draw(30))
    backend = build(make_job(model=random_experts(tmp_path / "noisy", "mixtral", router_jitter_noise=0.3)))
    noisy = logprobs_of(backend, row)
    assert torch.equal(noisy, logprobs_of(backend, row))
    still = build(make_job(model=random_experts(tmp_path / "still", "mixtral")))
    assert torch.equal(noisy, logprobs_of(still, row))
