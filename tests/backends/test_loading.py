"""A model from its files to the ranks: each reads its own rows, nobody holds the whole, and what does not fit is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from telescope.backends.base import World
from telescope.backends.fsdp import loading
from telescope.backends.fsdp.policy import Policy, UnfitModel
from telescope.backends.fsdp.sharding import make_mesh
from telescope.config.sections import LoraSettings, ModelSettings
from tests.backends.counting import Counting
from tests.backends.models import random_model, random_other

SIZES = {"hidden_size": 100, "intermediate_size": 300, "vocab_size": 501, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model in several files, with sizes that two ranks can't share evenly, and an untied head."""
    folder = tmp_path_factory.mktemp("several")
    model = AutoModelForCausalLM.from_pretrained(
        random_model(folder / "one", tie_word_embeddings=False, **SIZES), dtype=torch.bfloat16
    )
    model.save_pretrained(folder / "parts", max_shard_size="300KB")
    assert len(list((folder / "parts").glob("*.safetensors"))) > 3
    return folder / "parts"


def shards_of(rank: int, model: ModelSettings, replicas: int = 1, size: int = 2) -> tuple[Policy, Counting, int]:
    """One rank of a world that is not there: what it loads needs no other one."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        place = make_mesh(World(rank, size, "cpu"), replicas)
        with Counting(peaks=True) as counting:
            lm, checkpoint = loading.outline(model, "sdpa", torch.float32)
            assert checkpoint is not None
            policy = Policy(lm, "sdpa")
            policy.shard(place.mesh, MixedPrecisionPolicy(), reshard_layers=True)
            loading.fill(policy, checkpoint, torch.device("cpu"), place)
        return policy, counting, sum(p.to_local().nbytes for p in policy.parameters())
    finally:
        dist.destroy_process_group()


def test_each_rank_has_its_rows_of_every_tensor_and_never_more_than_its_half(folder):
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    everything = sum(p.nbytes for p in whole.parameters())
    found, largest = [], max(p.nbytes for p in whole.parameters())
    for rank in (0, 1):
        policy, counting, held = shards_of(rank, ModelSettings(name=str(folder)))
        assert held < 0.52 * everything
        assert counting.peak_bytes < held + largest
        found.append({name: p.to_local().clone() for name, p in policy.lm.named_parameters()})
    for name, parameter in whole.named_parameters():
        assert torch.equal(torch.cat([shards[name] for shards in found]), parameter), name


def test_a_replica_has_all_of_the_model_and_a_tied_head_is_its_embedding():
    model = ModelSettings(name="tiny")
    policy, _, _ = shards_of(1, model, replicas=2)
    whole = AutoModelForCausalLM.from_pretrained(loading.model_folder("tiny"), dtype=torch.float32)
    assert policy.lm.lm_head.weight is policy.lm.model.embed_tokens.weight
    for name, parameter in whole.named_parameters():
        assert torch.equal(policy.lm.get_parameter(name).to_local(), parameter), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(policy.lm.get_buffer(name), buffer), name


def test_adapters_are_drawn_and_what_they_are_beside_is_read(folder):
    policy, _, _ = shards_of(0, ModelSettings(name=str(folder), lora=LoraSettings(rank=4, target_modules=("q_proj",))))
    found = {name.replace(".base_layer.", "."): p.to_local() for name, p in policy.lm.named_parameters()}
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in stored.named_parameters():
        assert torch.equal(found.pop(name), parameter[: -(-len(parameter) // 2)]), name
    assert len(found) == 2 * 4
    assert all(bool(shard.any()) == ("lora_A" in name) for name, shard in found.items())
    assert all(p.requires_grad == ("lora_" in name) for name, p in policy.lm.named_parameters())


def copied(folder: Path, to: Path, change) -> ModelSettings:
    """The model in one file, with other tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    change(tensors)
    to.mkdir()
    shutil.copy(folder / "config.json", to)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return ModelSettings(name=str(to))


def test_a_number_without_an_axis_is_read_as_any_buffer(tmp_path):
    """Apertus keeps two numbers of its activation so. With rows to read, there were none."""
    model = random_other(tmp_path / "apertus", "apertus", rope_scaling=None)
    policy, _, _ = shards_of(1, ModelSettings(name=model))
    held = load_file(Path(model) / "model.safetensors")
    assert not held["model.layers.0.mlp.act_fn.beta"].shape
    buffers = dict(policy.lm.named_buffers())
    for name in ("model.layers.0.mlp.act_fn.beta", "model.layers.1.mlp.act_fn.eps"):
        assert torch.equal(buffers[name], held[name].float())


def test_a_weight_that_is_frozen_by_its_makers_makes_no_adapters_of_the_others(folder):
    """A version is still all weights, under their own names."""
    lm, _ = loading.outline(ModelSettings(name=str(folder)), "sdpa", torch.float32)
    lm.get_parameter("model.norm.weight").requires_grad_(False)
    policy = Policy(lm, "sdpa")
    assert not policy.adapters
    assert set(policy.by_name()) == {name for name, _ in lm.named_parameters()}


def test_a_tensor_that_is_missing_is_named(folder, tmp_path):
    model = copied(folder, tmp_path / "less", lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(UnfitModel, match=r"its files lack 1 of the model's tensors, model\.layers\.2\.mlp\.up_proj\.weight"):
        loading.outline(model, "sdpa", torch.float32)


def test_a_tensor_of_another_shape_is_named(folder, tmp_path):
    def cut(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:50].clone()

    model = copied(folder, tmp_path / "cut", cut)
    with pytest.raises(UnfitModel, match=r"model\.norm\.weight has the shape \[50\] in .*, and \[100\] by its config\.json"):
        shards_of(0, model)


def test_a_tensor_that_the_model_has_no_use_for_is_named(folder, tmp_path, caplog):
    model = copied(folder, tmp_path / "more", lambda tensors: tensors.update({"visual.patch": torch.zeros(3)}))
    _, checkpoint = loading.outline(model, "sdpa", torch.float32)
    assert checkpoint is not None
    assert "its files have 1 tensors that the model has no use for, visual.patch first" in caplog.text


def test_experts_that_are_stored_one_by_one_are_left_to_transformers(tmp_path):
    """It puts them together in one tensor, so the model comes whole."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    saved = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads))
    saved.save_pretrained(tmp_path)
    lm, checkpoint = loading.outline(ModelSettings(name=str(tmp_path)), "sdpa", torch.float32)
    assert checkpoint is None
    for name, parameter in saved.named_parameters():
        assert torch.equal(lm.get_parameter(name), parameter), name


def test_an_index_that_names_no_file_is_refused(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "nowhere.safetensors"
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"nowhere\.safetensors can't be read"):
        loading.outline(ModelSettings(name=str(broken)), "sdpa", torch.float32)
