"""Loaders as inference engines write them, watched: which copies a version will be, and which loaders are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from telescope.inference.vllm.copy_plan import CopyPlan, NoPlan, differences, record

SHAPES = {
    "embed.weight": (10, 4),
    "q.weight": (8, 4),
    "k.weight": (4, 4),
    "down.weight": (4, 8),
    "norm.weight": (4,),
}


class Half(nn.Module):
    """The second of two tensor-parallel ranks: a padded vocabulary, q and k fused, down cut along its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(6, 4), requires_grad=False)  # rows 6 to 9, and two of padding
        self.qk = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(4), requires_grad=False)

    def load(self, weights) -> set[str]:
        for name, loaded in weights:
            match name:
                case "embed.weight":
                    self.embed.data[:4].copy_(loaded.narrow(0, 6, 4))
                    self.embed.data[4:].fill_(0)
                case "q.weight":
                    self.qk.data.narrow(0, 0, 4).copy_(loaded.narrow(0, 4, 4))
                case "k.weight":
                    self.qk.data.narrow(0, 4, 2).copy_(loaded[2:])
                case "down.weight":
                    self.down.data.copy_(loaded.narrow(1, 4, 4))
                case "norm.weight":
                    self.norm.data.copy_(loaded)
        return {"embed", "qk", "down", "norm"}


def made(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def plan_of(model: Half, load=None) -> CopyPlan:
    return record(dict(model.named_parameters()), load or model.load, SHAPES, torch.float32)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_watching_a_loader_touches_nothing_and_finds_its_copies():
    model = Half()
    model.load(made(1).items())
    before = [parameter.clone() for parameter in model.parameters()]
    plan = plan_of(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [(copy.source, copy.size, copy.stride, copy.offset) for copy in plan.copies] == [
        ("embed.weight", (4, 4), (4, 1), 24),
        ("q.weight", (4, 4), (4, 1), 16),
        ("k.weight", (2, 4), (4, 1), 8),
        ("down.weight", (4, 4), (8, 1), 4),
        ("norm.weight", (4,), (1,), 0),
    ]
    assert plan.nbytes == 4 * (16 + 16 + 8 + 16 + 4)


def test_the_copies_do_what_the_loader_does_from_the_middle_of_a_buffer():
    model, expected = Half(), Half()
    plan = plan_of(model)
    for seed in (1, 2):  # the addresses stay: CUDA graphs hold them
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        tensors = made(seed)
        buffer = torch.cat([torch.zeros(3), *(tensor.flatten() for tensor in tensors.values())])
        firsts = dict(zip(tensors, torch.tensor([3, *(t.numel() for t in tensors.values())]).cumsum(0).tolist(), strict=False))
        rows = {name: buffer[firsts[name] : firsts[name] + tensor.numel()] for name, tensor in tensors.items()}
        expected.load(tensors.items())
        plan.bound(rows.__getitem__).apply() if seed == 1 else plan.apply(rows.__getitem__)
        assert same(model, expected)
        assert addresses == [parameter.data_ptr() for parameter in model.parameters()]


def test_only_some_tensors_are_copied_when_asked():
    model, tensors = Half(), made(1)
    plan_of(model).apply(lambda name: tensors[name].flatten(), frozenset({"norm.weight"}))
    assert torch.equal(model.norm, tensors["norm.weight"])
    assert model.qk.abs().max() == 0


def test_a_wider_dtype_on_the_way_is_rounded_as_a_loader_would():
    model, tensors = Half().bfloat16(), made(3)
    plan_of(model).apply(lambda name: tensors[name].flatten())
    assert torch.equal(model.norm, tensors["norm.weight"].bfloat16())


def test_loaded_values_that_are_not_the_checkpoints_are_told_by_name():
    model, tensors = Half(), made(1)
    model.load(tensors.items())
    plan = plan_of(model)
    assert differences(plan, tensors.__getitem__) == []
    model.qk[5, 3] += 1
    assert differences(plan, tensors.__getitem__) == ["k.weight"]
    model.norm.neg_()
    assert differences(plan, tensors.__getitem__) == ["k.weight", "norm.weight"]


def scaled(model: Half, weights):
    for name, loaded in weights:
        if name == "norm.weight":
            model.norm.data.copy_(loaded + 1)
        else:
            model.load([(name, loaded)])


def added(model: Half, weights):
    for name, loaded in weights:
        if name == "norm.weight":
            model.norm.data.add_(1)
        else:
            model.load([(name, loaded)])


def forgetful(model: Half, weights):
    model.load((name, loaded) for name, loaded in weights if name != "k.weight")


def twice(model: Half, weights):
    for name, loaded in weights:
        model.load([(name, loaded)] * (2 if name == "norm.weight" else 1))


def curious(model: Half, weights):
    for name, loaded in weights:
        if name == "norm.weight" and loaded[0].item() > 0:
            model.load([(name, loaded)])


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (scaled, "the loader copies computed values into norm"),
        (added, r"the loader writes norm with aten\.add_\.Tensor, which is not a copy"),
        (forgetful, "of 1 parameters the loader does not write each element once: qk"),
        (twice, "of 1 parameters the loader does not write each element once: norm"),
        (curious, "the loader needs more than names and shapes: "),
    ],
)
def test_a_loader_that_does_more_or_less_than_copy_is_refused(loader, words):
    model = Half()
    with pytest.raises(NoPlan, match=words):
        plan_of(model, lambda weights: loader(model, weights))
