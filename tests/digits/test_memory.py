"""Sizes of models and of what they take, against published counts and against what autograd really keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from telescope.config.model_shapes import ShapeUnknown, shape_of
from telescope.config.models import EMBEDDED
from telescope.maths.flops import forward_flops_per_token
from telescope.maths.memory import (
    AdapterShape,
    compiled_activation_bytes,
    compiled_attention_bytes,
    compiled_pointwise_bytes,
    layer_activation_bytes,
    layer_product_bytes,
    moment_bytes,
    server_memory,
    shape_from,
    trainer_memory,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B-Base", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
    ],
)
def test_known_models_have_their_published_numbers_of_parameters(name: str, parameters: int) -> None:
    assert shape_of(name).parameters == parameters


def test_the_embedded_model_has_as_many_parameters_as_its_file() -> None:
    from safetensors import safe_open

    with safe_open(EMBEDDED / "tiny" / "model.safetensors", "np") as file:
        stored = sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118 no mapping
    assert shape_of("tiny").parameters == stored


def test_an_unknown_model_is_said_to_be_unknown() -> None:
    with pytest.raises(ShapeUnknown, match=r"model\.name=some/model: its size is not known here"):
        shape_of("some/model")


@pytest.mark.parametrize(("kind", "name"), [("qwen3_moe", "num_experts"), ("ernie4_5_moe", "moe_num_experts")])
def test_a_mixture_of_experts_is_refused(kind: str, name: str) -> None:
    with pytest.raises(ValueError, match="has experts"):
        shape_from({"model_type": kind, name: 128, "hidden_size": 64, "num_attention_heads": 4})


def test_the_cache_of_a_token() -> None:
    assert shape_of("Qwen/Qwen3-0.6B").kv_bytes_per_token(2) == 114_688
    assert shape_of("Qwen/Qwen2.5-3B").kv_bytes_per_token(2) == 36_864


def test_states_of_the_optimiser_are_16_bytes_a_parameter_and_divided_among_ranks() -> None:
    shape = shape_of("Qwen/Qwen3-0.6B")
    one = trainer_memory(shape, ranks=1, row_tokens=4096, chunk=1024)
    four = trainer_memory(shape, ranks=4, row_tokens=4096, chunk=1024)
    assert one.weights + one.gradients + one.moments == 16 * 596_049_920
    assert four.weights + four.gradients + four.moments == 4 * 596_049_920
    assert (four.kept, four.at_work) == (one.kept, one.at_work)
    assert trainer_memory(shape, ranks=1, row_tokens=4096, chunk=1024, optimizer="sgd").moments == 0


def test_without_checkpointing_every_layer_keeps_its_activations() -> None:
    shape = shape_of("Qwen/Qwen3-0.6B")
    kept, again = (
        trainer_memory(shape, ranks=1, row_tokens=16_384, chunk=2048, checkpointing=checkpointing).kept
        for checkpointing in (False, True)
    )
    assert kept - again == 16_384 * 28 * (layer_activation_bytes(shape, 2) - 2 * 1024)


# GiB at the peak of the second step, one row a step, on an H200 (torch 2.11, bfloat16 over float32 masters)
MEASURED = (
    ("Qwen/Qwen2.5-0.5B", 4096, True, 8.45),
    ("Qwen/Qwen2.5-0.5B", 4096, False, 13.10),
    ("Qwen/Qwen3-0.6B", 16_384, True, 10.34),
    ("Qwen/Qwen3-0.6B", 16_384, False, 39.91),
    ("Qwen/Qwen2.5-3B", 4096, True, 48.37),
    ("Qwen/Qwen2.5-3B", 4096, False, 56.28),
)


@pytest.mark.parametrize(("name", "tokens", "checkpointing", "measured"), MEASURED)
def test_estimates_are_within_15_percent_of_the_peaks_measured_on_a_gpu(name, tokens, checkpointing, measured) -> None:
    told = trainer_memory(shape_of(name), ranks=1, row_tokens=tokens, chunk=1024, checkpointing=checkpointing, rows=1)
    assert told.total / GIB == pytest.approx(measured, rel=0.15)


SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = {"adapters": AdapterShape(rank=16, modules=SEVEN), "weight_bytes": 2}
POINTWISE = {"pointwise_again": True}
# GiB at the peak of benchmarks/results/training.md and trainer_memory.md with compile=true,
# by tokens of a row, checkpointing, ranks, rows of a rank
COMPILED: tuple[tuple[str, int, bool | str, int, int, dict[str, Any], float], ...] = (
    ("Qwen/Qwen3-0.6B", 16_384, False, 1, 2, {}, 30.46),
    ("Qwen/Qwen3-0.6B", 16_384, False, 1, 8, {"reshard": False}, 31.28),
    ("Qwen/Qwen3-0.6B", 16_384, False, 2, 4, {}, 26.05),
    ("Qwen/Qwen3-0.6B", 13_056, False, 1, 4, {"joined": True}, 28.18),  # the longest of 4 rows of the 32 packed samples
    ("Qwen/Qwen3-0.6B", 13_056, False, 1, 4, {}, 26.61),  # attention=varlen
    ("Qwen/Qwen3-0.6B", 4096, False, 1, 8, {}, 15.85),
    ("Qwen/Qwen3-0.6B", 4096, False, 1, 8, {"reshard": False}, 16.67),
    ("Qwen/Qwen3-0.6B", 65_536, "selective", 1, 1, {}, 20.88),
    ("Qwen/Qwen3-4B", 16_384, False, 1, 2, {}, 124.08),
    ("Qwen/Qwen3-4B", 16_384, False, 1, 8, {"reshard": False}, 131.10),
    ("Qwen/Qwen3-4B", 16_384, False, 2, 4, {}, 94.41),
    ("Qwen/Qwen3-4B", 16_384, "selective", 1, 2, {}, 71.12),
    ("Qwen/Qwen3-4B", 65_536, "selective", 2, 1, {}, 61.42),
    ("Qwen/Qwen3-4B", 65_536, "selective", 1, 1, LORA, 50.64),
    ("Qwen/Qwen2.5-0.5B", 4096, False, 1, 3, {}, 13.11),
    ("Qwen/Qwen2.5-0.5B", 32_768, "selective", 1, 1, {}, 10.48),
    ("Qwen/Qwen3-0.6B", 16_384, False, 1, 3, {"joined": True, "reshard": False}, 33.04),
    ("Qwen/Qwen3-0.6B", 65_536, True, 1, 1, {}, 14.07),
    ("Qwen/Qwen3-0.6B", 16_384, True, 1, 2, {"checkpointed_layers": 14}, 21.24),
    ("Qwen/Qwen3-0.6B", 16_384, "selective", 1, 2, {"checkpointed_layers": 14}, 22.13),
    ("Qwen/Qwen3-0.6B", 65_536, "selective", 1, 1, LORA, 16.65),
    ("Qwen/Qwen3-0.6B", 16_384, False, 1, 2, POINTWISE, 26.09),
    ("Qwen/Qwen3-0.6B", 16_384, False, 1, 8, {"reshard": False} | POINTWISE, 26.91),
    ("Qwen/Qwen3-0.6B", 16_384, True, 1, 2, {"checkpointed_layers": 14} | POINTWISE, 19.05),
    ("Qwen/Qwen3-0.6B", 16_384, True, 1, 8, {"checkpointed_layers": 14, "reshard": False} | POINTWISE, 19.87),
)
# the same, not compiled: rows so long that the last layer, computed again, is the peak; and moments on the host
EAGER: tuple[tuple[str, int, bool | str, int, int, dict[str, Any], float], ...] = (
    ("Qwen/Qwen3-4B", 65_536, True, 1, 1, LORA, 32.02),
    ("Qwen/Qwen3-4B", 16_384, True, 1, 2, {}, 68.36),
    ("Qwen/Qwen3-4B", 16_384, True, 1, 2, {"offload": "optimizer"}, 38.25),
    ("Qwen/Qwen3-0.6B", 4096, True, 1, 8, {}, 11.24),
    ("Qwen/Qwen3-0.6B", 65_536, True, 1, 1, {}, 16.14),
    ("Qwen/Qwen3-0.6B", 16_384, True, 1, 2, {"checkpointed_layers": 14}, 26.93),
)


@pytest.mark.parametrize("case", [*COMPILED, *EAGER], ids=lambda case: "-".join(map(str, case[:5])))
def test_estimates_lie_at_most_1_percent_below_and_6_above_the_recorded_peaks(case: Any) -> None:
    name, tokens, checkpointing, ranks, rows, other, measured = case
    told = trainer_memory(
        shape_of(name), ranks=ranks, row_tokens=tokens, chunk=1024, rows=rows,
        checkpointing=checkpointing, compiled=case in COMPILED, **other,
    )  # fmt: skip
    assert 0.99 * measured <= told.total / GIB <= 1.06 * measured


# estimates in GiB of layers that are not compiled, with and without checkpointing, with one and three rows (check_memory)
PLAIN = (
    ("Qwen/Qwen2.5-0.5B", 4096, (8.17, 10.01, 13.26, 15.10)),
    ("Qwen/Qwen3-0.6B", 16_384, (10.66, 12.58, 40.18, 42.40)),
    ("Qwen/Qwen2.5-3B", 4096, (47.98, 51.26, 57.07, 68.57)),
)


@pytest.mark.parametrize(("name", "tokens", "told"), PLAIN)
def test_estimates_of_layers_that_are_not_compiled_stay_as_they_were_compared(name: str, tokens: int, told: Any) -> None:
    found = [
        trainer_memory(shape_of(name), ranks=1, row_tokens=tokens, chunk=1024, checkpointing=checkpointing, rows=rows).total
        / GIB
        for checkpointing in (True, False)
        for rows in (1, 3)
    ]
    assert found == pytest.approx(told, abs=0.01)


def test_a_compiled_layer_keeps_less_and_of_the_products_attention_alone() -> None:
    """0.6B: norms 8,200, attention 12,352, norms of queries and keys 6,240, the MLP 18,432; tests/backends counts them."""
    shape = shape_of("Qwen/Qwen3-0.6B")
    assert compiled_activation_bytes(shape, 2) == 8_200 + 12_352 + 6_240 + 18_432 == 45_224
    assert compiled_attention_bytes(shape, 2) == 2 * (1024 + 2048) + 4 * 16 == 6_208
    assert compiled_activation_bytes(shape_of("Qwen/Qwen2.5-0.5B"), 2) == 40_512
    plain, joined = (
        trainer_memory(shape, ranks=1, row_tokens=4096, chunk=1024, checkpointing=False, compiled=True, joined=joined).kept
        for joined in (False, True)
    )
    assert joined - plain == 4096 * 28 * 2 * 2048


def test_a_card_must_have_more_than_the_tensors() -> None:
    shape = shape_of("Qwen/Qwen3-0.6B")
    for compiled, slack in ((False, 1.05), (True, 1.03)):
        told = trainer_memory(shape, ranks=1, row_tokens=4096, chunk=1024, compiled=compiled)
        assert told.needed == int(told.total * slack) + GIB


def test_adapters_are_all_that_has_gradients_and_moments() -> None:
    shape = shape_of("Qwen/Qwen3-4B")
    matrices = 2560 + 4096, 2560 + 1024, 2560 + 1024, 4096 + 2560, 2560 + 9728, 2560 + 9728, 9728 + 2560
    trained = 36 * 16 * sum(matrices)
    assert LORA["adapters"].parameters(shape) == trained == 33_030_144
    told = trainer_memory(shape, ranks=2, row_tokens=4096, chunk=1024, **LORA)
    assert (told.weights, told.gradients, told.moments) == (4_022_468_096 + 2 * trained, 2 * trained, 4 * trained)
    assert (told.waiting, told.head_gradient) == (0, 0)


def test_adapters_of_matrices_that_are_not_known_count_nothing() -> None:
    """Those of Phi3, say, whose queries, keys and values are one product."""
    adapters = AdapterShape(rank=16, modules=("qkv_proj", "gate_up_proj"))
    told = trainer_memory(
        shape_of("Qwen/Qwen3-4B"), ranks=1, row_tokens=4096, chunk=1024, weight_bytes=2, offload="optimizer", adapters=adapters
    )
    assert (told.weights, told.gradients, told.host, told.visiting) == (2 * 4_022_468_096, 0, 0, 0)


def test_moments_by_optimiser_in_bytes_a_parameter() -> None:
    """AdamW 8; with codes 2 and two scales for 256 of them; Muon 4 for the layers' matrices and 8 for all else."""
    shape = shape_of("Qwen/Qwen3-0.6B")
    assert moment_bytes(shape, "adamw", 4) == 8 * 596_049_920
    assert moment_bytes(shape, "adamw_8bit", 4) == 2 * 596_049_920 + 8 * 596_049_920 // 256
    matrices = 28 * (2 * 1024 * (2048 + 1024) + 3 * 1024 * 3072)
    assert moment_bytes(shape, "muon", 4) == 8 * 596_049_920 - 4 * matrices
    assert moment_bytes(shape, "sgd", 4) == 0


def test_what_is_offloaded_is_on_the_host_and_comes_in_pieces() -> None:
    shape = shape_of("Qwen/Qwen3-4B")
    plain, moments, everything = (
        trainer_memory(shape, ranks=2, row_tokens=4096, chunk=1024, offload=offload)
        for offload in ("none", "optimizer", "parameters")
    )
    assert (plain.host, moments.host, everything.host) == (0, plain.moments, 16 * 4_022_468_096 // 2)
    assert moments.moments == 0
    assert moments.visiting == 2 * 4 * 151_936 * 2560 // 2  # of the embedding's half
    assert (everything.weights, everything.gradients, everything.moments) == (0, 0, 0)
    assert everything.gathered == plain.gathered > 0
    assert plain.total - moments.total == plain.at_the_first_layer - moments.at_the_first_layer == plain.moments


def test_layers_that_stay_with_a_group_are_kept_in_shares() -> None:
    shape = shape_of("Qwen/Qwen3-0.6B")
    freed, grouped, held = (
        trainer_memory(shape, ranks=8, row_tokens=4096, chunk=1024, reshard=reshard).gathered for reshard in (True, 4, False)
    )
    assert grouped - freed == 26 * shape.layer_parameters // 4 * 2
    assert held - freed == 26 * shape.layer_parameters * 2


def test_selective_checkpointing_keeps_what_products_give() -> None:
    shape = shape_of("Qwen/Qwen3-0.6B")
    assert layer_product_bytes(shape, 2) == 2 * (3 * 1024 + 2 * 2048 + 2 * 1024 + 2 * 3072) + 4 * 16 == 30_784
    assert layer_activation_bytes(shape, 2) == 71_848


def test_some_layers_compute_again_and_the_others_keep_everything() -> None:
    """0.6B, compiled, rows of 16,384. The last layer alone, spared, makes no higher peak there than all of them."""
    shape = shape_of("Qwen/Qwen3-0.6B")

    def told(number: int | None, kept: bool | str = "full") -> Any:
        return trainer_memory(
            shape, ranks=1, row_tokens=16_384, chunk=256, checkpointing=kept, checkpointed_layers=number, compiled=True
        )  # fmt: skip

    layer = 16_384 * (compiled_activation_bytes(shape, 2) - 2 * 1024)
    assert [told(number - 1).kept - told(number).kept for number in (2, 15, 28)] == [layer] * 3
    assert told(28) == told(None)
    assert told(27).at_the_last_layer == told(28).at_the_last_layer
    assert told(14).total - told(27).total == 13 * layer
    assert told(0).total == told(None, False).total
    assert round(told(14).total / GIB, 2) == 21.15
    attention = 16_384 * (compiled_activation_bytes(shape, 2) - compiled_attention_bytes(shape, 2))
    assert told(14, "selective").kept - told(15, "selective").kept == attention


def test_what_no_product_made_need_not_be_kept() -> None:
    """Two norms' outputs and the MLP's activated product, of layers that keep everything; at work a layer has them again."""
    shape = shape_of("Qwen/Qwen3-0.6B")
    less = 2 * (2 * 1024 + 3072)
    assert compiled_pointwise_bytes(shape, 2) == less == 10_240

    def told(number: int | None, *, again: bool) -> Any:
        return trainer_memory(
            shape, ranks=1, row_tokens=16_384, chunk=256, checkpointing=number is not None, checkpointed_layers=number,
            compiled=True, pointwise_again=again,
        )  # fmt: skip

    for number, keeping in ((None, 28), (14, 14)):
        plain, again = told(number, again=False), told(number, again=True)
        assert plain.kept - again.kept == 16_384 * keeping * less
        assert (again.at_work, again.again - plain.again) == (plain.at_work, 16_384 * less)
        assert plain.at_the_last_layer - again.at_the_last_layer == 16_384 * (keeping - 1) * less


def test_gradients_of_earlier_rows_stand_while_the_next_one_is_at_the_head() -> None:
    shape = shape_of("Qwen/Qwen3-0.6B")
    one, two = (trainer_memory(shape, ranks=1, row_tokens=4096, chunk=1024, checkpointing=False, rows=n) for n in (1, 2))
    assert two.total - one.total == one.gradients


def test_a_server_divides_what_is_left_into_tokens() -> None:
    memory = server_memory(shape_of("Qwen/Qwen2.5-3B"), card_bytes=79 * GIB, utilization=0.9)
    assert memory.budget == int(79 * GIB * 0.9)
    assert memory.weights == 2 * 3_085_938_688
    assert memory.kv == memory.budget - memory.weights - memory.overhead
    assert memory.kv_tokens == memory.kv // 36_864
    assert memory.sequences(4096) == memory.kv_tokens // 4096
    staged = server_memory(shape_of("Qwen/Qwen2.5-3B"), card_bytes=79 * GIB, utilization=0.9, staging=True)
    assert memory.kv - staged.kv == memory.weights


def test_a_broadcast_that_waits_elsewhere_comes_in_two_buckets_or_twice_the_largest_tensor() -> None:
    shape = shape_of("Qwen/Qwen2.5-3B")
    plain, bucketed, by_tensor = (
        server_memory(shape, card_bytes=79 * GIB, utilization=0.9, bucket_bytes=size) for size in (None, 2**30, 0)
    )
    assert (plain.staging, bucketed.staging, by_tensor.staging) == (0, 2 * 2**30, 2 * 151_936 * 2048 * 2)
    assert plain.kv - bucketed.kv == 2 * 2**30
    halves = server_memory(shape, card_bytes=79 * GIB, utilization=0.9, staging=True, parallel=2)
    assert (halves.weights, halves.staging) == (3_085_938_688, 2 * 3_085_938_688)  # each card stages the whole version


def test_the_version_handed_to_a_server_on_the_card_is_there_at_every_moment() -> None:
    shape = shape_of("Qwen/Qwen3-0.6B")
    apart, same = (trainer_memory(shape, ranks=1, row_tokens=4096, chunk=1024, handed_bytes=n) for n in (0, 2))
    assert same.handed == 2 * 596_049_920
    assert same.total - apart.total == same.at_the_update - apart.at_the_update == same.handed
    assert same.between_steps == 12 * 596_049_920 + same.handed  # weights and moments


def test_operations_of_a_token() -> None:
    shape = shape_of("Qwen/Qwen2.5-0.5B")
    weights = 494_032_768 - 896  # all but the last norm
    assert forward_flops_per_token(shape) == 2 * weights
    assert forward_flops_per_token(shape, 1000) == 2 * weights + 4 * 24 * 896 * 1000


@pytest.mark.parametrize("kind", ["Qwen3", "Qwen2", "Llama"])
def test_a_layer_keeps_for_its_backward_pass_what_the_arithmetic_says(kind: str) -> None:
    """Autograd's own saved tensors, of two more layers, in bfloat16; sdpa here copies its output once more."""
    import torch
    import transformers

    tokens, totals = 512, []
    config: Any = getattr(transformers, f"{kind}Config")(
        vocab_size=128, hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        num_hidden_layers=3,
    )  # fmt: skip
    for layers in (1, 3):
        smaller = type(config)(**{**config.to_dict(), "num_hidden_layers": layers, "layer_types": None})
        totals.append(_kept(torch, getattr(transformers, f"{kind}ForCausalLM"), smaller, tokens))
    shape = shape_from(config.to_dict())
    assert (totals[1] - totals[0]) / 2 / tokens == layer_activation_bytes(shape, 2) + 2 * shape.query


def _kept(torch: Any, model: Any, config: Any, tokens: int) -> int:
    from telescope.backends.common import attention

    config._attn_implementation = attention.register("sdpa")
    lm = model(config).bfloat16().train()
    own = {parameter.untyped_storage().data_ptr() for parameter in lm.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lm.get_decoder()(
            input_ids=torch.zeros(1, tokens, dtype=torch.int64),
            position_ids=torch.arange(tokens)[None],
            use_cache=False,
            row=attention.segments("sdpa", np.array([0, tokens]), "cpu"),
        )
    return sum(storage.nbytes() for storage in kept.values())
