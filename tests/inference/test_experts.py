"""Layers whose experts a kernel reads in an order of its own: filled, arranged and copied to where they stood; or refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from telescope.inference.vllm.worker_extension import Weights
from telescope.inference.vllm.worker_protocol import UpdateSetup
from telescope.records import TensorSpec

pytestmark = pytest.mark.vllm

EXPERTS, HIDDEN, WIDTH, PADDED = 3, 4, 5, 8
ROUTER = "layers.0.gate.weight"


class Method:
    """Pads an expert's width to 8 and turns the stacks, as some kernels want them; notes what it was asked."""

    def __init__(self) -> None:
        self.moe_kernel: Any = None
        self.secret = 0.0

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.moe_kernel is None:
            self.moe_kernel = SimpleNamespace(fused_experts=self.Finish(self))
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    class Finish:
        def __init__(self, method: Method) -> None:
            self._method = method

        def process_weights_after_loading(self, layer: Any) -> None:
            w13 = layer.w13_weight.new_zeros(EXPERTS, 2 * PADDED, HIDDEN)
            w13[:, :WIDTH], w13[:, PADDED : PADDED + WIDTH] = layer.w13_weight[:, :WIDTH], layer.w13_weight[:, WIDTH:]
            w2 = layer.w2_weight.new_zeros(EXPERTS, HIDDEN, PADDED)
            w2[:, :, :WIDTH] = layer.w2_weight
            for name, stack in (("w13_weight", w13), ("w2_weight", w2)):
                arranged = nn.Parameter((stack + self._method.secret).transpose(1, 2).contiguous(), requires_grad=False)
                arranged.weight_loader = getattr(layer, name).weight_loader
                setattr(layer, name, arranged)


class Experts(nn.Module):
    """As vLLM's layers keep them: one stack of gates and ups, one of downs."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Method()
        self.w13_weight = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, HIDDEN), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH), requires_grad=False)
        for stack in (self.w13_weight, self.w2_weight):
            stack.weight_loader = self.load

    def load(self, parameter: nn.Parameter, loaded: torch.Tensor, which: str, expert: int) -> None:
        target = parameter.data[expert]
        if which != "down_proj":
            target = target.narrow(0, WIDTH * (which == "up_proj"), WIDTH)
        target.copy_(loaded)


class Model(nn.Module):
    """Two layers, each a router and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"gate": nn.Linear(HIDDEN, EXPERTS, bias=False), "experts": Experts()}) for _ in range(2)
        )

    def load_weights(self, weights: Any) -> set[str]:
        found = set()
        for name, loaded in weights:
            _, layer, part, *rest = name.split(".")
            own = self.layers[int(layer)]
            if part == "gate":
                own["gate"].weight.data.copy_(loaded)
            else:
                stack = own["experts"].w2_weight if rest[1] == "down_proj" else own["experts"].w13_weight
                stack.weight_loader(stack, loaded, rest[1], int(rest[0]))
            found.add(name)
        return found


def version(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    found = {f"layers.{layer}.gate.weight": torch.randn(EXPERTS, HIDDEN) for layer in range(2)}
    for layer in range(2):
        for expert in range(EXPERTS):
            found |= {f"layers.{layer}.experts.{expert}.{which}.weight": torch.randn(s) for which, s in shapes.items()}
    return found


def loaded(tensors: dict[str, torch.Tensor]) -> Model:
    """As vLLM loads a model: the shapes are noted, then the layers are filled and arranged."""
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    model = Model().requires_grad_(False)
    record_metadata_for_reloading(model)
    model.load_weights(tensors.items())
    for layer in model.layers:
        layer["experts"].quant_method.process_weights_after_loading(layer["experts"])
    return model


def weights_of(model: nn.Module, folder: Path, **config: Any) -> Weights:
    save_file(version(0), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    settings = {"model": str(folder), "quantization": None, "dtype": torch.float32} | config
    return Weights(model, SimpleNamespace(model_config=SimpleNamespace(**settings)), torch.device("cpu"), lambda **_: None)


def opened(weights: Weights) -> Any:
    return weights.open(UpdateSetup("run", "server-0", "full", 1.0, 1.0), 0)


def specs(names: list[str]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "float32", (1,), 0, 4) for name in names)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_new_experts_are_padded_and_turned_as_at_the_first_load_and_lie_where_the_old_ones_did(tmp_path: Path):
    model, expected, new = loaded(version(0)), loaded(version(1)), version(1)
    weights = weights_of(model, tmp_path)
    found = opened(weights)
    assert (found.refused, found.no_plan, found.copies, found.arranged) == ("", "", 2 + 2 * EXPERTS * 3, 2)
    assert same(model, loaded(version(0)))  # finding the way changed nothing
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    weights._plan.apply(lambda name: new[name].reshape(-1))
    assert same(model, expected)
    weights._plan.bound(lambda name: version(0)[name].reshape(-1)).apply()
    assert same(model, loaded(version(0)))
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_experts_that_come_bucket_by_bucket_change_with_the_last_matrix_of_their_layer(tmp_path: Path):
    model, new = loaded(version(0)), version(1)
    weights = weights_of(model, tmp_path)
    opened(weights)
    names = sorted(new)
    buckets = [names[start : start + 5] for start in range(0, len(names), 5)]  # of 20 matrices; the cuts cross layers
    layer = model.layers[0]["experts"]
    before = layer.w13_weight.clone()
    weights._put(lambda name: new[name].reshape(-1), specs(buckets[0]))
    assert torch.equal(layer.w13_weight, before)
    for bucket in buckets:  # from the first one on again, as after a version that broke off
        weights._put(lambda name: new[name].reshape(-1), specs(bucket))
    assert same(model, loaded(new))


def test_a_version_is_compared_in_the_kernels_own_order(tmp_path: Path):
    model = loaded(version(0))
    weights = weights_of(model, tmp_path)
    opened(weights)
    assert weights._plan.differing(lambda name: version(0)[name].reshape(-1)) == ()
    model.layers[1]["experts"].w2_weight[2, 1, 1] += 1.0
    other = weights._plan.differing(lambda name: version(0)[name].reshape(-1))
    assert len(other) == EXPERTS * 3
    assert all(name.startswith("layers.1.experts.") for name in other)


def test_experts_that_do_not_come_out_as_they_were_loaded_are_refused_before_the_model_serves(tmp_path: Path):
    model = loaded(version(0))
    model.layers[1]["experts"].quant_method.secret = 1.0
    found = opened(weights_of(model, tmp_path))
    assert found.refused.startswith(
        "the model has experts, and no way to update them is proven here: arranged again, the experts"
    )
    assert "layers.1.experts.0.down_proj.weight" in found.refused
    assert found.copies == 0
    assert same(model.layers[0], loaded(version(0)).layers[0])


def test_quantised_experts_are_refused_with_the_setting(tmp_path: Path):
    found = opened(weights_of(loaded(version(0)), tmp_path, quantization="fp8"))
    assert "the model is served in fp8, so each version is quantised anew" in found.refused
    assert "inference.quantization=null" in found.refused
