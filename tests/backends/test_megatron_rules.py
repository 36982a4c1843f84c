"""Hugging Face's tensors to Megatron-Core's parameters and back, for any number of ranks, without any."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("megatron.core", reason="megatron-core is not installed here: the extra `megatron` brings it")

from telescope.backends.megatron.rules import ARCHITECTURES, ModelDimensions, TensorMap, named, rules
from tests.backends.models import random_experts

SIZES = {
    "vocab_size": 13, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip


EXPERTS = {"num_experts": 8, "moe_intermediate_size": 6, "mlp_only_layers": [1]}


def facts(kind: str, tied: bool) -> ModelDimensions:
    sparse = kind == "qwen3_moe"
    return ModelDimensions(
        layers=2, heads=8, groups=4, head_dim=4, vocabulary=13, tied=tied, qkv_bias=kind == "qwen2",
        head_norms=kind in ("qwen3", "qwen3_moe"), experts=8 if sparse else 0, expert_layers=frozenset({0} if sparse else ()),
    )  # fmt: skip


def tensors(kind: str, tied: bool) -> dict[str, torch.Tensor]:
    """Numbered, each once."""
    own = {"qwen2": {"hidden_size": 32}, "qwen3_moe": EXPERTS}
    sizes = {**SIZES, **own.get(kind, {})}
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, tie_word_embeddings=tied))
    found, start = {}, 0
    for name, parameter in lm.named_parameters():
        found[name] = torch.arange(start, start := start + parameter.numel(), dtype=torch.float64).view(parameter.shape)
    return found


def cut(table: TensorMap, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a rank has of each."""
    return {
        name: tensor.narrow(dim or 0, first, count)
        for name, tensor in whole.items()
        for dim, first, count in [table.here(name)]
    }


def shape(table: TensorMap, name: str, size: int) -> tuple[int, ...]:
    """Of a parameter of megatron-core's on one rank."""
    rule = table.rules[name]
    shapes = [table.part_shape(part.name) for part in rule.parts]
    rows = -(-table.facts.vocabulary // size) if rule.kind == "vocabulary" else sum(each[0] for each in shapes)
    return (rows, *shapes[0][1:])


@pytest.mark.parametrize("norm_enters", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_all_tensors_come_back_as_they_were(kind: str, tied: bool, size: int, norm_enters: bool):
    whole = tensors(kind, tied)
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in whole}
    for rank in range(size):
        table = TensorMap(facts(kind, tied), shapes, rank, size, rank, size, norm_enters=norm_enters)
        mine = cut(table, whole)
        for name, rule in table.rules.items():
            local = torch.full(shape(table, name, size), -1.0, dtype=torch.float64)
            table.join(rule, mine, local)
            back = table.split(rule, local)
            assert all(torch.equal(part, mine[each]) for each, part in back.items())
            for each, part in back.items():
                seen[each].append(part)
    for name, parts in seen.items():
        dim = table.of[name][1].dim
        again = parts[0] if dim is None else torch.cat(parts, dim)
        assert torch.equal(again, whole[name]), name


def test_queries_keys_and_values_lie_group_by_group():
    """8 query heads in 4 groups, heads of 4: a group is its two query heads, its key head and its value head."""
    whole = tensors("llama", True)
    table = TensorMap(facts("llama", True), {name: tuple(t.shape) for name, t in whole.items()}, 0, 1)
    rule = table.rules["decoder.layers.0.self_attention.linear_qkv.weight"]
    local = torch.empty(64, 8, dtype=torch.float64)
    table.join(rule, whole, local)
    q, k, v = (whole[f"model.layers.0.self_attn.{letter}_proj.weight"] for letter in "qkv")
    assert torch.equal(local[:16], torch.cat([q[:8], k[:4], v[:4]]))
    assert torch.equal(local[48:], torch.cat([q[24:], k[12:], v[12:]]))


def test_rows_that_fill_up_a_vocabulary_are_zero():
    """13 tokens on two ranks: 7 and 6 of them, and one row that is none's."""
    whole = tensors("llama", True)
    table = TensorMap(facts("llama", True), {name: tuple(t.shape) for name, t in whole.items()}, 1, 2)
    local = torch.full((7, 8), -1.0, dtype=torch.float64)
    rule = table.rules["embedding.word_embeddings.weight"]
    table.join(rule, cut(table, whole), local)
    assert torch.equal(local[:6], whole["model.embed_tokens.weight"][7:])
    assert not local[6].any()


def test_a_tensor_that_the_table_does_not_know_is_named():
    shapes = {name: tuple(t.shape) for name, t in tensors("qwen3", True).items()}
    with pytest.raises(ValueError, match=r"^the model has lm_head\.weight, which the table"):
        TensorMap(facts("qwen3", True), {**shapes, "lm_head.weight": (13, 8)}, 0, 1)
    with pytest.raises(ValueError, match=r"^the model has model\.layers\.0\.self_attn\.k_norm\.weight"):
        TensorMap(facts("llama", True), shapes, 0, 1)


def test_every_parameter_has_one_rule():
    names = [rule.parameter for rule in rules(facts("qwen3", False))]
    assert len(names) == len(set(names)) == 2 * 8 + 3
    assert named() == "Llama, Mistral, Qwen2 (and 2.5), Qwen3 (dense) and Qwen3-MoE"


def test_a_norm_that_is_part_of_a_product_is_named_after_it_and_that_before_experts_is_not():
    apart, within = ({rule.parameter for rule in rules(facts("qwen3_moe", False), norm_enters=each)} for each in (False, True))
    assert apart - within == {
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
    }
    assert within - apart == {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_matrices_of_a_models_files_are_where_the_table_says(tmp_path, size: int):
    """Gate above up; of four experts a rank has a run, and ranks take turns in the list."""
    from safetensors.torch import load_file

    folder = random_experts(tmp_path / "model", num_hidden_layers=1)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    whole = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    known = ModelDimensions(
        layers=1, heads=4, groups=2, head_dim=16, vocabulary=128, tied=False, qkv_bias=False, head_norms=True, experts=4,
        expert_layers=frozenset({0}),
    )  # fmt: skip
    seen = []
    for rank in range(size):
        table = TensorMap(known, shapes, 0, 1, rank, size)
        assert table.files.keys() == stored.keys()
        for name in shapes:
            if "experts" not in name:
                assert torch.equal(whole[name], stored[name])
                continue
            _, first, count = table.here(name)
            for own in table.matrices(name):
                part = table.files[own].within(whole[name][first : first + count], first)
                assert torch.equal(part, stored[own]), own
                seen.append(own)
    assert sorted(seen) == sorted(name for name in stored if "experts" in name)
    downs = [int(name.split(".")[5]) for name in table.files if name.endswith("down_proj.weight")]
    assert downs == {1: [0, 1, 2, 3], 2: [0, 2, 1, 3], 4: [0, 1, 2, 3]}[size]
