"""What layers keep for the backward pass, and what they compute twice; what is kept of gradients, and in which precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen

from telescope.backends.common import attention, shards
from telescope.backends.fsdp import recompute
from telescope.backends.fsdp.recompute import worth_keeping
from telescope.maths import packing
from telescope.maths.memory import layer_product_bytes, shape_from
from tests.backends.counting import Counting
from tests.backends.models import random_model
from tests.backends.shards import make_job, make_shard
from tests.backends.watching import distance

PRODUCTS = ("mm", "_scaled_dot_product_flash_attention_for_cpu")
LAYERS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Wide layers and a small vocabulary, so that layers are what there is."""
    folder = tmp_path_factory.mktemp("wide")
    return random_model(folder, hidden_size=64, intermediate_size=256, initializer_range=0.05, num_hidden_layers=LAYERS)


def passes(build, model: str, kept) -> tuple[dict, dict[str, int], int]:
    """The gradients, the products computed in the backward pass besides the gradients' own, and what was alive between both."""
    backend = build(make_job(model=model, pad_to_multiple_of=16), gradient_checkpointing=kept)
    backend.train_step(make_shard())
    with Counting() as forward:
        shard = make_shard()
        (row,) = backend._plan(shard)[0]
        arrays = packing.arrange(row, shards.trajectories(shard), shard.items)
        _, given = backend._on_device(arrays)
        before = forward.alive()
        logprob, _ = backend._policy(given, 1024)
        alive = forward.alive() - before
    with Counting() as backward:
        logprob.sum().backward()
    return backend.gradients, {name: backward.ran[name] for name in PRODUCTS}, alive


def test_selective_checkpointing_keeps_products_and_computes_only_the_rest_again(build, model):
    """Of a layer's 7 products with weights and its attention (over two stacks of samples) nothing is computed twice. With full
    checkpointing all of it is but the last product, as nobody needs its result."""
    found = {kept: passes(build, model, kept) for kept in (False, "selective", True)}
    none, selective, full = (products for _, products, _ in found.values())
    assert selective == none
    assert {name: full[name] - none[name] for name in PRODUCTS} == {"mm": 6 * LAYERS, PRODUCTS[1]: 2 * LAYERS}
    alive_none, alive_selective, alive_full = (alive for _, _, alive in found.values())
    assert alive_full < 0.5 * alive_selective < 0.5 * 0.7 * alive_none
    plain = found[False][0]
    assert distance(plain, found["selective"][0]) == distance(plain, found[True][0]) == 0.0


@pytest.mark.parametrize(
    ("kept", "told"), [("selective", layer_product_bytes), ("full", lambda shape, size: size * shape.hidden)]
)
def test_a_layer_keeps_as_many_bytes_a_token_as_plan_says(kept: str, told):
    """Of two more layers, in bfloat16, one sample a row."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=128, hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=4, head_dim=32
    )
    tokens, alive = 512, []
    row = attention.segments("sdpa", np.array([0, tokens]), "cpu")
    for layers in (1, 3):
        smaller = type(config)(**{**config.to_dict(), "num_hidden_layers": layers, "layer_types": None})
        smaller._attn_implementation = attention.register("sdpa")
        lm = transformers.Qwen3ForCausalLM(smaller).bfloat16().train()
        recompute.enable(lm, kept)
        ids, places = torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens)[None]
        with Counting() as forward:
            out = lm.get_decoder()(input_ids=ids, position_ids=places, use_cache=False, row=row)
            alive.append(forward.alive())
        del out
    assert (alive[1] - alive[0]) / 2 / tokens == told(shape_from(config.to_dict()), 2)


def test_products_and_attention_are_worth_keeping_and_norms_are_not():
    aten = torch.ops.aten
    assert worth_keeping(aten.mm.default)
    assert not worth_keeping(aten.mm.out)  # what a compiled layer calls: its result could not be put back
    assert worth_keeping(aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert worth_keeping(aten._flash_attention_forward.default)
    assert worth_keeping(aten._scaled_dot_product_cudnn_attention.default)
    assert torch.nn.attention.varlen  # registers what comes next
    assert worth_keeping(torch.ops.torch_attn._varlen_attn.default)
    assert not any(map(worth_keeping, (aten.mul.Tensor, aten.silu.default, aten.pow.Tensor_Scalar, aten.rsqrt.default)))


def param_groups(state) -> list:
    """torch 2.11 has at most one of a module."""
    found = getattr(state, "_fsdp_param_groups", None)
    return found if found is not None else [state._fsdp_param_group]


def test_no_gradient_is_whole_between_two_rows(build):
    """After each row's backward pass FSDP holds shards alone, and the gathered layers are freed."""
    backend = build(make_job(seq_len=64, pad_to_multiple_of=16))
    seen = []
    accumulate = backend._accumulate

    def watched(*given):
        accumulate(*given)
        for module in backend._policy.fsdp_modules():
            for group in param_groups(module._get_fsdp_state()):
                seen.extend(parameter.unsharded_accumulated_grad for parameter in group.fsdp_params)
        seen.extend(None if isinstance(p.grad, torch.distributed.tensor.DTensor) else p for p in backend._policy.parameters())

    backend._accumulate = watched
    assert backend.train_step(make_shard()).metrics["rows"] == 3.0
    assert len(seen) > 100
    assert set(seen) == {None}


def test_weights_are_gathered_once_a_minibatch_where_they_stay_gathered_after_forward(build):
    """3 rows: whole after the first two, shards after the last, so that the next step gathers what the update has made. To the
    bit the updates of the plain way, which gathers in each row."""
    gathered, found = [], []
    for reshard in (True, False):
        backend = build(make_job(seq_len=64, pad_to_multiple_of=16), reshard_after_forward=reshard)
        groups = [group for module in backend._policy.fsdp_modules() for group in param_groups(module._get_fsdp_state())]
        accumulate = backend._accumulate

        def watched(*given, accumulate=accumulate, groups=groups):
            accumulate(*given)
            gathered.append({group.is_unsharded for group in groups})

        backend._accumulate = watched
        for step in (1, 2):
            assert backend.train_step(make_shard(step)).metrics["rows"] == 3.0
        found.append((backend.updates, dict(backend.weights())))
    assert gathered == [{False}] * 6 + [{True}, {True}, {False}] * 2
    (plain_updates, plain_weights), (updates, weights) = found
    assert all(distance(one, other) == 0.0 for one, other in zip(plain_updates, updates, strict=True))
    assert all(torch.equal(plain_weights[name], weights[name]) for name in plain_weights)


def test_gradients_of_rows_are_computed_in_bfloat16_and_added_in_float32(build):
    """To the bit: each row's own gradient has 8 bits; of their sum bfloat16 would lose most of the smaller one."""
    shard = make_shard(lengths=(40, 40, 40, 40))
    backend = build(make_job(seq_len=40, pad_to_multiple_of=8), mixed_precision_dtype="bfloat16")
    rows, accumulate = [], backend._accumulate

    def watched(*given):
        before = {name: p.grad.full_tensor().clone() for name, p in named(backend) if p.grad is not None}
        accumulate(*given)
        rows.append({name: p.grad.full_tensor() - before.get(name, 0.0) for name, p in named(backend)})

    backend._accumulate = watched
    backend.train_step(shard)
    name = "lm.model.layers.0.mlp.up_proj.weight"
    gradient = backend.gradients[name]
    assert (len(rows), gradient.dtype, dict(named(backend))[name].dtype) == (4, torch.float32, torch.float32)
    assert torch.equal(rows[0][name], rows[0][name].bfloat16().float())
    assert not torch.equal(gradient, gradient.bfloat16().float())
    torch.testing.assert_close(gradient, sum(row[name] for row in rows), rtol=1e-6, atol=1e-9)


class OutsideGraphs(Counting):
    """Lets layers be compiled under it, and sees what runs between their graphs."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_layers_that_keep_attention_make_the_same_gradient_and_attend_once(build):
    found, attended = [], []
    for settings in ({"gradient_checkpointing": True}, {"compile": True, "gradient_checkpointing": "selective"}):
        torch._dynamo.reset()
        backend = build(make_job(seq_len=128, pad_to_multiple_of=16), **settings)
        with OutsideGraphs() as counted:
            backend.train_step(make_shard())
        found.append(backend.updates)
        attended.append(counted.ran[PRODUCTS[1]])
    torch._dynamo.reset()
    assert distance(found[0][0], found[1][0]) < 1e-4
    assert attended[1] == attended[0] / 2


def named(backend):
    return list(backend._policy.named_parameters())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_layers_make_the_same_gradient_and_one_graph_serves_rows_of_all_lengths(build):
    """2 graphs (before and after attention) without gradients, 2 with them, and 4 when a checkpointed layer is computed
    again."""
    from torch._dynamo.utils import counters

    lengths = ((5, 23, 11, 30, 7, 18, 40, 9), (50, 60, 11, 8, 31, 9), (100,))
    found, graphs = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        backend = build(make_job(seq_len=128, pad_to_multiple_of=16), compile=compiled, gradient_checkpointing=True)
        for step, each in enumerate(lengths, start=1):
            backend.train_step(make_shard(step, seed=step, lengths=each))
            graphs.append(counters["stats"]["unique_graphs"])
        found.append(backend.updates)
    torch._dynamo.reset()
    assert graphs == [0, 0, 0, 8, 8, 8]
    assert [distance(one, other) < 1e-4 for one, other in zip(*found, strict=True)] == [True] * 3
