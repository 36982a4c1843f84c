"""The FSDP backend on one rank: what is trained is what was sampled, however it is packed."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from telescope.algorithms.grpo import GRPO
from telescope.backends.common import attention, kernels
from telescope.backends.fsdp.policy import RowInput, UnfitModel, _no_chance
from telescope.config.models import model_source
from tests.backends.models import random_model, random_other
from tests.backends.plain import token_mean
from tests.backends.shards import VOCABULARY, make_job, make_shard, part
from tests.backends.watching import distance


def row_of(samples: list[np.ndarray], padding: int = 0, kind: kernels.Kind = "sdpa") -> RowInput:
    """All tokens but each sample's first count as sampled."""
    pieces = [*samples, np.zeros(padding, np.int64)]
    lengths = [len(piece) for piece in pieces]
    ids, positions = np.concatenate(pieces), np.concatenate([np.arange(length) for length in lengths])
    real = len(ids) - padding
    places = np.flatnonzero(positions[1:real] != 0)
    boundaries = np.cumsum([0, *lengths])
    tensors = [torch.from_numpy(array) for array in (ids[None], positions[None], places, ids[places + 1])]
    return RowInput(tensors[0], tensors[1], attention.segments(kind, boundaries, "cpu"), tensors[2], tensors[3], 1.0)


def draw(*lengths: int, seed: int = 3) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, length) for length in lengths]


@torch.no_grad()
def logprobs_of(backend, row: RowInput, temperature: float = 1.0) -> torch.Tensor:
    return backend._policy(replace(row, temperature=temperature), 1024)[0]


# ---- packing ---------------------------------------------------------------------------------------------------------


def test_a_packed_samples_logprobs_do_not_depend_on_its_neighbours_to_the_bit(build):
    backend = build(make_job())
    sample = draw(20)[0]
    before, after = draw(33, 70)
    other_before, other_after = draw(33, 70, seed=4)
    one = logprobs_of(backend, row_of([before, sample, after]))[32:51]
    two = logprobs_of(backend, row_of([other_before, sample, other_after]))[32:51]
    assert torch.equal(one, two)
    alone_in_a_row = logprobs_of(backend, row_of([draw(33, seed=9)[0] * 0, sample], padding=70))[32:51]
    assert torch.equal(one, alone_in_a_row)


def test_a_packed_samples_logprobs_are_those_of_the_sample_alone(build):
    backend = build(make_job())
    samples = draw(5, 33, 64, 2, 90)
    packed = logprobs_of(backend, row_of(samples, padding=13))
    alone = torch.cat([logprobs_of(backend, row_of([sample])) for sample in samples])
    torch.testing.assert_close(packed, alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_plain_transformers_model(build, temperature):
    backend = build(make_job(temperature=temperature))
    samples = draw(21, 50, 8)
    packed = logprobs_of(backend, row_of(samples), temperature)
    plain = AutoModelForCausalLM.from_pretrained(model_source("tiny"), attn_implementation="eager").eval()
    expected = []
    for sample in samples:
        ids = torch.from_numpy(sample)[None]
        with torch.no_grad():
            logp = (plain(ids).logits[0].float() / temperature).log_softmax(-1)
        expected.append(logp[:-1].gather(1, ids[0, 1:, None]).squeeze(1))
    torch.testing.assert_close(packed, torch.cat(expected), rtol=0, atol=5e-5)


def test_a_window_of_attention_is_kept_inside_packed_samples(build, tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": ["sliding_attention"] * 2}
    folder = random_model(tmp_path / "windowed", **window)
    backend = build(make_job(model=folder))
    samples = draw(21, 50)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        logp = plain(torch.from_numpy(samples[1])[None]).logits[0].log_softmax(-1)
    expected = logp[:-1].gather(1, torch.from_numpy(samples[1])[1:, None]).squeeze(1)
    torch.testing.assert_close(logprobs_of(backend, row_of(samples))[20:], expected, rtol=0, atol=5e-5)


def test_the_gradient_does_not_depend_on_the_rows_the_step_is_packed_into(build):
    shard = make_shard()
    found = []
    for seq_len in (40, 64, 256):
        backend = build(make_job(seq_len=seq_len, pad_to_multiple_of=8))
        result = backend.train_step(shard)
        found.append((result.metrics, backend.gradients))
    (first, gradients), *others = found
    assert [metrics["rows"] for metrics, _ in found] == [4.0, 3.0, 1.0]
    for metrics, other in others:
        assert distance(gradients, other) < 1e-5
        for name in ("loss", "entropy", "kl_divergence_inference", "ratio_mean", "ratio_std", "trained_tokens"):
            assert metrics[name] == pytest.approx(first[name], rel=1e-5), name


def test_the_gradient_is_that_of_the_loss_over_plain_samples(build):
    """GRPO's token mean by hand: the sum over sampled tokens of -log p times the advantage, over the count of tokens."""
    shard = make_shard()
    backend = build(make_job(algorithm=GRPO()))
    result = backend.train_step(shard)
    plain = AutoModelForCausalLM.from_pretrained(model_source("tiny"), attn_implementation="eager")
    loss = token_mean(plain, shard)
    loss.backward()
    assert result.metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    expected = {f"lm.{name}": parameter.grad for name, parameter in plain.named_parameters()}
    assert distance(expected, backend.gradients) < 1e-5


def test_taking_log_probs_leaves_the_weights_as_they_are_published(build):
    """They are gathered in bfloat16 for it, and what is published is float32."""
    backend = build(make_job(), mixed_precision_dtype="bfloat16")
    before, layout = {name: tensor.clone() for name, tensor in backend.weights()}, backend.layout()
    backend.logprobs(make_shard())
    assert backend.layout() == layout
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())


def test_rows_of_padding_change_nothing(build):
    """A rank alone has none of its own accord, so it is told that another rank has three rows."""
    shard = make_shard()
    plain = build(make_job())
    expected = plain.train_step(shard).metrics
    gradients = plain.gradients
    padded = build(make_job())
    (plan,) = padded._plan(shard)
    padded._plan = lambda _: [[*plan, *(type(plan[0])((), (), (), 64) for _ in range(2))]]
    found = padded.train_step(shard).metrics
    assert (found["rows"], found["filler_rows"]) == (3.0, 2.0)
    assert found["loss"] == expected["loss"]
    assert found["entropy"] == expected["entropy"]
    assert distance(gradients, padded.gradients) == 0.0


def test_checkpointed_layers_give_the_same_gradient_to_the_bit(build):
    shard = make_shard()
    found = []
    for checkpointing in (False, True):
        backend = build(make_job(), gradient_checkpointing=checkpointing)
        backend.train_step(shard)
        found.append(backend.gradients)
    assert distance(*found) == 0.0


# ---- updates ---------------------------------------------------------------------------------------------------------


def test_a_learning_rate_of_zero_leaves_every_bit_of_the_weights(build):
    backend = build(make_job(learning_rate=0.0))
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    for step in (1, 2, 3):
        assert backend.train_step(make_shard(step, seed=step)).metrics["grad_norm"] > 0
    after = dict(backend.weights())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_first_warm_up_step_trains(build):
    backend = build(make_job(warmup_steps=4, lr_scheduler="linear", learning_rate=1e-3, steps=8))
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    rates = [backend.train_step(make_shard(step)).metrics["learning_rate"] for step in (1, 2)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3])
    assert any(not torch.equal(before[name], tensor) for name, tensor in backend.weights())


def test_a_gradient_that_is_not_finite_skips_the_update_and_is_counted(build):
    backend = build(make_job())
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    good = make_shard()
    broken = part(good, range(len(good.items)))
    items = list(broken.items)
    items[0] = type(items[0])(**{**{f: getattr(items[0], f) for f in items[0].__struct_fields__}, "advantage": float("inf")})
    result = backend.train_step(type(broken)(1, tuple(items), *(getattr(broken, n) for n in ARRAYS), broken.denominators))
    assert (result.metrics["update_skipped"], result.metrics["updates_skipped_total"]) == (1.0, 1.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.weights())
    result = backend.train_step(make_shard(2))
    assert (result.metrics["update_skipped"], result.metrics["updates_skipped_total"]) == (0.0, 1.0)


def test_a_loss_without_a_gradient_is_refused_by_name(build):
    class Detached(GRPO):
        def loss(self, row, denominators, *, max_tokens):
            output = super().loss(row, denominators, max_tokens=max_tokens)
            return replace(output, loss=output.loss.detach())

    with pytest.raises(ValueError, match=r"^Detached\.loss has no gradient: make it of `current`, not detached$"):
        build(make_job(algorithm=Detached())).train_step(make_shard())


ARRAYS = ("ids", "mask", "logprobs", "versions")


@pytest.mark.parametrize(("dtype", "scale"), [(None, 1.0), ("float16", 2.0**16)])
def test_the_gradient_is_clipped_to_its_norm_whatever_the_loss_was_multiplied_by(build, dtype, scale):
    backend = build(make_job(grad_clip=0.01), mixed_precision_dtype=dtype)
    result = backend.train_step(make_shard())
    assert result.metrics["grad_norm"] > 0.01
    norm = torch.sqrt(sum(tensor.double().pow(2).sum() for tensor in backend.gradients.values()))
    assert result.metrics["grad_norm"] == pytest.approx(float(norm) / scale, rel=1e-6)
    moments = [backend._updater.optimizer.state[p]["exp_avg"].full_tensor() for p in backend._policy.parameters()]
    clipped = torch.sqrt(sum(moment.double().pow(2).sum() for moment in moments)) / 0.1  # first moment: 0.1 of the gradient
    assert float(clipped) == pytest.approx(0.01, rel=1e-4)


def test_weight_decay_shrinks_matrices_and_leaves_norms_alone(build):
    backend = build(make_job(learning_rate=0.1, weight_decay=0.5))
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    still = make_shard()
    items = tuple(type(i)(**{**{f: getattr(i, f) for f in i.__struct_fields__}, "advantage": 0.0}) for i in still.items)
    backend.train_step(type(still)(1, items, *(getattr(still, n) for n in ARRAYS), still.denominators))
    for name, tensor in backend.weights():
        factor = 0.95 if tensor.ndim >= 2 else 1.0
        torch.testing.assert_close(tensor, before[name] * factor, rtol=1e-6, atol=0)


def test_staleness_is_counted_in_versions(build):
    backend = build(make_job())
    shard = make_shard(3)
    versions = np.where(shard.mask, 2, -1).astype(np.int32)
    sampled = np.flatnonzero(shard.mask)
    versions[sampled[:37]] = 0  # 37 of the 111 sampled tokens are two versions old
    result = backend.train_step(
        type(shard)(3, shard.items, shard.ids, shard.mask, shard.logprobs, versions, shard.denominators)
    )
    assert len(sampled) == 111
    assert result.metrics["staleness_mean"] == pytest.approx(2 * 37 / 111)
    assert result.metrics["staleness_max"] == 2.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_keeps_float32_weights_and_nearly_the_float32_gradient(build, dtype):
    shard = make_shard()
    exact = build(make_job())
    exact.train_step(shard)
    expected = exact.gradients
    mixed = build(make_job(), mixed_precision_dtype=dtype)
    result = mixed.train_step(shard)
    scale = 2.0**16 if dtype == "float16" else 1.0
    assert result.metrics["update_skipped"] == 0.0
    assert {tensor.dtype for _, tensor in mixed.weights()} == {torch.float32}
    assert distance(expected, {name: tensor / scale for name, tensor in mixed.gradients.items()}) < 0.1


def test_trajectories_that_no_row_holds_are_refused_with_the_setting(build):
    backend = build(make_job(seq_len=32))
    with pytest.raises(ValueError, match=r"trainer\.seq_len=32"):
        backend.train_step(make_shard())


def test_a_missing_logprob_is_an_error(build):
    backend = build(make_job())
    shard = make_shard()
    shard.logprobs[np.flatnonzero(shard.mask)[0]] = np.nan
    with pytest.raises(ValueError, match="lacks the sampling log-prob of 1 trained tokens"):
        backend.train_step(shard)


# ---- weights and models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny", "tiny_reverse", "untied"])
def test_weights_have_the_names_of_the_models_file_and_give_the_same_logits(build, tmp_path, model):
    name = random_model(tmp_path / "untied", tie_word_embeddings=False) if model == "untied" else model
    backend = build(make_job(model=name))
    backend.train_step(make_shard())
    weights = dict(backend.weights())
    with open(f"{model_source(name)}/model.safetensors", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    assert sorted(weights) == sorted(set(header) - {"__metadata__"})
    assert ("lm_head.weight" in weights) == (model == "untied")

    plain = AutoModelForCausalLM.from_pretrained(model_source(name))
    plain.load_state_dict(weights, strict=False)
    plain.tie_weights()
    plain.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager").eval()
    sample = draw(40)[0]
    with torch.no_grad():
        logp = loaded(torch.from_numpy(sample)[None]).logits[0, :-1].log_softmax(-1)
    expected = logp.gather(1, torch.from_numpy(sample)[1:, None]).squeeze(1)
    torch.testing.assert_close(logprobs_of(backend, row_of([sample])), expected, rtol=0, atol=5e-5)


def test_a_missing_model_folder_is_named(build):
    with pytest.raises(UnfitModel, match=r"model\.name='/nowhere/model'"):
        build(make_job(model="/nowhere/model"))


def test_a_model_that_chooses_its_attention_from_a_list_of_its_own_is_refused_in_words(build, tmp_path):
    with pytest.raises(UnfitModel, match="its layers choose their attention from a list of their own"):
        build(make_job(model=random_other(tmp_path / "model", "falcon")))


def test_a_model_whose_logits_are_changed_after_the_head_is_refused(build, tmp_path):
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, logits_scaling=4.0, initializer_range=0.5,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path / "granite")
    with pytest.raises(UnfitModel, match="GraniteForCausalLM changes its logits after the head"):
        build(make_job(model=str(tmp_path / "granite")))


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}, 64),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
    ],
)
def test_rotations_that_follow_the_longest_sample_of_a_row_are_refused_where_samples_may_be_long(build, tmp_path, rope, most):
    """Packed beside a sample of more than 64 tokens, a short one had other log-probs than alone."""
    scaled = {"rope_theta": 10_000.0, "original_max_position_embeddings": 64, **rope}
    model = random_model(tmp_path / "model", max_position_embeddings=128, rope_parameters=scaled)
    build(make_job(model=model, seq_len=most)).train_step(make_shard())
    with pytest.raises(
        UnfitModel, match=rf"{rope['rope_type']}\) as soon as a sample is longer than {most} tokens.*max_model_len={most} or"
    ):
        build(make_job(model=model, seq_len=most + 64))
    build(replace(make_job(model=model, seq_len=most + 64), max_model_len=most)).train_step(make_shard())
    cut = replace(make_job(model=model, seq_len=most), max_model_len=most + 64)  # trainer.overlong=truncate
    if rope["rope_type"] == "longrope":  # the server takes the long angles for all samples then, short ones too
        with pytest.raises(UnfitModel, match=rf"max_model_len={most} or less \(samples have up to {most + 64} tokens\)"):
            build(cut)
    else:
        build(cut).train_step(make_shard())
    with pytest.raises(UnfitModel, match=rf"set trainer.pad_to_multiple_of={most} or less \(it is 192\)"):
        build(replace(make_job(model=model, seq_len=384, pad_to_multiple_of=192), max_model_len=most))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("phi3", {"resid_pdrop": 0.5, "pad_token_id": 0}),
        ("seed_oss", {"residual_dropout": 0.5, "head_dim": 16, "pad_token_id": 0}),
        ("opt", {"layerdrop": 0.5, "dropout": 0.5, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    ],
    ids=["a module", "a function", "a whole layer"],
)
def test_dropout_is_switched_off(build, tmp_path, kind, changes):
    backend = build(make_job(model=random_other(tmp_path / "dropping", kind, **changes)))
    row = row_of(draw(30))
    assert torch.equal(logprobs_of(backend, row), logprobs_of(backend, row))


def test_so_is_what_the_language_model_of_one_that_sees_images_looks_up_in_its_own_configuration():
    lm = torch.nn.Module()
    lm.config = AutoConfig.for_model("gemma3", text_config={"attention_dropout": 0.5})
    _no_chance(lm)
    assert lm.config.text_config.attention_dropout == 0.0


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("flash", "computes in bfloat16 or float16 on a GPU, not float32 on cpu: use sdpa, or auto"),
        ("flash2", "computes in bfloat16 or float16 on a GPU, not float32 on cpu: use sdpa, or auto"),
        ("flex", "trains on a GPU only, not on cpu: use sdpa, or auto"),
    ],
)
def test_attention_that_cannot_work_here_is_refused(build, kind, sentence):
    with pytest.raises(ValueError, match=f"backend.attention={kind} {sentence}"):
        build(make_job(), attention=kind)
