"""What backend=megatron refuses, each in a sentence with the remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed here: the extra `megatron` brings it")

from telescope.backends import megatron
from telescope.backends.common.models import UnfitModel
from telescope.backends.megatron import Megatron, architecture
from telescope.config.models import ModelCounts
from tests.backends.models import random_experts, random_model, random_other
from tests.backends.shards import make_job


def obstacles(settings: Megatron, **changes: Any) -> list[str]:
    given = {"on_gpu": True, "capability": lambda: 9, "model_dtype": "float32", "elsewhere": False}
    return list(settings.find_obstacles(**{**given, **changes}))


def errors(settings: Megatron, ranks: int) -> list[str]:
    return [sentence for _, sentence in settings.run_errors(ranks=ranks, adapters=False, on_cpu=False)]


def test_a_machine_without_a_gpu_is_told_of_fsdp():
    assert obstacles(Megatron(), on_gpu=False) == [
        "backend=megatron trains on GPUs alone, and there is none for the trainer's ranks: set backend=fsdp"
    ]
    with pytest.raises(ValueError, match=r"set backend=fsdp$"):
        Megatron().build(make_job())


def test_where_megatron_core_is_missing_the_line_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(megatron, "is_installed", lambda: False)
    (sentence,) = obstacles(Megatron())
    assert "pip install 'megatron-core>=0.16,<0.17'" in sentence
    assert obstacles(Megatron(), elsewhere=True) == [], "what another host has is not known here"


@pytest.mark.parametrize(
    ("settings", "instead"),
    [
        ({"use_transformer_engine": True}, "use_transformer_engine=auto"),
        ({"fp8": True}, "fp8=false"),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "fp8=false"),
        ({"gradient_accumulation_fusion": True}, "gradient_accumulation_fusion=false"),
    ],
)
def test_what_needs_transformer_engine_is_refused_without_it(monkeypatch, settings: dict[str, Any], instead: str):
    monkeypatch.setattr(megatron, "has_engine", lambda: False)
    (sentence,) = obstacles(Megatron(**settings))
    assert sentence.startswith(f"backend.{next(iter(settings))}=")
    assert "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.11,<2.12' where the ranks run" in sentence
    assert sentence.endswith(f"or set {instead}")
    assert obstacles(Megatron(**settings), elsewhere=True) == [], "what another host has is not known here"
    monkeypatch.setattr(megatron, "has_engine", lambda: True)
    assert obstacles(Megatron(**settings)) == []
    (sentence,) = obstacles(Megatron(**settings, mixed_precision_dtype=None))
    assert sentence.endswith(f"is in float32: set backend.mixed_precision_dtype=bfloat16, or {instead}")


def test_auto_takes_transformer_engine_where_it_is_there_and_computes_the_precision():
    assert Megatron().takes_engine("float32", there=True), "the forward pass is in bfloat16"
    assert not Megatron().takes_engine("float32", there=False)
    exact = Megatron(mixed_precision_dtype=None)
    assert (exact.takes_engine("float32", there=True), exact.takes_engine("float16", there=True)) == (False, True)
    assert not Megatron(use_transformer_engine=False).takes_engine("float32", there=True)
    assert not Megatron(gradient_checkpointing="selective").takes_engine("float32", there=True), "its products can't be kept"
    assert Megatron(gradient_checkpointing="selective", fp8=True).takes_engine("float32", there=True)
    assert all(
        Megatron(**each).takes_engine("float32", there=False) for each in ({"fp8": True}, {"use_transformer_engine": True})
    )
    assert [Megatron(fp8=each).fp8_format for each in (False, True, "e4m3", "hybrid")] == [None, "e4m3", "e4m3", "hybrid"]


def test_an_engine_without_its_binding_for_torch_is_named(monkeypatch):
    """megatron-core dies of it when it is imported."""
    job = make_job()

    def broken(name: str, *_: Any, **__: Any) -> Any:
        raise FileNotFoundError("Could not find shared object file for Transformer Engine torch lib.")

    monkeypatch.setattr("builtins.__import__", broken_import(broken))
    on_gpu = replace(job, world=replace(job.world, device="cuda:0"))
    with pytest.raises(ValueError, match=r"installed without its binding for torch.* or pip uninstall transformer-engine$"):
        Megatron().build(on_gpu)


def broken_import(broken: Any) -> Any:
    known = __import__

    def imported(name: str, *given: Any, **told: Any) -> Any:
        return (broken if name == "telescope.backends.megatron.backend" else known)(name, *given, **told)

    return imported


def test_fp8_is_refused_where_gpu_or_precision_have_none_of_it(monkeypatch):
    monkeypatch.setattr(megatron, "has_engine", lambda: True)
    assert obstacles(Megatron(fp8=True), capability=lambda: 8) == [
        "backend.fp8=true needs a GPU of compute capability 9 (Hopper), and this one has 8: set backend.fp8=false"
    ]
    assert obstacles(Megatron(fp8=True), capability=lambda: None) == [], "not known"
    (sentence,) = obstacles(Megatron(fp8="e4m3", mixed_precision_dtype="float16"))
    assert sentence.endswith("the forward pass is in float16: set backend.mixed_precision_dtype=bfloat16")


def test_settings_of_transformer_engine_that_exclude_each_other_are_named():
    for settings, instead in (({"fp8": True}, "fp8=false"), ({"gradient_accumulation_fusion": True}, "fusion=false")):
        (sentence,) = errors(Megatron(**settings, use_transformer_engine=False), 1)
        assert "backend.use_transformer_engine=false has others: set use_transformer_engine=auto, or " in sentence
        assert sentence.endswith(instead)
    (sentence,) = errors(Megatron(gradient_accumulation_fusion=True, overlap_grad_reduce=True), 1)
    assert sentence.endswith("set one of them to false")
    (sentence,) = errors(Megatron(num_layers_at_end_in_bf16=2), 1)
    assert sentence.endswith("set fp8=true, or num_layers_at_end_in_bf16=0")
    assert errors(Megatron(fp8=True, num_layers_at_start_in_bf16=1, gradient_accumulation_fusion=True), 1) == []


@pytest.mark.parametrize(
    ("settings", "changes", "sentence"),
    [
        ({}, {}, r"multiples of 128, and its hidden_size is 32 wide on each of .*: set fp8_recipe=tensorwise, or another"),
        (
            {"fp8_recipe": "tensorwise"},
            {"hidden_size": 40},
            r"multiples of 16, and its hidden_size is 40 .*: set fp8=false, or",
        ),
        (
            {"fp8_recipe": "tensorwise", "tensor_parallel_size": 2},
            {"intermediate_size": 48},
            r"intermediate_size is 24 wide on each of backend\.tensor_parallel_size=2 ranks: set fp8=false, or another tensor",
        ),
        (
            {"fp8_recipe": "tensorwise", "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 1},
            {},
            r"num_layers_at_start_in_bf16=2 and num_layers_at_end_in_bf16=1 are more than its 2 layers: set fewer$",
        ),
    ],
)
def test_widths_that_fp8_cannot_multiply_are_refused(
    tmp_path, settings: dict[str, Any], changes: dict[str, Any], sentence: str
):
    model = random_model(tmp_path / "model", **changes)
    with pytest.raises(UnfitModel, match=sentence):
        architecture.read(Megatron(fp8=True, **settings), make_job(model=model))
    assert architecture.read(Megatron(), make_job(model=model)).facts.layers == 2


def test_layers_at_both_ends_may_stay_in_bfloat16(tmp_path):
    """As megatron-core reads its configuration."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    known = architecture.read(Megatron(), make_job(model=random_model(tmp_path / "model", num_hidden_layers=5)))

    def kept(**settings: Any) -> list[int]:
        config = architecture.core_config(known, Megatron(fp8="hybrid", **settings), torch.bfloat16)
        assert (config.fp8, config.fp8_recipe, config.disable_parameter_transpose_cache) == ("hybrid", "blockwise", True)
        return [layer for layer in range(5) if is_first_last_bf16_layer(config, layer)]

    assert kept() == []
    assert kept(num_layers_at_start_in_bf16=1) == [0]
    assert kept(num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2) == [0, 3, 4]


def test_attention_that_cannot_work_is_refused_as_with_fsdp():
    (sentence,) = obstacles(Megatron(attention="flash3"), capability=lambda: 8)
    assert sentence.startswith("backend.attention=flash3 needs a GPU of compute capability exactly 9")
    assert obstacles(Megatron()) == []


def test_ranks_that_do_not_go_with_the_settings_are_named():
    assert errors(Megatron(), 1) == errors(Megatron(), 8) == errors(Megatron(tensor_parallel_size=2), 2) == []
    (sentence,) = errors(Megatron(tensor_parallel_size=4), 6)
    assert "backend.tensor_parallel_size=4 must divide cluster.trainer_num_workers=6" in sentence
    assert "cluster.trainer_num_workers=8" in sentence
    (sentence,) = errors(Megatron(expert_parallel_size=4), 6)
    assert "backend.expert_parallel_size=4 must divide cluster.trainer_num_workers=6" in sentence
    (sentence,) = errors(Megatron(sequence_parallel=True), 2)
    assert "set sequence_parallel=auto" in sentence
    (sentence,) = errors(Megatron(tensor_parallel_size=2, sequence_parallel=False, gradient_checkpointing="selective"), 2)
    assert "set sequence_parallel=auto, or gradient_checkpointing=full" in sentence
    (sentence,) = errors(Megatron(use_distributed_optimizer=True, tensor_parallel_size=2), 2)
    assert "set use_distributed_optimizer=auto" in sentence


def test_settings_of_the_optimisers_state_that_would_do_nothing_are_named():
    assert errors(Megatron(optimizer_cpu_offload=True), 1) == []
    assert errors(Megatron(optimizer_cpu_offload=True, optimizer_offload_fraction=0.25), 1) == []
    assert errors(Megatron(use_precision_aware_optimizer=True, exp_avg_sq_dtype="bfloat16"), 2) == []
    assert errors(Megatron(optimizer_offload_fraction=0.5), 1) == [
        "backend.optimizer_offload_fraction=0.5 says how much backend.optimizer_cpu_offload=true keeps in host memory, and "
        "that is false: set backend.optimizer_cpu_offload=true, or leave the fraction out"
    ]
    (sentence,) = errors(Megatron(optimizer_cpu_offload=True, optimizer_offload_fraction=0.0), 1)
    assert "nothing" in sentence
    assert "set a fraction above 0, or leave both out" in sentence
    (sentence,) = errors(Megatron(use_precision_aware_optimizer=True), 1)
    assert "which are float32 both: set one of them to bfloat16, or leave it out" in sentence
    assert errors(Megatron(exp_avg_dtype="bfloat16"), 1) == [
        "backend.exp_avg_dtype=bfloat16 does nothing without backend.use_precision_aware_optimizer=true: set that, or leave it "
        "out"
    ]


def test_stages_that_do_not_go_with_the_ranks_or_with_each_other_are_named():
    four = Megatron(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert errors(four, 4) == errors(four, 8) == errors(Megatron(pipeline_parallel_size=2, virtual_pipeline_size=3), 2) == []
    (sentence,) = errors(four, 6)
    assert sentence == (
        "backend.tensor_parallel_size=2 times backend.pipeline_parallel_size=2 must divide cluster.trainer_num_workers=6: so "
        "many ranks hold the model together; set cluster.trainer_num_workers=8, or another tensor_parallel_size or "
        "pipeline_parallel_size"
    )
    assert errors(Megatron(pipeline_parallel_size=2, expert_parallel_size=4), 8) == []
    (sentence,) = errors(Megatron(pipeline_parallel_size=2, expert_parallel_size=4), 12)
    assert sentence == (
        "backend.expert_parallel_size=4 times backend.pipeline_parallel_size=2 must divide cluster.trainer_num_workers=12: so "
        "many ranks share out the experts of all stages; set cluster.trainer_num_workers to a multiple of it, or another "
        "expert_parallel_size"
    )
    (sentence,) = errors(Megatron(virtual_pipeline_size=2), 2)
    assert sentence == (
        "backend.virtual_pipeline_size=2 cuts the layers of each stage into stretches, and with "
        "backend.pipeline_parallel_size=1 there are no stages: set pipeline_parallel_size=2 or more, or leave it out"
    )
    (sentence,) = errors(Megatron(use_distributed_optimizer=True, tensor_parallel_size=2, pipeline_parallel_size=2), 4)
    assert "backend.tensor_parallel_size=2 times backend.pipeline_parallel_size=2 there is one" in sentence
    assert "or cluster.trainer_num_workers=8 or more" in sentence


def test_ranks_that_share_rows_are_counted_with_those_of_a_model():
    shared = Megatron(context_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert errors(shared, 8) == errors(shared, 16) == errors(Megatron(context_parallel_size=4), 4) == []
    (sentence,) = errors(shared, 12)
    assert sentence == (
        "backend.tensor_parallel_size=2 times backend.pipeline_parallel_size=2 times backend.context_parallel_size=2 must "
        "divide cluster.trainer_num_workers=12: so many ranks hold the model together and share its rows; set "
        "cluster.trainer_num_workers=16, or another tensor_parallel_size or pipeline_parallel_size or context_parallel_size"
    )
    (sentence,) = errors(Megatron(context_parallel_size=4), 6)
    assert sentence == (
        "backend.context_parallel_size=4 must divide cluster.trainer_num_workers=6: so many ranks share each row; set "
        "cluster.trainer_num_workers=8, or another context_parallel_size"
    )
    assert errors(Megatron(context_parallel_size=2, use_distributed_optimizer=True), 2) == [], "both have all weights"


def of_model(counts: ModelCounts, **settings: int) -> list[str]:
    return [sentence for _, sentence in Megatron(**settings).model_errors(counts)]


def test_heads_that_ranks_cannot_share_evenly_are_refused_with_what_fits():
    """Of key-value heads there may be fewer than ranks that share a row: each has those of its query heads."""
    counts = ModelCounts(layers=4, heads=12, key_heads=2)
    assert of_model(counts, context_parallel_size=12) == of_model(counts, tensor_parallel_size=2, context_parallel_size=6) == []
    assert of_model(ModelCounts(layers=4), tensor_parallel_size=7, context_parallel_size=5) == [], "not known"
    assert of_model(counts, context_parallel_size=8) == [
        "backend.context_parallel_size=8 must divide the model's 12 attention heads, of which each of so many ranks computes a "
        "share: set context_parallel_size to one of 1, 2, 3, 4, 6, 12"
    ]
    assert of_model(counts, tensor_parallel_size=2, context_parallel_size=4) == [
        "backend.tensor_parallel_size=2 times backend.context_parallel_size=4 must divide the model's 12 attention heads, of "
        "which each of so many ranks computes a share: set context_parallel_size to one of 1, 2, 3, 6"
    ]


def test_more_stages_than_layers_are_refused_with_what_fits(tmp_path):
    def sentences(**settings: int) -> list[str]:
        return of_model(ModelCounts(layers=6), **settings)

    assert sentences(pipeline_parallel_size=6) == sentences(pipeline_parallel_size=3, virtual_pipeline_size=2) == []
    assert sentences(pipeline_parallel_size=7, virtual_pipeline_size=2) == [
        "backend.pipeline_parallel_size=7 is more than the 6 layers of the model, and each stage needs one: set 6 or less"
    ]
    assert sentences(pipeline_parallel_size=2, virtual_pipeline_size=4) == [
        "backend.virtual_pipeline_size=4 times backend.pipeline_parallel_size=2 is more than the 6 layers of the model, and "
        "each stretch needs one: set virtual_pipeline_size=3 or less"
    ]
    with pytest.raises(UnfitModel, match="pipeline_parallel_size=4 is more than the 2 layers of the model"):
        architecture.read(Megatron(pipeline_parallel_size=4), make_job(model=random_model(tmp_path / "model")))


def test_gradients_in_float16_are_refused_whoever_says_that_they_are():
    """They are unscaled where they lie, so what float16 holds as zero is lost whatever the loss was multiplied by."""
    halves = Megatron(mixed_precision_dtype="float16", grad_reduce_in_fp32=False)
    (sentence,) = errors(halves, 1)
    assert sentence.startswith("backend.grad_reduce_in_fp32=false keeps gradients in float16")
    assert "set grad_reduce_in_fp32=true, or mixed_precision_dtype=bfloat16" in sentence
    of_weights = Megatron(mixed_precision_dtype=None, grad_reduce_in_fp32=False)
    assert obstacles(of_weights, model_dtype="float16") == [sentence]
    assert obstacles(of_weights) == obstacles(halves, model_dtype="float16") == []
    assert errors(Megatron(mixed_precision_dtype="float16"), 1) == errors(Megatron(grad_reduce_in_fp32=False), 1) == []


def test_auto_is_decided_by_the_ranks():
    two = Megatron(tensor_parallel_size=2)
    assert (Megatron().spreads_sequence(), two.spreads_sequence()) == (False, True)
    assert (Megatron().spreads_optimizer(1), Megatron().spreads_optimizer(2), two.spreads_optimizer(2)) == (False, True, False)
    assert (two.ranks_a_row, two.ranks_a_shard) == (1, 2)
    sharing = Megatron(tensor_parallel_size=2, context_parallel_size=3)
    assert (sharing.ranks_a_row, sharing.ranks_a_shard, sharing.ranks_a_model) == (3, 6, 2)
    assert (sharing.spreads_optimizer(6), Megatron(context_parallel_size=2).spreads_sequence()) == (True, False)
    staged = Megatron(tensor_parallel_size=2, pipeline_parallel_size=4, virtual_pipeline_size=2)
    assert staged.ranks_a_shard == 8
    assert (staged.spreads_optimizer(8), staged.spreads_optimizer(16)) == (False, True)
    assert two.alone() == staged.alone() == Megatron(expert_parallel_size=2).alone() == sharing.alone() == Megatron()


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("phi3", {"pad_token_id": 0}, r"trains Llama, Mistral, .* this is a model of type phi3: set backend=fsdp"),
        ("llama", {"attention_bias": True}, "attention_bias=true, which backend=megatron does not compute: set backend=fsdp"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
    ],
)
def test_models_that_are_not_computed_here_are_refused(tmp_path, kind: str, changes: dict[str, Any], sentence: str):
    model = random_other(tmp_path / "model", kind, **changes)
    with pytest.raises(UnfitModel, match=sentence):
        architecture.read(Megatron(), make_job(model=model))


@pytest.mark.parametrize(
    ("size", "changes", "sentence"),
    [
        (4, {}, r"must divide the model's 2 key-value heads, so that each rank has whole ones: set it to one of 1, 2$"),
        (2, {"intermediate_size": 63}, "must divide the width of its MLP, intermediate_size=63"),
        (2, {"num_key_value_heads": 4, "vocab_size": 1}, "too many for its vocabulary of 1 tokens"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path, size: int, changes: dict[str, Any], sentence: str):
    model = random_model(tmp_path / "model", **changes)
    with pytest.raises(UnfitModel, match=sentence):
        architecture.read(Megatron(tensor_parallel_size=size), make_job(model=model))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"pipeline_parallel_size": 3}, r"pipeline_parallel_size=3 is more than the 2 layers of the model"),
        ({"expert_parallel_size": 3}, r"expert_parallel_size=3 must divide the model's 4 experts: set it to one of 1, 2, 4$"),
        (
            {"tensor_parallel_size": 2, "sequence_parallel": False},
            r"sequence_parallel=false gives each .* set sequence_parallel=auto",
        ),
    ],
)
def test_experts_that_cannot_be_shared_out_are_refused(tmp_path, settings: dict[str, Any], sentence: str):
    model = random_experts(tmp_path / "model", intermediate_size=47)
    with pytest.raises(UnfitModel, match=sentence):
        architecture.read(Megatron(**settings), make_job(model=model))
    assert architecture.read(Megatron(tensor_parallel_size=2), make_job(model=model)).facts.experts == 4, "no layer is dense"


def test_experts_are_not_asked_of_a_model_that_has_none(tmp_path):
    job = make_job(model=random_model(tmp_path / "model"))
    with pytest.raises(UnfitModel, match=r"deals out experts, and this model has none: set it to 1"):
        architecture.read(Megatron(expert_parallel_size=2), job)
    replayed = replace(job, trainer=job.trainer.model_copy(update={"router_replay": True}))
    with pytest.raises(UnfitModel, match=r"trainer\.router_replay=true is for models with experts, and this has none"):
        architecture.read(Megatron(), replayed)


def test_a_model_whose_rotations_follow_lengths_is_refused_as_with_fsdp(tmp_path):
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    model = random_model(tmp_path / "model", rope_parameters=dynamic, max_position_embeddings=64)
    with pytest.raises(UnfitModel, match=r"rotates positions by other angles \(dynamic\)"):
        architecture.read(Megatron(), make_job(model=model, seq_len=256))


def test_a_missing_folder_is_named():
    with pytest.raises(UnfitModel, match=r"model\.name='/nowhere/model'"):
        architecture.read(Megatron(), make_job(model="/nowhere/model"))


def test_a_model_with_code_of_its_own_is_refused_where_that_code_is_trusted(tmp_path):
    """The server and backend=fsdp would run it, and here it would be taken for the plain Llama that it is called."""
    model = with_config(random_other(tmp_path / "model", "llama"), auto_map={"AutoModelForCausalLM": "mine.Mine"})
    job = make_job(model=model)
    trusted = replace(job, model=job.model.model_copy(update={"trust_remote_code": True}))
    with pytest.raises(UnfitModel, match=r"code of its own \(auto_map\).* set backend=fsdp, or model\.trust_remote_code="):
        architecture.read(Megatron(), trusted)
    assert architecture.read(Megatron(), job).facts.layers == 2
    assert architecture.read(Megatron(), replace(trusted, model=trusted.model.model_copy(update={"name": "tiny"}))).facts


def test_a_model_that_transformers_does_not_know_is_told_as_with_fsdp(tmp_path):
    model = with_config(random_other(tmp_path / "model", "llama"), model_type="foo")
    with pytest.raises(UnfitModel, match=r"model\.name=.*: it can't be loaded: "):
        architecture.read(Megatron(), make_job(model=model))


def test_a_quantised_model_is_refused(tmp_path):
    model = with_config(random_other(tmp_path / "model", "llama"), quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnfitModel, match=r"its weights are quantised .*: fp8\), and can't be trained: dequantise it"):
        architecture.read(Megatron(), make_job(model=model))


def with_config(folder: str, **changes: Any) -> str:
    file = Path(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder
