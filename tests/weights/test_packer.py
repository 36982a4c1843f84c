"""Packing version after version: what was worked out for the first one must never hide what has changed since."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from telescope.backends.fsdp.gather import BucketPart, Packer, layout
from telescope.backends.fsdp.policy import Policy
from telescope.weights.buckets import buckets, lay_out


class Model:
    """Two matrices of experts as one stack, a matrix, a scalar; cut into buckets."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        stack, matrix, scalar = (nn.Parameter(torch.randn(s, generator=random)) for s in ((2, 3, 4), (5, 7), ()))
        self.parameters = [stack, matrix, scalar]
        self.published = {
            "first": BucketPart(stack, (3, 4), 0, depth=2),
            "matrix": matrix,
            "second": BucketPart(stack, (3, 4), 3, depth=2),
            "scalar": scalar,
        }
        self.packer = Packer(lambda: self.published, 0, 1)
        self.specs, self.nbytes = lay_out(layout(self.published), "bfloat16")

    def version(self, place: torch.Tensor, bucket_bytes: int) -> dict[str, torch.Tensor]:
        """Every tensor as it was packed."""
        place.fill_(255)
        for bucket in buckets(self.specs, bucket_bytes):
            self.packer.pack(bucket, place[bucket.start : bucket.stop])
        return {spec.name: place[spec.offset :][: spec.nbytes].view(torch.bfloat16).view(spec.shape) for spec in self.specs}

    def wanted(self) -> dict[str, torch.Tensor]:
        first, matrix, second, scalar = self.published.values()
        found = {"first": first.parameter[0], "matrix": matrix, "second": second.parameter[1], "scalar": scalar}
        return {name: tensor.detach().bfloat16() for name, tensor in found.items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("bucket_bytes", [0, 64, 1 << 20])
def test_parameters_changed_in_place_are_packed_as_they_are_now(bucket_bytes):
    model, place = Model(), torch.zeros(1024, dtype=torch.uint8)
    before = model.wanted()
    assert same(model.version(place, bucket_bytes), before)
    with torch.no_grad():
        for parameter in model.parameters:
            parameter.neg_()
    found = model.version(place, bucket_bytes)
    assert same(found, model.wanted())
    assert not same(found, before)


def test_a_version_goes_to_the_memory_that_is_given_and_cuts_may_change():
    model = Model()
    first, second = (torch.zeros(1024, dtype=torch.uint8) for _ in range(2))
    for place, bucket_bytes in ((first, 64), (second, 64), (first, 1 << 20), (second, 0), (second, 64)):
        assert same(model.version(place, bucket_bytes), model.wanted())


def test_other_parameters_are_packed_from_the_next_version_on():
    model, place, before = Model(), torch.zeros(1024, dtype=torch.uint8), Model().wanted()
    model.version(place, 64)
    other = nn.Parameter(torch.ones(5, 7))
    model.published = model.published | {"matrix": other}
    assert same(model.version(place, 64), before | {"matrix": other.detach().bfloat16()})


def test_a_policy_publishes_the_same_mapping_until_a_parameter_is_replaced():
    policy = Policy(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)), "sdpa")
    published = policy.published(1)
    assert list(published) == ["0.weight", "0.bias", "1.weight"]
    assert policy.published(1) is published
    policy.lm[1].weight = nn.Parameter(torch.ones(1, 3))
    assert policy.published(1)["1.weight"].parameter is policy.lm[1].weight
    assert policy.published(1)["0.bias"].parameter is policy.lm[0].bias
