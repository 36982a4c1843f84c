"""Layers of an engine's modules on one rank: the same model under other names, and what of FP8 a CPU can see.

Transformer Engine needs a GPU. Here its place is taken by modules that are named, built and called like its own
(engine_stub.py); tests/gpu/check_megatron.py has the real ones.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed here: the extra `megatron` brings it")

from telescope.backends.base import Saved
from telescope.backends.megatron import backend as backend_module
from telescope.backends.megatron import policy as policy_module
from telescope.backends.megatron.modules import engine_modules
from tests.backends import engine_stub
from tests.backends.megatron_watching import Watching, on_cpu, watch
from tests.backends.models import random_model
from tests.backends.shards import in_minibatches, make_job, make_shard
from tests.backends.watching import distance
from tests.digits.batches import VARIANTS

OWN, ENGINE = {"use_transformer_engine": False}, {"use_transformer_engine": True}
FP8 = {"fp8": True, "fp8_recipe": "tensorwise"}


@pytest.fixture
def build(tmp_path, monkeypatch) -> Iterator[Callable[..., Watching]]:
    """`build(settings, job's changes)`; the backend before is closed first."""
    model, built = random_model(tmp_path / "model"), list[Watching]()
    monkeypatch.setattr(backend_module, "engine_modules", engine_stub.modules)
    monkeypatch.setattr(backend_module, "refuse_fp8", lambda recipe: None)

    def make(settings: dict[str, Any], resume: Path | None = None, **changes: Any) -> Watching:
        if built:
            built.pop().close()
        built.append(watch(replace(make_job(model=model, **changes), resume=resume), **settings))
        return built[-1]

    with on_cpu():
        yield make
        for backend in built:
            backend.close()


def test_an_engines_layers_are_the_same_model_under_other_names(build):
    found = []
    for settings in (OWN, ENGINE):
        backend = build(settings)
        logprobs = backend.logprobs(make_shard())
        loss = backend.train_step(make_shard()).metrics["loss"]
        found.append((set(backend._masters.parameters), logprobs, loss, backend.updates[0], dict(backend.weights())))
    (ours, logprobs, loss, gradients, weights), (theirs, *others) = found
    assert {name for name in theirs if "layer_norm_weight" in name} == theirs - ours
    assert len(theirs - ours) == len(ours - theirs) == 4, "two norms of two layers"
    assert np.array_equal(others[0], logprobs, equal_nan=True)
    assert others[1] == loss
    assert distance(gradients, others[2]) == 0.0
    assert list(others[3]) == list(weights)
    assert all(torch.equal(others[3][name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(("first", "second"), [(OWN, ENGINE), (ENGINE, OWN)], ids=["to an engine", "from an engine"])
def test_a_checkpoint_of_one_kind_of_layers_is_gone_on_with_by_the_other(build, tmp_path, first, second):
    backend, outcomes = build(first), queue.Queue[Any]()
    backend.train_step(make_shard())
    backend.save(1, tmp_path / "saved", outcomes.put)
    assert isinstance(outcomes.get(timeout=60), Saved)
    loss, weights = backend.train_step(make_shard(2)).metrics["loss"], dict(backend.weights())
    resumed = build(second, resume=tmp_path / "saved")
    assert resumed.train_step(make_shard(2)).metrics["loss"] == loss
    assert all(torch.equal(tensor, weights[name]) for name, tensor in resumed.weights())


def test_rows_in_fp8_are_filled_up_to_a_multiple_and_nobody_looks_at_what_fills_them(build, monkeypatch):
    """Here the products are those of float32: what changes is the rows alone."""
    shard, seen = make_shard(lengths=(33, 20, 70)), list[int]()
    exact = build(ENGINE, seq_len=128, pad_to_multiple_of=1)
    expected = exact.logprobs(shard)
    exact.train_step(shard)
    gradients = exact.updates[0]
    backend = build({**ENGINE, **FP8}, seq_len=128, pad_to_multiple_of=1)
    spread = type(backend._policy).taken

    def looked_at(policy: Any, given: Any, *told: Any) -> Any:
        seen.append(given.ids.shape[1])
        return spread(policy, given, *told)

    monkeypatch.setattr(type(backend._policy), "taken", looked_at)
    np.testing.assert_allclose(backend.logprobs(shard), expected, atol=1e-5)
    backend.train_step(shard)
    assert distance(gradients, backend.updates[0]) < 1e-5
    assert set(seen) == {128}, "123 tokens"
    assert backend._policy.passing_shape(123) == (128, 1, 32)


@pytest.mark.parametrize("again", [False, True])
def test_log_probs_and_training_are_in_the_same_fp8_of_the_same_layers(build, monkeypatch, again: bool):
    """Each pass through a layer, one that computes it again, too, is in its layer's precision."""
    entered: list[int] = []

    def context(config: Any, number: int) -> AbstractContextManager[None]:
        assert (config.fp8, config.fp8_recipe) == ("e4m3", "tensorwise")
        entered.append(number)
        return nullcontext()

    monkeypatch.setattr(policy_module, "get_fp8_context", context)
    corrected = VARIANTS["sapo token mean, TIS"]  # asks for log-probs before the updates
    backend = build({**ENGINE, **FP8, "gradient_checkpointing": again}, seq_len=256, algorithm=corrected)
    backend.logprobs(make_shard())
    assert entered == [0, 1]
    entered.clear()
    backend.train_step(make_shard())
    assert entered == ([0, 1, 1, 0] if again else [0, 1])
    entered.clear()
    backend.train_step(in_minibatches(make_shard(2), (4, 4)))
    old_first = [0, 1] + ([0, 1, 1, 0] if again else [0, 1]) * 2
    assert entered == old_first, "the second minibatch's log-probs before the updates are in it, too"


def test_products_of_the_policy_alone_add_to_the_sums_of_gradients_themselves(build):
    backend = build({**ENGINE, "gradient_accumulation_fusion": True})
    adding = [module for module in backend._policy.modules() if getattr(module, "fuse_wgrad_accumulation", False)]
    assert len(adding) == 8, "four products of two layers"
    backend = build(ENGINE)
    assert not any(getattr(module, "fuse_wgrad_accumulation", False) for module in backend._policy.modules())


def test_the_modules_of_megatron_core_are_found_by_these_names():
    """With or without Transformer Engine itself."""
    found = engine_modules()
    assert found.norm_enters
    assert found.norm is found.head_norm
    assert None not in (found.norm, found.entering, found.leaving)
