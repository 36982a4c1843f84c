"""backend=megatron on one rank: what is trained is what was sampled, however it is packed, and broken steps move nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed here: the extra `megatron` brings it")

from telescope.backends.megatron.masters import choose_share
from tests.backends.megatron_watching import Watching, on_cpu, watch
from tests.backends.models import random_model
from tests.backends.shards import make_job, make_shard, part
from tests.backends.watching import distance


@pytest.fixture
def build(tmp_path) -> Iterator[Callable[..., Watching]]:
    """`build(job's changes, **settings)`; the backend before is closed first."""
    model, built = random_model(tmp_path / "model"), list[Watching]()

    def make(changes: dict[str, Any], **settings: Any) -> Watching:
        if built:
            built.pop().close()
        built.append(watch(make_job(model=model, **changes), **settings))
        return built[-1]

    with on_cpu():
        yield make
        for backend in built:
            backend.close()


def test_a_packed_samples_logprobs_do_not_depend_on_its_neighbours_to_the_bit(build):
    backend = build({"seq_len": 128})
    shard = make_shard(lengths=(33, 20, 70))
    other = replace(shard, ids=shard.ids.copy())
    other.ids[:33], other.ids[53:] = 7, 9
    one, two = backend.logprobs(shard)[33:53], backend.logprobs(other)[33:53]
    assert np.array_equal(one, two, equal_nan=True)
    assert np.isfinite(one[4:]).all()
    assert np.array_equal(backend.logprobs(part(shard, [1])), one, equal_nan=True), "alone in its row"


def test_the_gradient_does_not_depend_on_the_rows_the_step_is_packed_into(build):
    found = []
    for seq_len in (40, 64, 256):
        backend = build({"seq_len": seq_len, "pad_to_multiple_of": 8})
        result = backend.train_step(make_shard())
        found.append((result.metrics, backend.updates[0]))
    (first, gradients), *others = found
    assert [metrics["rows"] for metrics, _ in found] == [4.0, 3.0, 1.0]
    for metrics, other in others:
        assert distance(gradients, other) < 1e-5
        assert metrics["loss"] == pytest.approx(first["loss"], rel=1e-5)


def test_a_gradient_that_is_not_finite_skips_the_update_and_leaves_no_trace(build):
    backend = build({})
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    shard = make_shard()
    broken = replace(shard, items=(msgspec.structs.replace(shard.items[0], advantage=float("inf")), *shard.items[1:]))
    metrics = backend.train_step(broken).metrics
    assert (metrics["update_skipped"], metrics["updates_skipped_total"]) == (1.0, 1.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.weights())
    metrics = backend.train_step(make_shard(2)).metrics
    after = backend.updates[1]
    assert (metrics["update_skipped"], metrics["updates_skipped_total"]) == (0.0, 1.0)
    fresh = build({})
    fresh.train_step(make_shard(2))
    assert distance(fresh.updates[0], after) == 0.0


def test_a_learning_rate_of_zero_leaves_every_bit_of_the_weights(build):
    backend = build({"learning_rate": 0.0})
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    assert backend.train_step(make_shard()).metrics["grad_norm"] > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.weights())


@pytest.mark.parametrize(("dtype", "scale"), [(None, 1.0), ("float16", 2.0**16)])
def test_the_gradient_is_clipped_to_its_norm_whatever_the_loss_was_multiplied_by(build, dtype, scale):
    backend = build({"grad_clip": 0.01}, mixed_precision_dtype=dtype)
    metrics = backend.train_step(make_shard()).metrics
    norm = torch.sqrt(sum(tensor.double().pow(2).sum() for tensor in backend.updates[0].values()))
    assert metrics["grad_norm"] > 0.01
    assert metrics["grad_norm"] == pytest.approx(float(norm) / scale, rel=1e-5)
    moments = [backend._updater.moment("exp_avg", piece) for piece in backend._masters.pieces.values()]
    clipped = torch.sqrt(sum(moment.double().pow(2).sum() for moment in moments)) / 0.1  # 0.1 of the gradient
    assert float(clipped) == pytest.approx(0.01, rel=1e-3)


def test_weight_decay_shrinks_matrices_and_leaves_norms_alone(build):
    backend = build({"learning_rate": 0.1, "weight_decay": 0.5})
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    still = make_shard()
    items = tuple(msgspec.structs.replace(item, advantage=0.0) for item in still.items)
    backend.train_step(replace(still, items=items))
    for name, tensor in backend.weights():
        torch.testing.assert_close(tensor, before[name] * (0.95 if tensor.ndim >= 2 else 1.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_float32_weights_and_nearly_the_float32_gradient(build, dtype):
    exact = build({})
    exact.train_step(make_shard())
    expected = exact.updates[0]
    mixed = build({}, mixed_precision_dtype=dtype)
    metrics = mixed.train_step(make_shard()).metrics
    scale = 2.0**16 if dtype == "float16" else 1.0
    assert metrics["update_skipped"] == 0.0
    assert {tensor.dtype for _, tensor in mixed.weights()} == {torch.float32}
    assert distance(expected, {name: tensor / scale for name, tensor in mixed.updates[0].items()}) < 0.1


def test_half_of_what_is_updated_lies_in_host_memory_the_largest_first_and_makes_the_same_update(build):
    found = []
    for settings in ({}, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}):
        backend = build({}, mixed_precision_dtype="bfloat16", **settings)
        backend.train_step(make_shard())
        found.append({name: tensor.clone() for name, tensor in backend.weights()})
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())
    masters = backend._masters
    sizes = {name: piece.stop - piece.start for name, piece in masters.pieces.items()}
    hosted, others = sum(sizes[name] for name in masters.hosted), [sizes[name] for name in sizes if name not in masters.hosted]
    assert sum(sizes.values()) / 2 - min(others) < hosted <= sum(sizes.values()) / 2


def test_the_largest_parameters_are_in_host_memory_first_and_the_smallest_fill_what_is_left():
    assert choose_share({"a": 5, "b": 3, "c": 2}, 0.7) == {"a", "c"}
    assert choose_share({"a": 5, "b": 3, "c": 2}, 1.0) == {"a", "b", "c"}
    assert choose_share({"a": 5, "b": 3, "c": 2}, 0.1) == choose_share({}, 1.0) == frozenset()


def test_gradients_are_added_up_in_half_where_that_is_asked_for(build):
    backend = build({}, mixed_precision_dtype="bfloat16", grad_reduce_in_fp32=False)
    assert backend.train_step(make_shard()).metrics["update_skipped"] == 0.0
    assert {piece.gradient.dtype for piece in backend._masters.pieces.values()} == {torch.bfloat16}
    assert {piece.updated.dtype for piece in backend._masters.pieces.values()} == {torch.float32}
