"""What compiled layers keep for the backward pass, counted, against what `plan` counts with."""

from __future__ import annotations

import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from telescope.backends.common import attention
from telescope.backends.fsdp import compiling, recompute
from telescope.maths.memory import ModelShape, compiled_activation_bytes, compiled_attention_bytes, shape_from

SIZES = {"hidden_size": 96, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
WIDER = {"hidden_size": 192, "intermediate_size": 448, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}


CUT_ALONE = "aot_eager_decomp_partition"
"""Graphs are cut in two as ever, by the min-cut partitioner after decomposition, and run without code being made of them."""


def compiled(
    monkeypatch: pytest.MonkeyPatch, kind: str, layers: int, sizes: dict[str, int],
    *, kept: recompute.Mode = "none", pointwise_again: bool = False, backend: Any = CUT_ALONE,
) -> Any:  # fmt: skip
    """A model in bfloat16."""
    import transformers

    torch._dynamo.reset()
    config = getattr(transformers, f"{kind}Config")(vocab_size=128, num_hidden_layers=layers, **sizes)
    config._attn_implementation = attention.register("sdpa")
    lm = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().train()
    recompute.enable(lm, kept)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    compiling.compile_layers(lm, "sdpa", pointwise_again=pointwise_again)
    monkeypatch.undo()
    return lm


def run(lm: Any, tokens: int) -> Any:
    row = attention.segments("sdpa", np.array([0, tokens]), "cpu")
    ids, places = torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens)[None]
    return lm.get_decoder()(input_ids=ids, position_ids=places, use_cache=False, row=row)


def told(lm: Any) -> tuple[ModelShape, int]:
    """The shape, and what sdpa on a CPU keeps besides a token: its output once more, stacked."""
    shape = shape_from(lm.config.to_dict())
    return shape, 2 * shape.query


def kept_by_the_second_layer(lm: Any, tokens: int) -> float:
    """Bytes a token of the tensors that autograd saves in it and had not saved before."""
    own = {parameter.untyped_storage().data_ptr() for parameter in lm.parameters()}
    kept: dict[int, Any] = {}
    before = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept.setdefault(storage.data_ptr(), storage)  # held, so that no address is used twice
        return tensor

    def note(*_: Any) -> None:
        before.append(sum(storage.nbytes() for storage in kept.values()))

    layer = lm.get_decoder().layers[1]
    layer.register_forward_pre_hook(note)
    layer.register_forward_hook(note)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(lm, tokens)
    return float(before[1] - before[0]) / tokens


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_layer_keeps_for_its_backward_pass_what_the_arithmetic_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """3,888 bytes a token of a layer of 96, 128, 64 and 320 (eager 5,808), to the byte, and as many a token of a longer row."""
    lm = compiled(monkeypatch, "Qwen3", 2, SIZES)
    shape, copied = told(lm)
    assert compiled_activation_bytes(shape, 2) == 3_888
    assert [kept_by_the_second_layer(lm, tokens) - copied for tokens in (96, 160)] == [3_888, 3_888]
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "sizes"), [("Qwen3", WIDER), ("Qwen2", SIZES), ("Qwen2", WIDER), ("Llama", WIDER)])
def test_so_do_other_kinds_of_layers_in_other_sizes(monkeypatch: pytest.MonkeyPatch, kind: str, sizes: dict[str, int]) -> None:
    lm = compiled(monkeypatch, kind, 2, sizes)
    shape, copied = told(lm)
    assert kept_by_the_second_layer(lm, 96) - copied == compiled_activation_bytes(shape, 2)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "sizes"), [("Qwen3", SIZES), ("Qwen3", WIDER), ("Qwen2", SIZES), ("Llama", WIDER)])
def test_outputs_of_norms_and_the_activated_product_are_all_that_need_not_be_kept(
    monkeypatch: pytest.MonkeyPatch, kind: str, sizes: dict[str, int]
) -> None:
    """To the byte, and no matrix product is in a backward graph more than before."""
    found, products = [], []
    for again in (False, True):
        counted: Counter[str] = Counter()
        lm = compiled(monkeypatch, kind, 2, sizes, pointwise_again=again, backend=counting(counted))
        shape, copied = told(lm)
        found.append(kept_by_the_second_layer(lm, 96) - copied)
        products.append(counted)
    torch._dynamo.reset()
    everything = compiled_activation_bytes(shape, 2)
    assert found == [everything, everything - 2 * (2 * shape.hidden + shape.intermediate)]
    assert products[0] == products[1]
    assert products[0]["backward"] > products[0]["forward"] == 7


def test_a_torch_that_does_not_know_the_choice_is_told_of_and_keeps_all(caplog: pytest.LogCaptureFixture) -> None:
    known, unknown = SimpleNamespace(ban_recompute_materialized_backward=True), SimpleNamespace()
    for banned in (True, False):
        compiling.ban_pointwise(banned, known)
        assert known.ban_recompute_materialized_backward is banned
    compiling.ban_pointwise(True, unknown)
    assert not caplog.messages
    compiling.ban_pointwise(False, unknown)
    assert (
        "no torch._functorch.config.ban_recompute_materialized_backward: backend.recompute_pointwise=true does" in caplog.text
    )
    assert not vars(unknown)


def counting(products: Counter[str]) -> Any:
    """As CUT_ALONE, and counts the matrix products of forward and backward graphs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def count(name: str, graph: Any, _: Any) -> Any:
        products[name] += sum(node.op == "call_function" and "mm" in str(node.target) for node in graph.graph.nodes)
        return graph.forward

    return aot_autograd(
        fw_compiler=functools.partial(count, "forward"),
        bw_compiler=functools.partial(count, "backward"),
        decompositions=select_decomp_table,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_layer_that_keeps_attention_keeps_its_input_besides_and_no_other_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two more layers, by what was allocated in the forward pass and not freed. Real code, since products in graphs that run
    without it would be within reach."""
    tokens, alive = 512, []
    for layers in (1, 3):
        lm = compiled(monkeypatch, "Qwen3", layers, WIDER, kept="selective", backend="inductor")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
            run(lm, tokens)  # compiles; what that keeps is not to be counted
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            out = run(lm, tokens)
        alive.append(sum(event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"))
        del out
    shape, _ = told(lm)
    torch._dynamo.reset()
    assert (alive[1] - alive[0]) / 2 / tokens == compiled_attention_bytes(shape, 2)
