"""`backend.checkpointed_layers`: which layers compute again, that numbers stay, and that no choice needs less memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from telescope.backends.common import attention
from telescope.backends.fsdp import recompute
from telescope.config.sections import LoraSettings, ModelSettings
from telescope.maths.memory import layer_activation_bytes, layer_product_bytes, shape_from
from tests.backends.counting import Counting
from tests.backends.models import random_experts, random_model
from tests.backends.shards import make_job, make_shard
from tests.backends.watching import Watching, distance

LAYERS = 4
WIDE = {"hidden_size": 64, "intermediate_size": 256, "initializer_range": 0.05, "num_hidden_layers": LAYERS}
"""With a small vocabulary: layers are what there is."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_model(tmp_path_factory.mktemp("wide"), **WIDE)


def layers_of(backend: Watching) -> Any:
    return backend._policy.lm.get_decoder().layers


def trained(backend: Watching) -> tuple[list[int], dict[str, torch.Tensor]]:
    """How often each layer ran in one step of one row, and the gradient. Hooks stand outside what is compiled."""
    calls = [0] * len(layers_of(backend))

    def count(place: int) -> None:
        calls[place] += 1

    for place, layer in enumerate(layers_of(backend)):
        layer.register_forward_pre_hook(lambda *_, place=place: count(place))
    assert backend.train_step(make_shard()).metrics["rows"] == 1.0
    return list(calls), backend.gradients


def test_so_many_first_layers_compute_again_and_the_gradient_is_the_same_to_the_bit(build: Any, model: str) -> None:
    job = make_job(model=model, pad_to_multiple_of=16)
    none, plain = trained(build(job))
    assert none == [1] * LAYERS
    for kept, number in itertools.product((True, "full", "selective"), (1, 3, LAYERS, None)):
        calls, gradient = trained(build(job, gradient_checkpointing=kept, checkpointed_layers=number))
        again = LAYERS if number is None else number
        assert calls == [2] * again + [1] * (LAYERS - again), (kept, number)
        assert distance(plain, gradient) == 0.0, (kept, number)


@pytest.mark.parametrize("kept", ["full", "selective"])
def test_adapters_and_experts_do_so_too(build: Any, model: str, tmp_path: Path, kept: str) -> None:
    adapted = make_job(pad_to_multiple_of=16)
    adapted = replace(adapted, model=ModelSettings(name=model, lora=LoraSettings(rank=2)))
    for job, number in ((adapted, 3), (make_job(model=random_experts(tmp_path), pad_to_multiple_of=16), 1)):
        plain = build(job)
        none, _ = trained(plain)
        plain.train_step(make_shard(2))  # B of adapters is 0 before, and A's gradient with it
        other = build(job, gradient_checkpointing=kept, checkpointed_layers=number)
        calls, _ = trained(other)
        other.train_step(make_shard(2))
        assert calls == [2] * number + [1] * (len(none) - number)
        assert [distance(*both) for both in zip(plain.updates[1:], other.updates[1:], strict=True)] == [0.0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_compiled_layers_do_so_to_the_bit_and_need_no_graph_more(build: Any, model: str) -> None:
    from torch._dynamo.utils import counters

    job, found = make_job(model=model, pad_to_multiple_of=16), {}
    cases = (False, None, False), ("full", None, False), ("full", 2, False), ("selective", 3, True), (False, None, True)
    for kept, number, pointwise in cases:
        torch._dynamo.reset()
        counters.clear()
        settings = {"gradient_checkpointing": kept, "checkpointed_layers": number, "recompute_pointwise": pointwise}
        calls, gradient = trained(build(job, compile=True, **settings))
        found[kept, number, pointwise] = calls, gradient, counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert [calls for calls, _, _ in found.values()] == [[1] * 4, [2] * 4, [2, 2, 1, 1], [2, 2, 2, 1], [1] * 4]
    assert [distance(found[cases[0]][1], gradient) for _, gradient, _ in found.values()] == [0.0] * 5
    assert [graphs for _, _, graphs in found.values()] == [4, 8, 8, 8, 4]


@pytest.mark.parametrize("kept", ["full", "selective"])
def test_no_other_choice_of_layers_has_a_smaller_peak(build: Any, model: str, kept: str) -> None:
    """Nor has it the last layer, spared alone: one that computes again needs the room that it saved at the worst moment."""
    peaks = {}
    backend = build(make_job(model=model, pad_to_multiple_of=16), gradient_checkpointing=kept, checkpointed_layers=2)
    own = tuple(place for place, layer in enumerate(layers_of(backend)) if layer.gradient_checkpointing)
    backend.train_step(make_shard())
    for chosen in (*itertools.combinations(range(LAYERS), 2), (0, 1, 2), (0, 1, 2, 3)):
        for place, layer in enumerate(layers_of(backend)):
            layer.gradient_checkpointing = place in chosen
        with Counting(peaks=True) as counted:
            backend.train_step(make_shard())
        peaks[chosen] = counted.peak_bytes
    assert own == (0, 1)
    assert peaks[0, 1] == min(peak for chosen, peak in peaks.items() if len(chosen) == 2)
    assert peaks[2, 3] > peaks[0, 1]
    assert peaks[0, 1, 2] <= peaks[0, 1, 2, 3] < peaks[0, 1]


@pytest.mark.parametrize(
    ("kept", "told"),
    [("full", lambda shape: 2 * shape.hidden), ("selective", lambda shape: layer_product_bytes(shape, 2))],
)
def test_each_layer_that_computes_again_frees_as_many_bytes_as_plan_says(kept: str, told: Any) -> None:
    """In bfloat16, one sample a row. (sdpa on a CPU copies attention's output once more in a layer that keeps everything.)"""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=128, hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        num_hidden_layers=3, attn_implementation=attention.register("sdpa"),
    )  # fmt: skip
    tokens, alive = 512, []
    row = attention.segments("sdpa", np.array([0, tokens]), "cpu")
    for number in (1, 2, 3):
        lm = transformers.Qwen3ForCausalLM(config).bfloat16().train()
        recompute.enable(lm, kept, number)  # type: ignore[arg-type]
        ids, places = torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens)[None]
        with Counting() as forward:
            out = lm.get_decoder()(input_ids=ids, position_ids=places, use_cache=False, row=row)
            alive.append(forward.alive())
        del out
    shape = shape_from(config.to_dict())
    everything = layer_activation_bytes(shape, 2) + 2 * shape.query
    assert [(more - less) / tokens for more, less in itertools.pairwise(alive)] == [everything - told(shape)] * 2


def test_a_rank_refuses_more_layers_than_there_are_and_layers_without_a_switch(model: str) -> None:
    import transformers

    lm = transformers.AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(recompute.Indivisible, match=r"backend\.checkpointed_layers=5 is more than the 4 layers of Qwen3ForCau"):
        recompute.enable(lm, "full", 5)
    lm.model.layers[2] = torch.nn.Identity()
    with pytest.raises(recompute.Indivisible, match="can't be told one by one whether to compute again: leave it out"):
        recompute.enable(lm, "full", 2)
